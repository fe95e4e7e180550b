"""Laws of trials with vLLM: lm-eval's own class of it runs on a fake of vLLM's surface (support/fake_vllm)."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from support.trials import built

from evaljobs.contract.names import ShardId
from evaljobs.contract.specs import ModelOptions
from evaljobs.errors import OperatorError
from evaljobs.lmeval.batches import Batch, Piece
from evaljobs.trial.engines import loading, vllm
from evaljobs.trial.engines.weights import BrokenWeightsError
from evaljobs.trial.shard_runner import RequestSet, run_shard

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.model
FAKE = Path(__file__).resolve().parents[1] / "support" / "fake_vllm"
OPTIONS = ModelOptions(engine="vllm", model_args={"max_model_len": 128}, threads=1)


@pytest.fixture(scope="module")
def fake():
    """The fake is what `import vllm` finds."""
    before = dict(os.environ)
    sys.path.insert(0, str(FAKE))
    try:
        yield FAKE
    finally:
        sys.path.remove(str(FAKE))
        os.environ.clear()
        os.environ.update(before)
        for name in [n for n in sys.modules if n.split(".")[0] == "vllm" or "vllm_causallms" in n]:
            del sys.modules[name]


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "fake.jsonl"))
    return tmp_path / "fake.jsonl"


def said(log, what):
    """The lines of the fake's log that have this key."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line for line in lines if what in line]


@pytest.fixture(scope="module")
def engine(fake, tiny_model_dir):
    return loading.load_engine(str(tiny_model_dir), OPTIONS, 2)


@pytest.fixture(scope="module")
def sets(fake, tiny_model_dir, tmp_path_factory):
    """Request sets of a few toy tasks, as they are built for vLLM, in batches of 2."""
    folder = tmp_path_factory.mktemp("sets")
    return {
        name: RequestSet(built(name, tiny_model_dir, folder, folder / name, OPTIONS)[name], 2)
        for name in ("toy_choice", "toy_pages", "toy_sums", "toy_sampled")
    }


def shard(sets, name, first=0, end=None):
    return f"{name}|{first}|{len(sets[name].index.requests) if end is None else end}"


def answers(engine, sets, text):
    record = run_shard(engine, sets[ShardId.parse(text).task], text, trial="t", seed=1234)
    return dict(record.responses)


@pytest.mark.parametrize("name", ["toy_choice", "toy_pages", "toy_sums", "toy_sampled"])
def test_a_shards_requests_are_submitted_at_once(engine, sets, log, name):
    """One submission for all batches of a shard: vLLM has no drained batches between them."""
    found = answers(engine, sets, shard(sets, name))
    (only,) = said(log, "submitted")
    assert len(found) == sum(sets[name].index.requests)
    assert only["submitted"] >= len(found)  # a text has a submission for each of its windows


@pytest.mark.parametrize("name", ["toy_choice", "toy_pages", "toy_sums", "toy_sampled"])
def test_answers_do_not_depend_on_how_requests_are_sharded(engine, sets, name):
    """Where vLLM's arithmetic does not depend on what it computes together, as the fake's, draws included."""
    count = len(sets[name].index.requests)
    whole = answers(engine, sets, shard(sets, name))
    cut = [answers(engine, sets, shard(sets, name, n, n + 1)) for n in reversed(range(count))]
    assert {index: answer for part in cut for index, answer in part.items()} == whole


def test_each_sampled_request_has_a_seed_of_its_own(engine, sets, log):
    """Clones of one prompt draw differently; requests that are not sampled have no seed."""
    for name in ("toy_sampled", "toy_sums"):
        answers(engine, sets, shard(sets, name))
    sampled, greedy = (line["seeds"] for line in said(log, "submitted"))
    assert None not in sampled
    assert len(set(sampled)) == len(sampled) == 3 * 6
    assert set(greedy) == {None}
    given = {"do_sample": True, "seed": 5}  # by the task: it is kept
    assert vllm._seeded(given, 1, 2, "a prompt") == given


def test_a_request_is_generated_with_its_own_settings(engine):
    """Also beside requests of other settings in one shard."""

    def batch(number, most):
        settings = {"until": ["zzz"], "do_sample": False, "max_gen_toks": most}
        pieces = [Piece("generate_until", number, number, "the river", length=2, settings=number)]
        return Batch(kind="generate_until", text=True, settings=settings, pieces=pieces)

    def asked(*batches):
        return dict(engine.answers(batches, [1] * len(batches), lambda _done: None))

    short, long = batch(0, 2), batch(1, 9)
    alone = asked(short) | asked(long)
    assert alone[0] != alone[1]
    assert asked(short, long) == alone


@pytest.mark.parametrize(
    ("given", "gpus", "made"),
    [
        ({}, 4, {"tensor_parallel_size": 4}),
        ({}, 1, {}),
        ({}, 0, {}),
        ({"tensor_parallel_size": 2}, 0, {"tensor_parallel_size": 2}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4, None),
    ],
)
def test_vllm_uses_all_gpus_of_its_trial(given, gpus, made):
    """By tensor parallelism, unless the settings divide them in another way; one that left some idle says what to set."""
    assert vllm.parallel_arguments(given, gpus) == (given if made is None else made)
    with pytest.raises(OperatorError, match=r"holds 4 GPUs and vLLM would use 2 .*gpus_per_trial = 2"):
        vllm.parallel_arguments({"tensor_parallel_size": 2}, 4)


def test_a_shard_that_is_given_up_leaves_no_request_in_the_engine(engine, sets, log):
    """It is given up between two steps, and the next shard's answers are those of a fresh engine."""
    expected = answers(engine, sets, shard(sets, "toy_sums", 0, 1))

    class GivenUpError(Exception):
        pass

    def tick(done, _of):
        if done == 1:
            raise GivenUpError

    with pytest.raises(GivenUpError):
        run_shard(engine, sets["toy_sums"], shard(sets, "toy_sums"), trial="t", seed=1, tick=tick)
    assert [line["internal"] for line in said(log, "aborted")] == [True]
    assert answers(engine, sets, shard(sets, "toy_sums", 0, 1)) == expected


def test_progress_is_told_before_each_step_and_in_whole_batches(engine, sets):
    """It never goes back, and has more looks than batches, so a long shard is not taken for a hung one."""
    seen = []
    of = len(sets["toy_sums"].index.requests)
    whole = shard(sets, "toy_sums")
    run_shard(engine, sets["toy_sums"], whole, trial="t", seed=1, tick=lambda done, _of: seen.append(done))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, of - 1)
    assert len(seen) > of


def test_checkpoints_of_one_shape_have_one_path_in_vllms_eyes(fake, tiny_model_dir, log):
    """vLLM names what it compiles after the path: a staged path holds the checkpoint's digest."""
    here = Path.cwd()
    loading.load_engine(str(tiny_model_dir), OPTIONS, 2)
    (line,) = said(log, "model")
    assert (line["model"], line["whole_path"]) == (".", str(tiny_model_dir))
    assert Path.cwd() == here


def test_one_gpu_takes_one_process(fake, tiny_model_dir, log):
    loading.load_engine(str(tiny_model_dir), OPTIONS, 2)
    assert [line["workers"] for line in said(log, "loaded")] == [[]]
    (line,) = said(log, "multiprocess")
    assert (line["multiprocess"], line["method"]) == (False, "spawn")


def test_likelihoods_are_computed_without_a_cache_of_prefixes(fake, tiny_model_dir, sets, log):
    """With it they depend on the order of requests (vLLM 42019). Who asks for it may generate, and has no likelihood."""
    engine = loading.load_engine(str(tiny_model_dir), OPTIONS, 2)
    engine.close()
    asked = ModelOptions(
        engine="vllm", model_args={**OPTIONS.model_args, "enable_prefix_caching": True}, threads=1
    )
    caching = loading.load_engine(str(tiny_model_dir), asked, 2)
    assert [line["caches"] for line in said(log, "caches")] == [False, True]
    assert answers(caching, sets, shard(sets, "toy_sums"))
    with pytest.raises(OperatorError, match="omit enable_prefix_caching"):
        answers(caching, sets, shard(sets, "toy_choice"))
    caching.close()


def test_weights_that_are_not_finite_are_not_loaded(fake, tiny_model_dir, tmp_path):
    """vLLM shows no module: the files are read."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model_dir, tmp_path / "model")
    tensors = load_file(place := tmp_path / "model" / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, place, metadata={"format": "pt"})
    with pytest.raises(BrokenWeightsError, match=r"1 of 64 values of model\.norm\.weight"):
        loading.load_engine(str(tmp_path / "model"), OPTIONS, 2)
