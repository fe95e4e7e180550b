"""Laws of loading: on the GPUs that the job asked for, all of them, with lm_eval's own arguments and random rows."""

import json
import shutil
import socket
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaljobs.contract.specs import ModelOptions
from evaljobs.errors import OperatorError
from evaljobs.trial.engines import loading
from evaljobs.trial.engines.loading import (
    UnfitError,
    bytes_by_device,
    check_gpus,
    check_spread,
    import_engine,
    spread_arguments,
)


def library(seen, *, cuda="12.9", hip=None):
    """What torch says of its build and of the node's GPUs."""
    counts = SimpleNamespace(is_available=lambda: seen > 0, device_count=lambda: seen)
    version = SimpleNamespace(cuda=cuda, hip=hip)
    return SimpleNamespace(version=version, cuda=counts, __version__="2")


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_trial_that_sees_fewer_gpus_than_it_asked_for_names_its_node(device, monkeypatch):
    """It would run on the CPU, hours instead of minutes, or out of memory."""
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "3")
    with pytest.raises(
        UnfitError, match=rf"{socket.gethostname()}: torch sees 0 of the 1 GPUs .*ROCR_VISIBLE_DEVICES=3"
    ):
        check_gpus(library(0), device, 1)
    with pytest.raises(UnfitError, match="sees 2 of the 4"):
        check_gpus(library(2, cuda=None, hip="6"), device, 4)
    check_gpus(library(4), device, 4)
    check_gpus(library(8), device, 1)


def test_trials_that_asked_for_none_or_chose_another_device_are_not_held_to_it():
    """Nor to weights on every GPU: an engine may show no model."""
    check_spread({}, ModelOptions(engine="vllm"), 4)
    check_spread({"cpu": 1}, ModelOptions(), 0)
    assert bytes_by_device(None) == bytes_by_device(object()) == {}
    check_gpus(library(0), None, 0)
    check_gpus(library(0), "cpu", 2)
    check_gpus(library(0), "xpu", 2)


@pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None, reason="torch has a GPU build"
)
def test_a_torch_without_gpu_support_is_for_the_operator_to_mend():
    """No node would do."""
    with pytest.raises(OperatorError, match=r"point \[trial\] python"):
        check_gpus(torch, None, 1)


devices = st.dictionaries(
    st.sampled_from([*(f"cuda:{i}" for i in range(8)), "cpu", "meta"]), st.integers(1, 10**12), min_size=1
)


@given(devices, st.integers(1, 8), st.booleans())
def test_a_trial_goes_on_only_with_weights_on_every_gpu_and_nowhere_else(there, gpus, by_hand):
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


@pytest.mark.parametrize("engine", ["hf", "hf-auto", "huggingface"])
def test_hf_gets_the_arguments_of_lm_evals_own_command_and_no_others(engine):
    """`parallelize` where a trial has several GPUs; what the operator says stands."""
    options = ModelOptions(engine=engine, model_args={"dtype": "bfloat16"})
    assert spread_arguments(options, 4, "cuda") == {"dtype": "bfloat16", "parallelize": True}
    assert spread_arguments(options, 1, "cuda") == spread_arguments(options, 4, "cpu") == options.model_args
    said = ModelOptions(engine=engine, model_args={"device_map": "balanced"})
    assert spread_arguments(said, 2, "cuda") == {"device_map": "balanced", "parallelize": True}
    assert spread_arguments(ModelOptions(engine="mamba_ssm"), 2, "cuda") == {}


def test_a_model_that_lm_eval_offloads_is_seen_and_refused(toy_model):
    """On a machine without GPUs `parallelize` leaves all weights on disk; a model on one device shows where it is."""
    model_class = import_engine("hf")
    rest = {"batch_size": 1, "max_batch_size": None, "device": "cpu"}
    plain = model_class.create_from_arg_obj({"pretrained": str(toy_model)}, rest)
    assert bytes_by_device(plain.model).keys() == {"cpu"}
    options = ModelOptions()
    given_ = {**spread_arguments(options, 2, "cuda"), "pretrained": str(toy_model)}
    offloaded = bytes_by_device(model_class.create_from_arg_obj(given_, rest).model)
    assert offloaded.keys() == {"meta"}
    with pytest.raises(
        OperatorError, match=r"do not fit the trial's 2 GPUs.* larger \[trial\] gpus_per_trial"
    ):
        check_spread(offloaded, options, 2)


def test_a_package_that_the_model_needs_and_the_interpreter_lacks_ends_at_once(toy_model, tmp_path):
    """All nodes share the interpreter of the trials: no other one has the package."""
    copy = shutil.copytree(toy_model, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(OperatorError, match=r"does not load .*ImportError: .*optimum"):
        loading.load_engine(str(copy), ModelOptions(device="cpu"), 1)


@pytest.mark.model
def test_the_rows_of_a_larger_tokenizer_are_those_of_lm_eval(model_dir, tmp_path):
    """An adapter whose tokenizer has more words than the model: lm-eval adds rows of random numbers."""
    from lm_eval.models.huggingface import HFLM
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens([f"word{i}" for i in range(model.config.vocab_size - len(tokenizer) + 40)])
    shutil.copytree(model_dir, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments = {"peft": str(tmp_path / "adapter"), "tokenizer": str(tmp_path / "tokenizer")}

    torch.manual_seed(1234)  # as simple_evaluate does
    theirs = HFLM(pretrained=str(tmp_path / "model"), **arguments, device="cpu", batch_size=1)
    expected = theirs.model.get_input_embeddings().weight
    assert len(expected) > model.config.vocab_size
    for _trial in range(2):
        torch.rand(7)  # other trials draw other numbers before
        engine = loading.load_engine(
            str(tmp_path / "model"), ModelOptions(model_args=arguments, device="cpu"), 1
        )
        assert torch.equal(engine.lm.model.get_input_embeddings().weight, expected)
        engine.close()
