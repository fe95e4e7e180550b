"""Equal weights are answered once, and no score is of other weights than training held.

Weights that change while an evaluation runs: tests/trial/test_weights_change.py.
"""

import json
import shutil

import pytest
from support import sites

from coordinator import hook
from coordinator.intake.checkpoint import inspect_checkpoint
from coordinator.trained_values import copy_values
from evaljobs.staging.fingerprint import SAMPLE_BYTES, SAVE_SUMS, content_of, hash_file, read_header

pytestmark = pytest.mark.model


def jobs(site, done):
    """Results of an evaluation, and kinds of jobs that it ran."""
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    root = site.work / results["evalspan"]["evaluation_id"]
    return results, {p.name.split("-")[2] for p in (root / "logs").iterdir()}


@pytest.mark.timeout(900)  # three evaluations
def test_a_touched_or_copied_checkpoint_of_equal_content_takes_the_answers(tmp_path, toy_model, warm):
    """A precursor hashes it while it copies, and no trial runs. Equal samples of other content are answered anew."""
    model = shutil.copytree(toy_model, tmp_path / "step-1")
    weights = model / "model.safetensors"
    site = sites.local(tmp_path, model, "--slots", "1", entries={"toy_choice": {"limit": 8}})
    site.env["EVALSPAN_TRIAL_PROLOGUE"] = warm
    try:
        first, kinds = jobs(site, site.run(site.evaluate()))
        assert "trial" in kinds
        before = first["evalspan"]
        assert before["checkpoint_content"]

        site.model = shutil.copytree(model, tmp_path / "another-name", copy_function=shutil.copyfile)
        copied, kinds = jobs(site, site.run(site.evaluate()))
        assert copied["evalspan"]["evaluation_id"] != before["evaluation_id"]
        assert "stage" in kinds
        assert not kinds & {"trial", "host", "metric"}
        assert copied["results"] == first["results"]
        assert set(copied["evalspan"]["responses_from"].values()) == {before["evaluation_id"]}
        assert copied["evalspan"]["checkpoint_content"] == before["checkpoint_content"]

        site.model = model
        place = unsampled(weights)
        with weights.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))
        edited, kinds = jobs(site, site.run(site.evaluate()))
        assert {"stage", "trial"} <= kinds
        assert edited["evalspan"]["checkpoint_content"] != before["checkpoint_content"]
        samples = [inspect_checkpoint(each).samples for each in (model, tmp_path / "another-name")]
        assert samples[0] == samples[1], "the samples did not tell"
    finally:
        site.end_workers()


def unsampled(weights):
    """A place of the largest tensor that no sample shows."""
    start, stop = max(read_header(weights).spans, key=lambda span: span[1] - span[0])
    assert stop - start > 2 * SAMPLE_BYTES
    return start


def test_the_hooks_hashes_say_at_acceptance_that_a_copy_is_the_same(tmp_path, toy_model, warm):
    """Then no job but the request set's runs, also without staging. Hashes older than the weights say nothing."""
    model = shutil.copytree(toy_model, tmp_path / "step-1")
    sums = {f.name: hash_file(model / f.name) for f in inspect_checkpoint(model).files}
    (model / SAVE_SUMS).write_text(json.dumps({"xxh3_128": sums}))
    entries = {"toy_choice": {"limit": 8}}
    site = sites.local(tmp_path, model, "--slots", "1", entries=entries, more="\n[stage]\nenabled = false\n")
    site.env["EVALSPAN_TRIAL_PROLOGUE"] = warm
    try:
        first, _ = jobs(site, site.run(site.evaluate()))
        assert (
            first["evalspan"]["checkpoint_content"] == content_of(sums) == inspect_checkpoint(model).content
        )
        site.model = shutil.copytree(model, tmp_path / "step-2", copy_function=shutil.copyfile)
        (site.model / SAVE_SUMS).touch()
        copied, kinds = jobs(site, site.run(site.evaluate()))
        assert not kinds & {"stage", "trial", "metric"}
        assert copied["results"] == first["results"]
        (model / "model.safetensors").touch()
        assert inspect_checkpoint(model).content is None
    finally:
        site.end_workers()


@pytest.mark.timeout(600)  # two daemons
def test_a_checkpoint_that_is_not_what_training_held_is_not_scored(tmp_path, toy_model):
    """The first trial ends the evaluation, and says which tensor and what to type; typed, it scores.

    Without values of that tensor, a warning of the report names it.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    work, name = tmp_path / "work", "model.layers.1.mlp.up_proj.weight"
    model = shutil.copytree(toy_model, tmp_path / "step-1")
    state = load_file(model / "model.safetensors")
    state[name] = state[name].flip(0)
    save_file(
        {key: each.contiguous() for key, each in state.items()}, model / "model.safetensors", {"format": "pt"}
    )
    site = sites.local(tmp_path, model, entries={"toy_choice": {"limit": 8}}, more="slots = 1\n")
    work.mkdir(mode=0o700)
    with torch.no_grad():
        hook.notify(
            model,
            1,
            str(site.suite),
            work_dir=work,
            rank=0,
            fingerprint=AutoModelForCausalLM.from_pretrained(toy_model),
        )
    assert hook.flush(60)
    try:
        done = site.run(site.command("daemon", "--until-idle"))
        failed = set(site.results()["failed"].values())
        trials = list((site.root() / "outcomes").glob("*-trial-*.failed.json"))
        others = {key: each for key, each in state.items() if key != name}
        (site.root() / "trained_values.jsonl").write_text(
            copy_values(others, str(model), 1, "core", 0)._text()
        )
        again = site.run(site.command("retry", site.root().name))
        site.run(site.command("daemon", "--until-idle"))
        report = site.run(site.command("report", site.root().name, "--json"))
    finally:
        site.end_workers()
    (said,) = failed
    assert f"wrong weights: {name} has" in said, done.stderr
    assert f"type `evalspan retry {site.root().name}`" in said
    assert len(trials) == 1
    assert again.returncode == 0, again.stderr
    assert site.results()["results"].keys() == {"toy_choice"}
    (warning,) = json.loads(report.stdout)["warnings"]
    assert warning.startswith(
        f"weights: {len(others)} of {len(state)} tensors of the checkpoint were compared"
    )
    assert warning.endswith(f"of this name, shape and kind: {name}")
