"""Laws of a trial on several GPUs: it uses all that its job holds, or ends at once and says what to set."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaljobs.contract.specs import ModelOptions
from evaljobs.errors import OperatorError
from evaljobs.trial.engines.loading import import_engine
from evaljobs.trial.engines.spreading import bytes_by_device, check_spread, spread

devices = st.dictionaries(
    st.sampled_from([*(f"cuda:{i}" for i in range(8)), "cpu", "meta"]), st.integers(1, 10**12), min_size=1
)


@given(devices, st.integers(1, 8), st.booleans())
def test_a_trial_goes_on_only_with_weights_on_every_gpu_and_nowhere_else(
    there: dict[str, int], gpus: int, by_hand: bool
) -> None:
    """Weights elsewhere are the operator's choice by `max_cpu_memory`, or a refusal."""
    options = ModelOptions(model_args={"max_cpu_memory": "64GiB"} if by_hand else {"device_map": "auto"})
    on_gpus = [name for name in there if name.startswith("cuda")]
    elsewhere = len(on_gpus) < len(there)
    if len(on_gpus) >= gpus and (by_hand or not elsewhere):
        check_spread(there, options, gpus)
        return
    with pytest.raises(OperatorError, match=r"gpus_per_trial") as refused:
        check_spread(there, options, gpus)
    if by_hand or not elsewhere:
        assert f"on {len(on_gpus)} of the trial's {gpus} GPUs" in str(refused.value)


def test_engines_that_show_no_model_and_trials_without_gpus_are_not_checked() -> None:
    check_spread({}, ModelOptions(engine="vllm"), 4)
    check_spread({"cpu": 1}, ModelOptions(), 0)
    assert bytes_by_device(None) == {}
    assert bytes_by_device(object()) == {}


@pytest.mark.parametrize("engine", ["hf", "hf-auto", "huggingface"])
def test_hf_gets_the_arguments_of_lm_evals_own_command_and_no_others(engine: str) -> None:
    """`parallelize` where a trial has several GPUs; what the operator says stands."""
    options = ModelOptions(engine=engine, model_args={"dtype": "bfloat16"})
    assert spread(options, 4, "cuda") == {"dtype": "bfloat16", "parallelize": True}
    assert spread(options, 1, "cuda") == spread(options, 4, "cpu") == options.model_args
    said = ModelOptions(engine=engine, model_args={"device_map": "balanced"})
    assert spread(said, 2, "cuda") == {"device_map": "balanced", "parallelize": True}
    assert spread(ModelOptions(engine="mamba_ssm"), 2, "cuda") == {}


def test_a_model_that_lm_eval_offloads_is_seen_and_refused(toy_model: Path) -> None:
    """On a machine without GPUs `parallelize` leaves all weights on disk; a model on one device shows where it is."""
    model_class = import_engine("hf")
    rest = {"batch_size": 1, "max_batch_size": None, "device": "cpu"}
    plain = model_class.create_from_arg_obj({"pretrained": str(toy_model)}, rest)
    assert bytes_by_device(plain.model).keys() == {"cpu"}
    options = ModelOptions()
    given_ = {**spread(options, 2, "cuda"), "pretrained": str(toy_model)}
    offloaded = bytes_by_device(model_class.create_from_arg_obj(given_, rest).model)
    assert offloaded.keys() == {"meta"}
    with pytest.raises(
        OperatorError, match=r"do not fit the trial's 2 GPUs.* larger \[trial\] gpus_per_trial"
    ):
        check_spread(offloaded, options, 2)
