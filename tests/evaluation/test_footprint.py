"""Laws of the memory that a checkpoint takes: no refusal of what may fit, and `--mem` that follows the weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, fake_node
from support.simulated.parts import record

from coordinator.allocation.allocate import Demand, Limits, allocate
from coordinator.cluster import NodeState
from coordinator.errors import OperatorError
from coordinator.evaluation.footprint import GB, GpuNeed, gpu_need, loaded_bytes
from coordinator.evaluation.job_specs import BASE_MEMORY_MB, asked, precursor_memory_mb, trial_memory_mb
from coordinator.evaluation.records import EvaluationRecord
from coordinator.intake.validate import check_cluster
from evaljobs.contract.specs import CheckpointFile, ModelOptions, Weights

TYPES = st.sampled_from(["", "t4", "a100", "nvidia_h100_80gb_hbm3", "h200", "t4+a100", "mine"])


def node(name: str, gpu_type: str, gpus: int = 8) -> NodeState:
    return replace(fake_node(name, gpus=gpus), gpu_type=gpu_type)


def of(
    sizes: dict[str, int], *, largest: int = 0, dtype: str | None = "bfloat16", **model: object
) -> EvaluationRecord:
    """An evaluation of a checkpoint with these weights."""
    plain = record(1)
    file = CheckpointFile(name="model.safetensors", size=sum(sizes.values()), mtime_ns=1)
    weights = Weights(sizes=sizes, largest=largest, dtype=dtype)
    return plain.model_copy(
        update={
            "checkpoint": plain.checkpoint.model_copy(update={"files": (file,), "weights": weights}),
            "model": ModelOptions(**model),
        }
    )


def with_gpus(evaluation: EvaluationRecord, gpus: int, **options: object) -> EvaluationRecord:
    options = {"gpus_per_trial": gpus, **options}
    return evaluation.model_copy(update={"options": evaluation.options.model_copy(update=options)})


needs = st.builds(
    GpuNeed,
    weights=st.integers(0, 3000 * GB),
    gpus=st.integers(1, 8),
    doubling=st.booleans(),
    gpu_gb=st.dictionaries(st.sampled_from(["mine", "h100", "T4"]), st.floats(0.5, 300), max_size=2),
)
nodes = st.lists(
    st.builds(node, st.sampled_from(["n1", "n2", "n3"]), TYPES, st.integers(0, 8)), unique_by=lambda n: n.name
)


@given(needs, nodes)
def test_the_number_of_gpus_that_a_refusal_names_would_not_be_refused(
    need: GpuNeed, there: list[NodeState]
) -> None:
    """Nor is one needed that is smaller; a node whose GPUs' memory is unknown refuses nothing."""
    said = need.refusal(there)
    able = [n for n in there if n.gpus >= need.gpus]
    if not able or any(need.memory(n) is None for n in able):
        assert said == ""
    if said and "set [trial] gpus_per_trial = " in said:
        count = int(said.split("set [trial] gpus_per_trial = ")[1].split(",")[0])
        assert replace(need, gpus=count).refusal(there) == ""
        assert count in (1, 2, 4, 8) or not need.doubling
        assert all(least >= count for n in there if n.gpus and (least := need.least(n)) is not None)
    elif said:
        assert all(
            replace(need, gpus=k).refusal(there)
            for k in ((1, 2, 4, 8) if need.doubling else range(1, 9))
            if any(n.gpus >= k for n in there)
        )


@given(needs, nodes)
def test_offers_leave_out_nodes_whose_gpus_are_too_small_and_say_so(
    need: GpuNeed, there: list[NodeState]
) -> None:
    """Unless all are: such an evaluation was accepted before its weights were known, and its trials say what happens."""
    demand = Demand(
        evaluation_id="e", priority=0, accepted_at=0, gpus=99, gpus_per_trial=need.gpus, in_use={}, need=need
    )
    offers = allocate(there, [demand], Limits(), gpus_in_use=0)["e"]
    free = allocate(there, [replace(demand, need=GpuNeed())], Limits(), gpus_in_use=0)["e"]
    if need.refusal(there):
        assert offers == free
        return
    small = {n.name for n in there if not need.holds(n)}
    assert [o for o in free if o.node not in small] == list(offers)
    for name in small & {o.node for o in free}:
        assert "GPUs too small for weights" in need.left_out(there)
        assert name in need.left_out(there)


def test_weights_too_large_are_refused_before_submission_with_the_gpus_that_hold_them() -> None:
    small, large = node("n1", "t4"), node("n2", "a100", gpus=4)
    seventy = of({"BF16": 141 * GB})
    with pytest.raises(
        OperatorError,
        match=r"^the weights take 141\.0 GB .* a trial's 1 GPU does not hold them \(nodes have 8 x t4 of 16 GB, "
        r"4 x a100 of 80 GB\): set \[trial\] gpus_per_trial = 2, which n2 has",
    ):
        check_cluster(FakeCluster(fleet=[small, large]), seventy)
    with pytest.raises(OperatorError, match="all GPUs of a node together do not hold them"):
        check_cluster(FakeCluster(fleet=[small]), seventy)
    said = check_cluster(FakeCluster(fleet=[small, large]), with_gpus(seventy, 2))
    assert said == "without n1 (t4 of 16 GB): GPUs too small for weights of 141.0 GB"
    assert check_cluster(FakeCluster(fleet=[node("n1", "mine")]), seventy) == ""
    stated = with_gpus(seventy, 1, gpu_memory_gb={"T4": 200})
    assert check_cluster(FakeCluster(fleet=[small, large]), stated).startswith("without n2 (a100 of 80 GB)")
    assert check_cluster(FakeCluster(fleet=[small]), of({"BF16": 141 * GB}, device="cpu")) == ""


@pytest.mark.parametrize(
    ("model", "loaded"),
    [
        ({}, 20),
        ({"model_args": {"dtype": "float32"}}, 40),
        ({"model_args": {"dtype": "torch.float16"}}, 20),
        ({"engine": "vllm"}, 20),
        ({"model_args": {"dtype": "odd"}}, None),
        ({"model_args": {"load_in_8bit": True}}, None),
        ({"model_args": {"device_map": {"": 0}}}, None),
        ({"engine": "an-engine-of-yours"}, None),
    ],
)
def test_weights_count_in_the_dtype_that_the_engine_loads(
    model: dict[str, object], loaded: int | None
) -> None:
    """That of the config with dtype "auto", as transformers has it; nothing is said of what an argument shrinks."""
    evaluation = of({"BF16": 20 * GB, "I64": 8}, **model)
    assert evaluation.checkpoint.weights is not None
    found = loaded_bytes(evaluation.checkpoint.weights, evaluation.model)
    assert found == (None if loaded is None else loaded * GB + 8)
    assert gpu_need(evaluation).weights == (found or 0)


def test_dtype_auto_is_the_configs_and_that_of_quantised_weights_is_their_own() -> None:
    stored = Weights(sizes={"F32": 40}, dtype="bfloat16")
    assert loaded_bytes(stored, ModelOptions()) == 20
    assert loaded_bytes(stored.model_copy(update={"dtype": None}), ModelOptions()) == 40
    wide = stored.model_copy(update={"dtype": "float32"})
    assert (loaded_bytes(wide, ModelOptions()), loaded_bytes(wide, ModelOptions(engine="vllm"))) == (40, 20)
    quantised = Weights(sizes={"I32": 10, "F16": 2}, dtype="float16", quantized=True)
    assert loaded_bytes(quantised, ModelOptions(model_args={"dtype": "float32"})) == 12


@given(st.integers(0, 300 * GB), st.integers(0, 10 * GB), st.sampled_from([None, "cpu"]), st.booleans())
def test_memory_that_jobs_ask_for_follows_the_weights_and_a_setting_stands(
    stored: int, largest: int, device: str | None, wide: bool
) -> None:
    """A precursor holds the files; a trial the tensors in conversion, on a CPU all of the weights; a build none."""
    args = {"dtype": "float32"} if wide else {}
    evaluation = of({"BF16": stored}, largest=min(largest, stored), device=device, model_args=args)
    times = 2 if wide else 1
    own = stored * times if device else min(largest, stored) * times
    assert trial_memory_mb(evaluation) >= BASE_MEMORY_MB + own // (1 << 20)
    assert trial_memory_mb(evaluation) <= BASE_MEMORY_MB + own // (1 << 20) + 1
    assert precursor_memory_mb(evaluation) << 20 > stored
    assert asked("build", evaluation.options)["memory_mb"] == BASE_MEMORY_MB
    kept = with_gpus(evaluation, 1, trial_memory_mb=123)
    assert trial_memory_mb(kept) == asked("build", kept.options)["memory_mb"] == 123
