"""A trial answers no request with weights that were not announced."""

import shutil
from dataclasses import replace

import pytest
from support.trials import Evaluation

from coordinator.intake.checkpoint import inspect_checkpoint
from evaljobs.contract.outcomes import Failed, TrialEnded
from evaljobs.contract.storage import read_record
from evaljobs.staging.fingerprint import folder_identity, read_header
from evaljobs.trial.engines import loading
from evaljobs.trial.trial import Trial

pytestmark = pytest.mark.model


@pytest.fixture
def evaluation(shared_work, tiny_model_dir, tmp_path, request):
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    made = Evaluation(shared_work, model, request.node.name)
    made.fill()
    return made


@pytest.fixture
def adapter(tiny_model_dir, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    shutil.copy(tiny_model_dir / "model.safetensors", folder / "adapter_model.safetensors")
    return folder


def spec(evaluation, adapter):
    return evaluation.spec(
        checkpoint=inspect_checkpoint(evaluation.model), adapters={str(adapter): folder_identity(adapter)}
    )


def reverse(weights):
    """Write the last tensor anew, in place: a mapping of the file shows it."""
    start, stop = read_header(weights).spans[-1]
    with weights.open("r+b") as file:
        file.seek(start)
        data = file.read(stop - start)
        file.seek(start)
        file.write(data[::-1])


def failure(evaluation):
    failed = read_record(evaluation.paths.outcome("failed", "trial.0"), Failed)
    assert (failed.blame, failed.shard) == ("operator", None)
    assert "evaluate it again" in failed.error
    assert "\n" not in failed.error
    return failed


@pytest.mark.parametrize(
    ("which", "when"),
    [
        ("checkpoint", "before"),
        ("checkpoint", "while loading to a GPU"),
        ("checkpoint", "while answering"),
        ("adapter", "while loading"),
    ],
)
def test_weights_that_change_on_storage_answer_nothing(evaluation, adapter, monkeypatch, which, when):
    """Before loading, while loading, and on a CPU, whose weights are mapped files, also later: the trial fails in one line."""
    weights = (
        evaluation.model / "model.safetensors"
        if which == "checkpoint"
        else adapter / "adapter_model.safetensors"
    )
    made = spec(evaluation, adapter)
    trial = Trial(made, made.lanes[0])
    if when == "before":
        reverse(weights)
    elif when.startswith("while loading"):
        real = loading.load_engine

        def load(*args, **options):
            engine = real(*args, **options)
            reverse(weights)
            if when.endswith("GPU"):  # what it holds then is a copy, which later shards need not compare
                engine.loaded = replace(engine.loaded, gpus=1)
            return engine

        monkeypatch.setattr(loading, "load_engine", load)
    else:
        tick = trial._tick

        def change(done, of):
            if trial.shards == 1 and done == 0:
                reverse(weights)
            tick(done, of)

        monkeypatch.setattr(trial, "_tick", change)
    assert trial.perform() == 1
    assert str(weights if which == "checkpoint" else adapter) in failure(evaluation).error
    assert len(evaluation.dumped()) == (when == "while answering")
    assert not evaluation.queue.snapshot().claims


def test_weights_that_stay_are_answered_with(evaluation, adapter):
    """Also where a file that is no weight has been touched."""
    made = spec(evaluation, adapter)
    (evaluation.model / "config.json").touch()
    assert Trial(made, made.lanes[0]).perform() == 0
    assert read_record(evaluation.paths.outcome("trial-ended", "trial.0"), TrialEnded).reason == "drained"
    assert sorted(evaluation.dumped()) == sorted(evaluation.shards)
