"""Kinds of wrong checkpoints, and how a trial finds each: `bench_exactness --wrong-weights`.

Rule: a kind damages a copy of a healthy folder; a trial's own loading and checks then run on it in this process. Found by
"loading": without a fingerprint; "fingerprint": values of tensors; "logits": what `fingerprint_logits` adds (token ids, special
ids, logits); "never". Two kinds are healthy, and must pass.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.harness import say
from coordinator import hook, trained_values
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import CheckpointSpec, ModelOptions, TrialSpec
from evaljobs.errors import JobError, one_line
from evaljobs.trial.engines import loading
from evaljobs.trial.trained_values import check_trained_values

State = dict[str, torch.Tensor]
Damage = Callable[[Path], None]
WEIGHTS = "model.safetensors"
EPSILON = "rms_norm_eps 1e-6 for 1e-5"
HEALTHY = ("an equal copy", "rounded to bfloat16 twice")
UNTIED = (
    "the head of an untied model is missing",
    "tie_word_embeddings flipped",
)  # of a model with a head of its own
LAYER = "model.layers.{}."
Q, K, V = (f"{LAYER.format(1)}self_attn.{name}_proj.weight" for name in "qkv")
UP = f"{LAYER.format(1)}mlp.up_proj.weight"


def tensors(how: Callable[[State], State]) -> Damage:
    """Rewrite the tensors of a folder."""

    def damage(folder: Path) -> None:
        state = how(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        own = {name: tensor.contiguous().clone() for name, tensor in state.items()}
        save_file(own, folder / WEIGHTS, {"format": "pt"})

    return damage


def changed(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return tensors(lambda state: {**state, name: how(state[name].clone())})


def element(value: Callable[[float], float]) -> Damage:
    """Change one element, at a place where no value is taken."""

    def how(tensor: torch.Tensor) -> torch.Tensor:
        first, stride, _ = trained_values._positions(UP, tensor.shape, trained_values.MOST_VALUES)  # noqa: SLF001
        place = next(i for i in range(tensor.numel() // 2, tensor.numel()) if (i - first) % stride)
        tensor.view(-1)[place] = value(float(tensor.view(-1)[place]))
        return tensor

    return changed(UP, how)


def swapped(first: str, second: str) -> Damage:
    """Exchange the tensors whose names hold `first` with those that hold `second` in its place."""

    def how(state: State) -> State:
        other = {first: second, second: first}
        return {
            next((name.replace(own, other[own]) for own in other if own in name), name): tensor
            for name, tensor in state.items()
        }

    return tensors(how)


def renamed(prefix: str) -> Damage:
    return tensors(lambda state: {prefix + name: tensor for name, tensor in state.items()})


def without(*names: str) -> Damage:
    return tensors(lambda state: {name: tensor for name, tensor in state.items() if name not in names})


def noisy(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Add normal noise, of this share of a tensor's standard deviation."""

    def how(tensor: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        return (tensor.float() + share * tensor.float().std() * drawn).to(tensor.dtype)

    return how


def earlier(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as before one step of Adam at a learning rate of 1e-3."""
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2))
    return (tensor.float() - 1e-3 * torch.sign(drawn)).to(tensor.dtype)


def stale_shard(folder: Path) -> None:
    """Split the tensors over two files, the second of which is of an earlier step."""
    state, place = load_file(folder / WEIGHTS), {}
    (folder / WEIGHTS).unlink()
    names = sorted(state)
    for number, own in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        shard = {name: (earlier(state[name]) if number else state[name]).clone() for name in own}
        save_file(shard, folder / file, {"format": "pt"})
        place |= dict.fromkeys(own, file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))


def heads_permuted(tensor: torch.Tensor) -> torch.Tensor:
    first, second, *others = tensor.split(
        64 if len(tensor) % 64 == 0 and len(tensor) > 64 else len(tensor) // 4
    )
    return torch.cat([second, first, *others])


def settings(file: str, how: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    """Rewrite fields of a JSON file of a folder."""

    def damage(folder: Path) -> None:
        text = json.loads((folder / file).read_text())
        (folder / file).unlink()
        (folder / file).write_text(json.dumps({**text, **how(text)}))

    return damage


def config(**fields: Any) -> Damage:
    return settings("config.json", lambda _text: fields)


def rope(how: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    return settings(
        "config.json",
        lambda text: {"rope_parameters": {**text["rope_parameters"], **how(text["rope_parameters"])}},
    )


def rotated(text: dict[str, Any]) -> dict[str, Any]:
    """Give each token but the added ones the next one's id."""
    special = {token["id"] for token in text["added_tokens"]}
    names = sorted((i, name) for name, i in text["model"]["vocab"].items() if i not in special)
    ids = [i for i, _ in names]
    rest = {name: i for name, i in text["model"]["vocab"].items() if i in special}
    moved = {name: i for (_, name), i in zip(names, ids[1:] + ids[:1], strict=True)}
    return {"model": {**text["model"], "vocab": rest | moved}}


def with_bos(text: dict[str, Any]) -> dict[str, Any]:
    bos = text["added_tokens"][1]
    own = {"id": bos["content"], "ids": [bos["id"]], "tokens": [bos["content"]]}
    start, single = (
        {"SpecialToken": {"id": bos["content"], "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    pair = [start, single, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {bos["content"]: own}
    return {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, single],
            "pair": pair,
            "special_tokens": special,
        }
    }


def three_more_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<more-1>", "<more-2>", "<more-3>"])
    for file in folder.glob("tokenizer*.json"):
        file.unlink()
    tokenizer.save_pretrained(folder)


def wrong_eos(folder: Path) -> None:
    """Name the first token as the end, in each file that names one."""
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    config(eos_token_id=tokens[0]["id"])(folder)
    settings("generation_config.json", lambda _text: {"eos_token_id": tokens[0]["id"]})(folder)
    settings("tokenizer_config.json", lambda _text: {"eos_token": tokens[0]["content"]})(folder)


def overflowed(state: State) -> State:
    """Cast as masters that are still multiplied by a loss scale: float16 ends at 65,504."""
    return {
        name: (tensor.float() * 65536).half() if name == UP else tensor.half()
        for name, tensor in state.items()
    }


KINDS: dict[str, Damage] = {
    "a tensor all NaN": changed(UP, lambda t: t * float("nan")),
    "one NaN": element(lambda _x: float("nan")),
    "one infinity": element(lambda _x: float("inf")),
    "one element x 1e4": element(lambda x: x * 1e4),
    "two tensors missing": without(Q, UP),
    "an unexpected tensor": tensors(
        lambda state: {**state, f"{LAYER.format(99)}mlp.up_proj.weight": state[UP]}
    ),
    "a mismatched shape": changed(UP, lambda t: t[:-1]),
    "names with _orig_mod.": renamed("_orig_mod."),
    "names with module.": renamed("module."),
    "the head of an untied model is missing": without("lm_head.weight"),
    "two layers swapped": swapped(LAYER.format(0), LAYER.format(1)),
    "keys and values swapped": swapped(K, V),
    "a square matrix transposed": changed(Q, torch.t),
    "a tensor of zeros": changed(UP, torch.zeros_like),
    "a tensor of an earlier step": changed(UP, earlier),
    "noise of 0.03 in a tensor": changed(UP, noisy(0.03)),
    "noise of 0.001 in a tensor": changed(UP, noisy(0.001)),
    "another sign": changed(UP, torch.neg),
    "heads permuted": changed(Q, heads_permuted),
    "rope_theta x 0.1": rope(lambda own: {"rope_theta": own["rope_theta"] * 0.1}),
    "rope scaling added": rope(lambda _own: {"rope_type": "linear", "factor": 4.0}),
    EPSILON: config(rms_norm_eps=1e-6),
    "rms_norm_eps 1e-2 for 1e-5": config(rms_norm_eps=1e-2),
    "another activation": config(hidden_act="gelu"),
    "a layer fewer": settings(
        "config.json", lambda text: {"num_hidden_layers": text["num_hidden_layers"] - 1}
    ),
    "tie_word_embeddings flipped": config(tie_word_embeddings=True),
    "token ids rotated": settings("tokenizer.json", rotated),
    "a BOS added": settings("tokenizer.json", with_bos),
    "another eos": wrong_eos,
    "tokens beyond the embeddings": three_more_tokens,
    "a cast to float16 with overflow": tensors(overflowed),
    "one file of an earlier step": stale_shard,
    "an equal copy": lambda _folder: None,
    "rounded to bfloat16 twice": tensors(
        lambda state: {n: t.bfloat16().float().bfloat16() for n, t in state.items()}
    ),
}


def healthy(model_dir: Path, folder: Path, dtype: str, *, untied: bool) -> bytes:
    """Write a healthy checkpoint, and return what training leaves of it."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    if untied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(noisy(0.5)(model.lm_head.weight.detach()))
    else:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.config.rms_norm_eps = 1e-5
    model.save_pretrained(folder, max_shard_size="50GB")
    tokenizer.save_pretrained(folder)
    started = time.monotonic()
    passed = hook.fingerprint_logits(model, tokenizer)
    say(f"fingerprint_logits: {time.monotonic() - started:.1f} s, {dtype}")
    return trained_values.copy_values(passed, str(folder), 1, "core", 0)._text().encode()  # noqa: SLF001


def found_by(folder: Path, trained: bytes, work: Path, dtype: str) -> tuple[str, str]:
    """How a trial finds that a checkpoint is wrong, and its words."""
    paths = EvaluationPaths(work)
    paths.root.mkdir(parents=True)
    paths.trained_values.write_bytes(trained)
    model = ModelOptions(device="cpu", model_args={"dtype": dtype})
    spec = TrialSpec(
        name="t",
        evaluation_dir=str(work),
        evaluation_id="id",
        node="n1",
        model_path=str(folder),
        checkpoint=CheckpointSpec(source=str(folder), digest="d", files=()),
        model=model,
        batch_size=1,
        request_sets={},
        redis_file="",
        lanes=(),
    )
    try:
        engine = loading.load_engine(str(folder), model, 1)
    except Exception as error:  # noqa: BLE001 (whatever ends a trial)
        return "loading", one_line(error)
    try:
        return "never", check_trained_values(paths, spec, engine.model, engine.tokenizer)
    except JobError as error:
        added = one_line(error).startswith(("wrong tokenizer", "wrong weights or settings"))
        return "logits" if added else "fingerprint", one_line(error)


def rows(model_dir: Path, scratch: Path, dtype: str, only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """A row a kind: how it was found. `expected`: the healthy kinds pass, and an epsilon that bfloat16's rounding hides."""
    passing = (*HEALTHY, EPSILON) if dtype != "float32" else HEALTHY
    trained = {
        untied: healthy(model_dir, scratch / f"healthy-{untied}", dtype, untied=untied)
        for untied in (False, True)
    }
    chosen = {k: damage for k, damage in KINDS.items() if not only or any(word in k for word in only)}
    for number, (kind, damage) in enumerate(chosen.items()):
        untied, folder = kind in UNTIED, scratch / "damaged"
        shutil.copytree(scratch / f"healthy-{untied}", folder)
        damage(folder)
        how, words = found_by(folder, trained[untied], scratch / f"work-{number}" / "id", dtype)
        shutil.rmtree(folder)
        yield {
            "kind": kind,
            "found_by": how,
            "words": words,
            "expected": (how == "never") == (kind in passing),
        }
