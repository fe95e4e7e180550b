"""Wrong weights are found by values that training took of its own memory, and right ones are never refused."""

import contextlib
import copy
import itertools
import json
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from coordinator import hook
from coordinator import trained_values as taking
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import CheckpointSpec, ModelOptions, TrialSpec
from evaljobs.errors import OperatorError, RetryError
from evaljobs.trial.trained_values import (
    check_trained_values,
    compare_parts,
    in_few_words,
    read_parts,
    stored_tensors,
)

pytestmark = pytest.mark.model

WIDTH, HEADS, LAYERS = 32, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)


class Model(nn.Module):
    """A small transformer's parameters. `tied`: the head has the embedding's weights."""

    def __init__(self, seed=0, *, tied=False, words=50):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for own in self.parameters():
            own.data += 0.02 * torch.randn(own.shape)


def taken(model, rank=0):
    return taking.copy_values(model, "/c", 1, "core", rank)._text().encode()


def saved(folder, state, files=1):
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(state)
    for number in range(files):
        own = {name: state[name].contiguous().clone() for name in names[number::files]}
        save_file(own, folder / f"model-{number}.safetensors")
    return folder


def swapped(first, second):
    return lambda state: {**state, first: state[second], second: state[first]}


def changed(name, how):
    return lambda state: {**state, name: how(state[name])}


def every(how):
    return lambda state: {name: how(tensor) for name, tensor in state.items()}


def part(old):
    """The last quarter of the rows, as a shard of four ranks, is another."""
    return lambda t: torch.cat([t[: len(t) * 3 // 4], old(t)[len(t) * 3 // 4 :]])


def earlier(t):
    """As an optimizer's step of 1e-3 before."""
    return t - 1e-3 * torch.sign(torch.randn(t.shape, generator=torch.Generator().manual_seed(1)))


def shuffled(blocks):
    """The last two of so many blocks of rows change places."""

    def how(t):
        *first, last, other = t.chunk(blocks)
        return torch.cat([*first, other, last])

    return how


def truncated(t):
    return (t.view(torch.int32) & -65536).view(torch.float32)


def eight_bits(t):
    return (t / t.abs().max() * 127).round() / 127 * t.abs().max()


Q = "layers.1.q.weight"
# fmt: off
WRONG = {
    "a tensor swapped with another layer's": swapped(Q, "layers.2.q.weight"),
    "queries and keys swapped": swapped(Q, "layers.1.k.weight"),
    "gate and up swapped": swapped("layers.0.gate.weight", "layers.0.up.weight"),
    "a bias of another layer": changed("layers.1.q.bias", lambda t: t.roll(1)),
    "layers in another order": lambda s: {n.replace("layers.0", "layers.x").replace("layers.2", "layers.0").replace("layers.x", "layers.2"): t for n, t in s.items()},
    "all of another step": every(earlier),
    "one tensor of another step": changed("layers.2.up.weight", earlier),
    "one shard of another step": every(part(earlier)),
    "one shard of one tensor of another step": changed(Q, part(earlier)),
    "zeros": changed(Q, torch.zeros_like),
    "a shard of zeros": changed("embed.weight", part(torch.zeros_like)),
    "NaN": changed(Q, lambda t: t * float("nan")),
    "transposed": changed(Q, torch.t),
    "cast through float8 e4m3": every(lambda t: t.to(torch.float8_e4m3fn).float()),
    "one tensor cast through float8 e5m2": changed("layers.0.up.weight", lambda t: t.to(torch.float8_e5m2).float()),
    "quantised to 8 bits and back": changed("layers.0.gate.weight", eight_bits),
    "truncated to bfloat16, not rounded": every(truncated),
    "shards of tensor parallelism in another order": changed("layers.2.gate.weight", shuffled(2)),
    "two heads changed places": changed(Q, shuffled(HEADS)),
    "columns shifted by one": changed(Q, lambda t: t.roll(1, dims=-1)),
    "scaled by 1.01": changed(Q, lambda t: t * 1.01),
    "another sign": changed(Q, torch.neg),
    "initialised anew": changed("head.weight", lambda t: 0.02 * torch.randn(t.shape)),
    "a norm back at ones": changed("layers.1.norm.weight", torch.ones_like),
    "an average of earlier weights": every(lambda t: t - 0.01 * torch.sign(t) * t.abs().mean()),
    "an adapter merged": changed("layers.0.o.weight", lambda t: t + 1e-2 * torch.outer(torch.randn(WIDTH), torch.randn(WIDTH))),
    "noise of a hundredth": changed("embed.weight", lambda t: t + 0.01 * t.std() * torch.randn(t.shape)),
}
# fmt: on


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("loaded", [False, True], ids=["files", "loaded"])
def test_each_kind_of_wrong_weights_is_found_and_its_tensors_are_named(tmp_path, kind, loaded):
    """Saved in bfloat16 by a training in float32. The tensors named are those that are wrong, and no others."""
    model = Model()
    right = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    torch.manual_seed(5)
    state = {name: tensor.bfloat16() for name, tensor in WRONG[kind](right).items()}
    files = stored_tensors(saved(tmp_path / "c", state, files=2))
    served = files
    if loaded:
        other = Model().bfloat16()
        other.load_state_dict(state)
        served = dict(other.named_parameters())
    wrong, checked = compare_parts(list(read_parts(taken(model))), served, files)
    differ = {name for name in right if not torch.equal(right[name].bfloat16(), state[name])}
    assert wrong
    assert wrong.keys() == differ
    assert checked == right.keys()


KINDS = (torch.float32, torch.bfloat16, torch.float16)
WRAPPED = ("{}", "module.{}", "_orig_mod.{}", "module._orig_mod.{}", "_fsdp_wrapped_module.{}")


@pytest.mark.parametrize("seed", range(200))
def test_right_weights_are_never_refused(tmp_path, seed):
    """Whatever training holds, saves, and loads; tied or not, in several files, below wrappers' names; masters in the file."""
    draw = random.Random(seed)
    model = Model(seed, tied=draw.random() < 0.3, words=draw.randrange(3, 90))
    for own in model.parameters():
        own.data *= 10.0 ** draw.randrange(-9, 4)  # also what float16 cannot hold
    trained, kept, loaded = (draw.choice(KINDS) for _ in range(3))
    masters = draw.random() < 0.3  # of float32, saved as they are
    kept = torch.float32 if masters else kept
    held = copy.deepcopy(model).to(trained)
    state = {name: own.detach().to(kept) for name, own in (model if masters else held).named_parameters()}
    own = {draw.choice(WRAPPED).format(name): tensor for name, tensor in held.named_parameters()}
    parts = list(read_parts(taken(held if draw.random() < 0.5 else own)))
    files = stored_tensors(saved(tmp_path / "c", state, files=draw.randrange(1, 4)))
    served = {name: tensor.to(loaded) for name, tensor in state.items()}
    for each in (files, served):
        wrong, checked = compare_parts(parts, each, files)
        assert wrong == {}
        unknown = each is served and kept == torch.float32 != trained and loaded not in (kept, trained)
        assert checked == (set() if unknown else state.keys())


def test_parts_of_several_ranks_are_one_tensor():
    """In rows and in columns; a wrong value is found in whichever part it lies; with a part missing it is not checked."""
    whole = torch.randn(12, 10)
    lines = []
    for rank, (row, column) in enumerate(itertools.product((0, 6), (0, 5))):
        own = whole[row : row + 6, column : column + 5].contiguous()
        (line,) = json.loads(taken({"w": own}))["groups"]
        line["rows"][0] |= {"shape": [12, 10], "offset": [row, column]}
        lines.append(json.dumps({"at": rank, "groups": [line]}))
    parts = list(read_parts("\n".join(lines).encode()))
    nothing = {}
    assert compare_parts(parts, {"w": whole}, nothing) == ({}, {"w"})
    assert compare_parts(parts[:3], {"w": whole}, nothing) == ({}, set())
    assert sorted(torch.cat([p.positions for p in parts]).tolist()) == list(range(120))
    for place in (3, 57, 64, 119):
        other = whole.clone()
        other.view(-1)[place] += 1
        assert set(compare_parts(parts, {"w": other}, nothing)[0]) == {"w"}


def test_what_is_renamed_fused_reshaped_or_quantised_is_not_checkable(tmp_path):
    kinds = {"a": torch.randn(4, 4), "b": torch.randn(4, 4), "c": torch.randn(4, 4), "d": torch.randn(6)}
    parts = list(read_parts(taken({**kinds, "e": torch.arange(4), "f": torch.randn(8, 4).t()})))
    state = {
        "a": kinds["a"],
        "bc": torch.cat([kinds["b"], kinds["c"]]),
        "c": kinds["c"].to(torch.float8_e4m3fn),
    }
    files = stored_tensors(saved(tmp_path / "c", {**state, "d": kinds["d"][:5]}))
    assert compare_parts(parts, files, files) == ({}, {"a"})


def test_at_most_a_megabyte_is_taken_and_every_row_and_column_may_be_seen():
    """Of many tensors fewer values each; positions of a tensor depend on its name alone, and are spread over all of it."""
    few = {f"layer.{i}": torch.zeros(640, 768) for i in range(2)}
    for group in json.loads(taken(few))["groups"]:
        assert [row["number"] for row in group["rows"]] == [taking.MOST_VALUES] * 2
    many = {str(i): torch.zeros(300) for i in range(3000)}
    held = taking.copy_values(many, "/c", 1, "core", 0)
    assert sum(host.numel() * host.element_size() for _, host in held.groups) <= taking.MOST_BYTES
    (one, two) = read_parts(taken(few))
    assert not torch.equal(one.positions, two.positions)
    rows, columns = one.positions // 768, one.positions % 768
    assert int(rows.diff().max()) <= 2 * 640 // taking.MOST_VALUES
    assert len(columns.unique()) == taking.MOST_VALUES


# --- what a trial says of it ---------------------------------------------------------------------------------------------


def trial(tmp_path, state, stored=None):
    """A trial on staged weights; `stored`: those on storage, where they are others."""
    paths = EvaluationPaths(tmp_path / "work" / "id")
    paths.root.mkdir(parents=True)
    source = saved(tmp_path / "storage", state if stored is None else stored)
    return paths, TrialSpec(
        name="t",
        evaluation_dir=str(paths.root),
        evaluation_id="id",
        node="n1",
        model_path=str(saved(tmp_path / "staged", state)),
        checkpoint=CheckpointSpec(source=str(source), digest="d", files=()),
        model=ModelOptions(),
        batch_size=1,
        request_sets={},
        redis_file="",
        lanes=(),
    )


def test_wrong_weights_are_the_checkpoints_fault_or_one_nodes(tmp_path):
    """Wrong on storage too: an operator must act, and knows the tensor and what to type. Right there: another node may do."""
    model = Model()
    right = {name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}
    wrong = {**right, Q: torch.zeros_like(right[Q])}
    paths, spec = trial(tmp_path / "a", wrong)
    assert check_trained_values(paths, spec, None) == "", "training left nothing"
    paths.trained_values.write_bytes(taken(model))
    with pytest.raises(
        OperatorError, match=rf"wrong weights: {Q} has 0 at \[\d+, \d+\], where training had"
    ) as said:
        check_trained_values(paths, spec, None)
    assert f"remove {paths.trained_values} and type `evalspan retry id`" in str(said.value)
    paths, spec = trial(tmp_path / "b", wrong, stored=right)
    paths.trained_values.write_bytes(taken(model))
    with pytest.raises(RetryError, match="those on this node do not"):
        check_trained_values(paths, spec, None)


def test_a_flipped_tie_is_the_configs_fault(tmp_path):
    """The file holds the head that training had, and the model that is loaded of it another: no node would do."""
    model, tied = Model(), Model(tied=True)
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    tied.load_state_dict(
        {name: tensor for name, tensor in state.items() if name != "head.weight"}, strict=False
    )
    paths, spec = trial(tmp_path, state)
    paths.trained_values.write_bytes(taken(model))
    with pytest.raises(OperatorError, match=r"head.weight has .*tie_word_embeddings in config.json"):
        check_trained_values(paths, spec, tied)


def test_what_could_not_be_compared_is_said(tmp_path):
    model = Model(tied=True)
    state = {name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}
    paths, spec = trial(tmp_path, state)
    paths.trained_values.write_bytes(taken(model))
    assert (
        check_trained_values(paths, spec, None) == check_trained_values(paths, spec, model.bfloat16()) == ""
    )
    paths.trained_values.write_bytes(taken({name: t for name, t in state.items() if ".q." not in name}))
    said = check_trained_values(paths, spec, None)
    assert said.startswith(f"{len(state) - 6} of {len(state)} tensors of the checkpoint were compared")
    assert said.endswith(
        "kind: layers.0.q.bias, layers.1.q.bias, layers.2.q.bias, "
        + ", ".join(f"layers.{i}.q.weight" for i in range(3))
    )
    alike = [f"layers.{i}.{name}" for i in range(30) for name in ("q", "k")]
    assert list(in_few_words(["head", *alike[:2], *alike[2::2]])) == ["head", "layers.*.q (30)", "layers.0.k"]
    (group,) = json.loads(taken(state))["groups"]

    def with_row(**fields):
        rows = [{**row, **fields} for row in group["rows"]]
        return json.dumps({"groups": [{**group, "rows": rows}]}).encode()

    for broken in (
        *(b"", b"{", b"[" * 10_000, b'{"groups": 3}', b'{"groups": [{"dtype": "save"}]}'),
        *(with_row(number=1e999), with_row(first=10**400), with_row(first=0.5), with_row(part=["a"])),
        *(with_row(names=3), with_row(names=[[]])),
    ):
        paths.trained_values.write_bytes(broken)
        assert check_trained_values(paths, spec, None).startswith(("0 of", "training's recorded"))


# --- token ids and logits ------------------------------------------------------------------------------------------------


def pretrained(folder, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def tokenizer_of(folder, **changes):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **changes)


@contextlib.contextmanager
def autocast(model):
    """As accelerate does it: float32 parameters and logits, products in bfloat16."""
    own = model.forward

    def forward(*args):
        with torch.autocast("cpu", torch.bfloat16):
            found = own(*args)
        return SimpleNamespace(logits=found.logits.float())

    model.forward = forward
    yield
    model.forward = own


def test_right_logits_are_never_refused(tmp_path, tiny_model_dir):
    """In each pair of dtypes, also where training's products are coarser than its parameters. Training's modes stay."""
    tokenizer = tokenizer_of(tiny_model_dir)
    paths, spec = trial(tmp_path, stored_tensors(tiny_model_dir))
    for (trained, mixed), served in itertools.product(
        [*((kind, False) for kind in KINDS), (torch.float32, True)], KINDS
    ):
        model = pretrained(tiny_model_dir, trained)
        model.model.layers.train()
        modes = [module.training for module in model.modules()]
        with autocast(model) if mixed else contextlib.nullcontext():
            paths.trained_values.write_bytes(taken(hook.fingerprint_logits(model, tokenizer)))
        assert [module.training for module in model.modules()] == modes
        assert "logits" not in check_trained_values(
            paths, spec, pretrained(tiny_model_dir, served), tokenizer
        )


def with_bos(tokenizer):
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )


def rotated(tokenizer):
    from tokenizers import Tokenizer

    text = json.loads(tokenizer.backend_tokenizer.to_str())
    text["model"]["vocab"] = {
        word: i if i < 5 else 5 + (i - 4) % (len(text["model"]["vocab"]) - 5)
        for word, i in text["model"]["vocab"].items()
    }
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(text))


def other_eps(model, _tokenizer):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= 1000


LOGITS = r"wrong weights or settings of the model: logits differ from training's by .* rounding in float32 causes less than 0.0002\. Save"
# fmt: off
SETTINGS = {
    "rope_theta x 0.1": (lambda model, _tokenizer: model.model.rotary_emb.inv_freq.pow_(0.75), LOGITS),
    "rms_norm_eps x 1000": (other_eps, LOGITS),
    "a tensor initialised anew, below a new name": (lambda model, _tokenizer: torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight), LOGITS),
    "token ids rotated": (lambda _model, tokenizer: rotated(tokenizer), r"wrong tokenizer: token 0 of the text 'The capital of France is' is (\d+), where training had \d+ \(ids that differ: \d\d\d\)"),
    "a BOS added": (lambda _model, tokenizer: with_bos(tokenizer), r"token 0 of the text 'The capital of France is' is 0, where training had"),
    "another eos of the tokenizer": (lambda _model, tokenizer: setattr(tokenizer, "eos_token", "<s>"), r"wrong tokenizer: eos_token_id of the tokenizer is 0, where training had 1 \(ids that differ: 1\)\. Save"),
    "another eos of generation": (lambda model, _tokenizer: setattr(model.generation_config, "eos_token_id", [0, 2]), r"eos_token_id of the generation config is \[0, 2\], where training had 1 \(ids that differ: 1\)\. Save"),
}
# fmt: on


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_and_tokenizers_that_are_not_trainings_are_named(tmp_path, tiny_model_dir, kind):
    """Tensors are right, or have other names. Ids are compared also where an engine shows no module."""
    damage, words = SETTINGS[kind]
    model, tokenizer = pretrained(tiny_model_dir), tokenizer_of(tiny_model_dir)
    paths, spec = trial(tmp_path, stored_tensors(tiny_model_dir))
    (line,) = map(json.loads, taken(hook.fingerprint_logits(model, tokenizer)).splitlines())
    paths.trained_values.write_text(json.dumps({**line, "groups": []}))
    assert check_trained_values(paths, spec, model, tokenizer).startswith("0 of")
    damage(model, tokenizer)
    with pytest.raises(OperatorError, match=words):
        check_trained_values(paths, spec, model, tokenizer)
    if "tokenizer:" in words:
        with pytest.raises(OperatorError, match=words):
            check_trained_values(paths, spec, None, tokenizer)


def test_a_tokenizer_that_the_users_arguments_choose_is_a_warning(tmp_path, tiny_model_dir):
    """Also another id of padding, which no score depends on; what an engine cannot show; and a model that cannot be run."""
    model, tokenizer, state = (
        pretrained(tiny_model_dir),
        tokenizer_of(tiny_model_dir),
        stored_tensors(tiny_model_dir),
    )
    tokenizer.add_special_tokens({"pad_token": "</s>"})
    paths, spec = trial(tmp_path, state)
    paths.trained_values.write_bytes(taken(hook.fingerprint_logits(model, tokenizer)))
    assert check_trained_values(paths, spec, model, tokenizer) == ""
    assert check_trained_values(paths, spec, None) == (
        "training's token ids are not checkable with this engine; training's logits are not checkable with this engine or an adapter"
    )
    tokenizer.add_special_tokens({"pad_token": "<s>"})
    assert (
        check_trained_values(paths, spec, model, tokenizer)
        == "pad_token_id of the tokenizer is 0, where training had 1"
    )
    tokenizer.add_special_tokens({"pad_token": "</s>"})
    with_bos(tokenizer)
    chosen = spec.model_copy(update={"model": ModelOptions(model_args={"add_bos_token": True})})
    said = check_trained_values(paths, chosen, model, tokenizer)
    assert said.startswith("token 0 of the text 'The capital of France is' is 0, where training had ")
    assert said.endswith(" (add_bos_token in model_args)")
    assert hook.fingerprint_logits(state, tokenizer) is state


def test_a_trial_of_an_engine_without_torch_loads_none(tmp_path):
    """Where training left no values, the comparison costs no import: an engine may need no torch."""
    program = (
        "import sys\n"
        "from evaljobs.contract.paths import EvaluationPaths\n"
        "from evaljobs.trial import trial, trained_values\n"
        "print(repr(trained_values.check_trained_values(EvaluationPaths(sys.argv[1]), None, None)), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["''", "False"]
