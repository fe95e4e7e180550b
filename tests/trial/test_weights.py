"""No score of broken weights: what loading, tensors, logits and likelihoods show ends an evaluation and names what is wrong."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.trials import OPTIONS, Evaluation, built

from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.specs import ModelOptions
from evaljobs.contract.storage import read_record
from evaljobs.errors import OperatorError
from evaljobs.lmeval.stub_model import make_stub_model
from evaljobs.requests.build import add_batches
from evaljobs.trial.engines import loading
from evaljobs.trial.engines.weights import BrokenWeightsError
from evaljobs.trial.shard_runner import RequestSet, run_shard

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
HALF = {"dtype": "float16"}


def edited(change):
    """`change`: of a checkpoint's tensors to others."""

    def edit(folder):
        file = folder / "model.safetensors"
        safetensors.save_file(change(dict(safetensors.load_file(file))), file, {"format": "pt"})

    return edit


def without(*names):
    return edited(lambda tensors: {name: value for name, value in tensors.items() if name not in names})


def values(value, count):
    """So many values of a tensor are this one."""
    return edited(
        lambda tensors: (
            tensors
            | {UP: torch.cat([torch.full((count,), value), tensors[UP].view(-1)[count:]]).view(128, 64)}
        )
    )


# how a checkpoint is damaged, the model arguments that it is loaded with, and what names the damage
AT_LOADING = {
    "two tensors are missing": (without(UP, NORM), {}, ["lacks model.layers.1", NORM]),
    "an untied head is missing": (without("lm_head.weight"), {}, ["lacks lm_head.weight"]),
    "a tensor is unexpected": (edited(lambda t: t | {"model.extra.weight": torch.ones(2)}), {}, ["contains model.extra.weight"]),
    "a tensor has another shape": (edited(lambda t: t | {NORM: torch.ones(3)}), {}, [NORM, "[3], not [64]"]),
    "a tensor is all NaN": (values(float("nan"), 8192), {}, [UP, "8192 of 8192"]),
    "one value is NaN": (values(float("nan"), 1), {}, [UP, "1 of 8192"]),
    "one value is infinite": (values(float("inf"), 1), {}, [UP, "1 of 8192"]),
    "float16 has no such value": (values(1e6, 1), HALF, [UP, "1 of 8192"]),
}  # fmt: skip


@pytest.mark.model
@pytest.mark.parametrize("kind", AT_LOADING)
def test_broken_weights_are_refused_when_they_are_loaded(kind, tiny_model_dir, tmp_path):
    damage, arguments, named = AT_LOADING[kind]
    damage(copied(tiny_model_dir, tmp_path))
    options = OPTIONS.model_copy(update={"model_args": arguments})
    with pytest.raises(BrokenWeightsError) as refused:
        loading.load_engine(str(tmp_path / "broken"), options, 2)
    assert all(text in str(refused.value) for text in named), refused.value


def copied(model, tmp_path):
    return shutil.copytree(model, tmp_path / "broken")


@pytest.mark.model
@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("task", ["toy_choice", "toy_pages", "toy_sums"])
def test_what_overflows_has_no_answer(task, mode, tiny_model_dir, tmp_path):
    """Each value is finite in float16, and activations are not: likelihoods, rolling ones and generated text fail."""
    edited(lambda tensors: tensors | {NORM: tensors[NORM] * 6e4, UP: tensors[UP] * 1e4})(
        copied(tiny_model_dir, tmp_path)
    )
    options = ModelOptions(device="cpu", threads=1, model_args=HALF)
    sets = built(task, tmp_path / "broken", tmp_path / "evaluation", tmp_path / "sets", options)
    cut, folder = ("fast-4096-2" if mode == "fast" else "2"), Path(sets[task])
    add_batches(folder, cut)
    engine = loading.load_engine(str(tmp_path / "broken"), options, 2)
    with pytest.raises(BrokenWeightsError, match=f"task {task}, document [0-9]+.*(nan|NaN|inf)"):
        run_shard(
            engine,
            RequestSet(folder, cut),
            str(ShardId(task, 0, 1, cut if mode == "fast" else "")),
            trial="t",
            seed=1,
        )


@pytest.mark.model
def test_a_whole_model_and_adapter_load(tiny_model_dir, tmp_path):
    """Also where the head is tied, as transformers says, and where torch.compile wraps the model."""
    adapter, whole = tmp_path / "adapter", loading.load_engine(str(tiny_model_dir), OPTIONS, 2).model
    peft.get_peft_model(whole, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)
    options = OPTIONS.model_copy(update={"model_args": {"peft": str(adapter)}})
    assert loading.load_engine(str(tiny_model_dir), options, 2)
    tied = copied(tiny_model_dir, tmp_path)
    without("lm_head.weight")(tied)
    config = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(config))
    assert loading.load_engine(str(tied), OPTIONS, 2)


@pytest.mark.model
def test_an_adapter_whose_names_are_not_found_is_refused(tiny_model_dir, tmp_path):
    """peft would go on with the base model. What intake refuses is in intake/test_checkpoint."""
    adapter, whole = tmp_path / "adapter", loading.load_engine(str(tiny_model_dir), OPTIONS, 2).model
    peft.get_peft_model(whole, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)
    file = adapter / "adapter_model.safetensors"
    named = {
        name.replace("model.model.", "model.other.model."): v
        for name, v in safetensors.load_file(file).items()
    }
    safetensors.save_file(named, file, {"format": "pt"})
    options = OPTIONS.model_copy(update={"model_args": {"peft": str(adapter)}})
    with pytest.raises(BrokenWeightsError, match=r"the adapter lacks .*q_proj.* and 1 more"):
        loading.load_engine(str(tiny_model_dir), options, 2)


@pytest.mark.model
def test_a_tokenizer_beyond_the_embeddings_is_refused_at_the_build(tiny_model_dir, tmp_path):
    """Before a GPU is asked for: the id, its token and the number of embeddings."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(copied(tiny_model_dir, tmp_path))
    with pytest.raises(OperatorError, match=r"ids up to \d+ \('<two>'\), and the model has \d+ embeddings"):
        built("toy_sums", tmp_path / "broken", tmp_path / "evaluation", tmp_path / "sets")


@pytest.mark.model
@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"dtpye": "float32"}, "unknown 'dtpye'; did you mean 'dtype'?"),
        ({"max_positon_embeddings": 64}, "did you mean 'max_position_embeddings'?"),
        ({"dtype": "flaot32"}, "torch has no dtype 'flaot32'"),
        ({"attn_implementation": "eager", "max_memory": {}, "rope_theta": 10000.0, "variant": None}, ""),
    ],
)
def test_a_misspelt_argument_of_the_model_is_refused_at_the_build(tiny_model_dir, args, says):
    """Before a GPU is asked for; what transformers or the config knows is none."""
    options = OPTIONS.model_copy(update={"model_args": args})
    with pytest.raises(OperatorError, match=re.escape(says)) if says else contextlib.nullcontext():
        make_stub_model(str(tiny_model_dir), options)


@pytest.mark.model
def test_an_argument_that_the_model_does_not_take_ends_its_first_trial(tiny_model_dir):
    """No node would load it: a retry would only hold GPUs."""
    options = OPTIONS.model_copy(update={"model_args": {"own_trick": 1}})
    with pytest.raises(OperatorError, match=r"does not load .* unexpected keyword argument 'own_trick'"):
        loading.load_engine(str(tiny_model_dir), options, 2)


@pytest.mark.model
def test_a_trial_says_that_no_task_may_have_a_score(shared_work, tiny_model_dir, tmp_path, request):
    """Its failure names no shard, so that no other trial tries it."""
    evaluation = Evaluation(shared_work, tiny_model_dir, request.node.name)
    evaluation.fill()
    without(NORM)(copied(tiny_model_dir, tmp_path))
    process = evaluation.start(model_path=str(tmp_path / "broken"))
    wait_until(lambda: process.poll() is not None, "the trial's end")
    failed = read_record(evaluation.paths.outcome("failed", "trial.0"), Failed)
    assert (failed.broken_weights, failed.shard, failed.blame) == (True, None, "operator")
