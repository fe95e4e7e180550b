"""Inspection of a checkpoint's folder: the files that inference needs, and whether they are complete.

Rule: reads names, sizes, JSON and safetensors headers, never weights. A folder that no trial could load is refused in one
line before anything is submitted. Weights are selected in transformers' order.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import os
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator import trained_values
from coordinator.base.words import CONTROL_CHARACTERS, first_of
from coordinator.decide.evaluation.records import is_snapshot
from coordinator.errors import OperatorError
from coordinator.hook import PIN_PREFIX
from evaljobs.contract.engine_traits import growing_rope
from evaljobs.contract.specs import CheckpointFile, CheckpointSpec, Weights
from evaljobs.staging.fingerprint import (
    HEADER_LIMIT,
    SAVE_SUMS,
    BadWeights,
    Tensors,
    checkpoint_identity,
    content_of,
    is_safe_name,
    weights_fingerprint,
)

CAUSAL = ("ForCausalLM", "LMHeadModel", "LMHead")
# Files that tokenizer and config loaders open by name; trainers' files match none of these.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*",
    "tekken.json",
    "*.tiktoken",
    "chat_template*",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
)
TOKENIZERS = ("tokenizer*.json", "tokenizer.model*", "vocab*", "spiece.model", "tekken.json", "*.tiktoken")
_ENDS = r"(?![0-9a-zA-Z]|[.,][0-9])"  # the complete number: not part of 1e3, 20k, 3,000 or 0.5
_STEP = re.compile(
    rf"(?:step|iter(?:ation)?|checkpoint|ckpt|(?<![a-z])ba)s?[-_=]?([0-9]+){_ENDS}", re.IGNORECASE
)
_EPOCH = re.compile(rf"epochs?[-_=]?([0-9]+){_ENDS}", re.IGNORECASE)
_ALONE = re.compile(r"^([0-9]+)(?:[-_][a-zA-Z]+)*$")
MOST_STEPS = 1 << 53  # every step up to it is exact as a float; a larger number in a name is no step
LOADED_AT_ONCE = 4  # tensors that transformers reads and converts concurrently
MOST_TEXT = 1000  # characters of an error
WRAPPERS = frozenset(trained_values.WRAPPERS)
DDP_PREFIX = "module."  # prefix of tensor names in DistributedDataParallel
PEFT_PREFIX = "base_model.model."  # prefix of tensor names in an adapter
# files of writers that are still writing, or have died
UNFINISHED_PATTERNS = ("*.tmp", "*.part", "*.incomplete", "*.lock")


class CheckpointError(OperatorError):
    """A folder that cannot be evaluated. One line: what is wrong and how to fix it."""

    def __init__(self, text: str) -> None:
        """Shorten `text` to one printable line, since it may quote a file."""
        short = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"
        super().__init__("".join(c if c.isprintable() else "?" for c in short))


def inspect_checkpoint(
    path: str | Path,
    *,
    allow_bin: bool = False,
    convert: str | None = None,
    step: int | None = None,
    weights: bool = True,
) -> CheckpointSpec:
    """Describe the checkpoint in `path`: the files that inference needs, their sizes, and its identity (no full read).

    `allow_bin` accepts pytorch_model.bin, which loading unpickles. `convert`: command for training's own format. `step` None:
    taken from the folder's name, but not from digits of a commit hash. `weights`: False leaves them out, even if there are
    none, since request sets depend only on config and tokenizer. Raises CheckpointError.
    """
    folder = _resolved(Path(path))
    if step is None and not is_snapshot(str(folder)):
        step = step_of(folder.name)
    with _refusing(folder):
        if convert is not None and not is_hugging_face(folder):
            return _inspect_raw(folder, convert, step)
        config = _config(folder)
        large, indexed = _weight_files(folder, allow_bin=allow_bin) if weights else ([], {})
        files, content = _described(folder, config, large)
        found = checkpoint_identity(files, folder)  # the only pass over the weights
        for name, listed in indexed.items():
            if lost := listed - found.tensors[name].keys():
                raise CheckpointError(f"{folder / name}: {min(lost)} is missing, although the index lists it")
        tensors = {name: each for of_file in found.tensors.values() for name, each in of_file.items()}
        if why := wrapped_name(tensors):
            raise CheckpointError(f"{folder}: {why}")
        return CheckpointSpec(
            source=str(folder),
            digest=found.digest,
            samples=found.samples,
            content=content,
            files=files,
            step=step,
            weights=_measured(tensors, config) if indexed else None,
            growing_rope=growing_rope(config),
        )


def sibling_folders(path: Path) -> str:
    """Return the siblings of a missing folder in parentheses, the most similar first; "" if none can be read."""
    try:
        names = [each.name for each in os.scandir(path.absolute().parent) if each.is_dir()]
    except OSError:
        return ""
    alike = sorted(names, key=lambda name: -difflib.SequenceMatcher(None, name, path.name).ratio())
    return f" (beside it: {first_of(alike, 3)})" if names else ""


def _resolved(path: Path) -> Path:
    """Return the folder that `path` names. Raise CheckpointError if it is missing or unreadable."""
    try:
        folder = path.resolve(strict=True)
        there = folder.is_dir()
        str(folder).encode()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{path}: no such folder{sibling_folders(path)}; name a checkpoint: a folder with config.json, safetensors and tokenizer"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:  # not UTF-8; circular links
        raise CheckpointError(f"{path}: not a path that a job could use ({error})") from error
    if not there:
        raise CheckpointError(f"{path}: is a file, not a folder: name the checkpoint's folder")
    if CONTROL_CHARACTERS.search(str(folder)):
        raise CheckpointError(f"{folder}: its path has a control character: rename the folder")
    return folder


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Turn every error of the inspection into a CheckpointError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename}: disappeared while the checkpoint was inspected") from error
    except BadWeights as error:
        raise CheckpointError(str(error)) from error
    except UnicodeError as error:
        raise CheckpointError(f"{folder}: a file name is not valid UTF-8") from error
    except RecursionError as error:
        raise CheckpointError(f"{folder}: one of its JSON files is nested too deeply") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror}") from error


def _inspect_raw(folder: Path, convert: str, step: int | None) -> CheckpointSpec:
    """Describe a checkpoint in training's own format (DCP, Megatron): all files below `folder`.

    Its identity covers the conversion command, names, sizes, mtimes and samples.
    """
    found = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(PIN_PREFIX))
    names = [p.relative_to(folder).as_posix() for p in found]
    if why := unfinished_file(names):
        raise CheckpointError(f"{folder}: {why}")
    files = tuple(_describe(folder, name, {}) for name in names)
    if not any(f.size for f in files):
        raise CheckpointError(f"{folder}: contains nothing to convert")
    rows = [(f.name, f.size, f.mtime_ns, weights_fingerprint(folder / f.name)[0]) for f in files]
    digest = hashlib.sha256(json.dumps([convert, *rows]).encode()).hexdigest()[:32]
    return CheckpointSpec(source=str(folder), digest=digest, files=files, step=step)


def unfinished_file(names: Iterable[str]) -> str:
    """Return evidence that a save is incomplete, from the paths of a checkpoint's files; "" if there is none. Pure."""
    if unfinished := [n for n in names if any(fnmatch.fnmatch(n, f"*{u}") for u in UNFINISHED_PATTERNS)]:
        return f"{min(unfinished)} looks unfinished"
    ends = {n.rpartition("/")[2] for n in names}
    if any(n.endswith(".distcp") for n in ends) and ".metadata" not in ends:
        return "incomplete: .metadata (written last) is missing"
    return ""


def is_hugging_face(path: str | Path) -> bool:
    """Return whether the folder, even if half-written, is in Hugging Face format and needs no conversion."""
    folder = Path(path)
    weights = ("model.safetensors", "model.safetensors.index.json")
    there = [os.path.exists(folder / name) for name in ("config.json", *weights)]  # noqa: PTH110 (False in a private folder)
    return there[0] and any(there[1:])


def step_of(name: str) -> int | None:
    """Return the training step in a checkpoint folder's name, e.g. 300 of "iter_0000300", "step-300-hf", "ep0-ba300" or
    "300".

    The number follows a word for a step (otherwise for an epoch), or begins a name without such a word. Numbers of a model's
    own name, as in "gpt2" or "Qwen3-8", and dates do not count.
    """
    found = _STEP.findall(name) or _EPOCH.findall(name) or _ALONE.findall(name)
    return int(found[-1]) if found and int(found[-1]) <= MOST_STEPS else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint's folder. Raise CheckpointError for anything else."""
    try:
        if path.stat().st_size > HEADER_LIMIT:
            raise CheckpointError(f"{path}: longer than {HEADER_LIMIT >> 20} MiB, too long for such a file")
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON (half-written?); save the checkpoint again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _config(folder: Path) -> dict[str, Any]:
    """Read the model's config, which must be of a causal language model."""
    if not (folder / "config.json").is_file():
        inside = sorted((one.parent.name for one in folder.glob("*/config.json")), key=lambda n: (len(n), n))
        hint = (
            "it contains an adapter: merge it into its model first"
            if (folder / "adapter_config.json").is_file()
            else "it contains GGUF files: name the Hugging Face folder that they were converted from"
            if any(folder.glob("*.gguf"))
            else f"it contains {', '.join(inside[-5:])}: name one of them"
            if inside
            else ""
        )
        raise CheckpointError(f"{folder}: no config.json; {hint or 'save the model with save_pretrained'}")
    config = read_json(folder / "config.json")
    architectures = config.get("architectures") or []
    auto_map = config.get("auto_map") or {}
    if not isinstance(architectures, list) or not isinstance(auto_map, dict):
        raise CheckpointError(
            f"{folder / 'config.json'}: architectures must be a list of names and auto_map a table; save the checkpoint again"
        )
    multimodal = isinstance(config.get("text_config"), dict)
    causal = any(
        str(name).endswith(CAUSAL) or (multimodal and str(name).endswith("ForConditionalGeneration"))
        for name in architectures
    )
    if not causal and "AutoModelForCausalLM" not in auto_map:
        named = ", ".join(map(str, architectures)) or "nothing"
        raise CheckpointError(
            f"{folder}: not a causal language model (architectures in config.json: {named})"
        )
    if kernel := _kernel_in(config):
        raise CheckpointError(
            f"{folder / 'config.json'}: names code on the Hugging Face hub, {kernel}; delete that key, and choose "
            "a kernel in [trial] model_args where you trust it"
        )
    return config


def _kernel_in(config: Mapping[str, Any]) -> str:
    """Return the hub repository whose kernel transformers would fetch and run, from the config or a part of it; "" if none."""
    for key, value in config.items():
        if isinstance(value, dict) and (found := _kernel_in(value)):
            return found
        named = list(value.values()) if isinstance(value, dict) else [value]
        if key.endswith(("attn_implementation", "experts_implementation")):
            return next((str(each) for each in named if "/" in str(each)), "")
    return ""


def _weight_files(folder: Path, *, allow_bin: bool) -> tuple[list[str], Mapping[str, set[str]]]:
    """Return the names of the weight files and their index, and of each safetensors file the tensors that the index lists."""
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        shards: dict[str, set[str]] = {single: set()}
        if not (folder / single).is_file():
            if not (folder / index).is_file():
                continue
            shards = _indexed(folder, index)
        names = [*([] if single in shards else [index]), *shards]
        if single.endswith(".safetensors"):
            return names, shards
        if not allow_bin:
            raise CheckpointError(
                f"{folder}: only .bin weights, which run code when they are loaded; convert them to safetensors or allow them"
            )
        for name in shards:
            if not zipfile.is_zipfile(folder / name):
                raise CheckpointError(f"{folder / name}: truncated, or saved by a torch before 1.6")
        return names, {}
    unfinished = [
        p.name for p in folder.iterdir() if any(fnmatch.fnmatch(p.name, u) for u in UNFINISHED_PATTERNS)
    ]
    why = f"; {min(unfinished)} looks unfinished" if unfinished else ""
    raise CheckpointError(f"{folder}: incomplete, no model.safetensors and no index of shards{why}")


def wrapped_name(tensors: Collection[str]) -> str:
    """Return an error if tensor names are those of a wrapper, which no loader finds; "" if they are a model's own."""
    found = next((name for name in tensors if not WRAPPERS.isdisjoint(name.split("."))), "")
    if not found and all(name.removeprefix(PEFT_PREFIX).startswith(DDP_PREFIX) for name in tensors):
        found = next(iter(tensors), "")
    how = "save the unwrapped model (of torch.compile model._orig_mod, of DDP model.module)"
    return f"its tensors are named as in a wrapped model, such as {found}: {how}" if found else ""


def _measured(tensors: Tensors, config: Mapping[str, Any]) -> Weights:
    """Measure the weights. `config`: of the model; older versions of transformers write its dtype as torch_dtype."""
    sizes: Counter[str] = Counter()
    for dtype, size in tensors.values():
        sizes[dtype] += size
    named = config.get("dtype") or config.get("torch_dtype")
    return Weights(
        sizes=dict(sizes),
        largest=sum(sorted((size for _, size in tensors.values()), reverse=True)[:LOADED_AT_ONCE]),
        dtype=named if isinstance(named, str) else None,
        quantized=bool(config.get("quantization_config")),
    )


def _indexed(folder: Path, index: str) -> dict[str, set[str]]:
    """Return shard file -> names of its tensors, from the index; each file exists."""
    table = read_json(folder / index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{folder / index}: has no weight_map")
    shards: dict[str, set[str]] = {}
    for tensor, name in table.items():
        if not isinstance(name, str) or not is_safe_name(name):
            raise CheckpointError(f"{folder / index}: names {name!r}, which is not a file of this folder")
        shards.setdefault(name, set()).add(tensor)
    for name in shards:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: incomplete, {index} names {name}, which is missing")
    return shards


def _described(
    folder: Path, config: Mapping[str, Any], large: Iterable[str]
) -> tuple[tuple[CheckpointFile, ...], str | None]:
    """Return the files that inference needs, and their content hash from the hook's hashes; None if one is missing, or a file
    was written later.
    """
    small = _small_files(folder, code="auto_map" in config or _tokenizer_has_code(folder))
    sums = _save_sums(folder)
    files = tuple(_describe(folder, name, sums) for name in sorted({*small, *large}))
    if not all(f.name in sums for f in files):
        return files, None
    written = (folder / SAVE_SUMS).stat().st_mtime_ns
    late = any(f.mtime_ns > written for f in files)
    return files, None if late else content_of({f.name: sums[f.name] for f in files})


def _small_files(folder: Path, *, code: bool) -> list[str]:
    """Return config and tokenizer files, and Python files if the model's or the tokenizer's config names them."""
    patterns = (*SMALL_FILES, "*.py") if code else SMALL_FILES
    names = [
        name
        for name in _names(folder)
        if any(fnmatch.fnmatch(name, p) and name.count("/") == p.count("/") for p in patterns)
        and not any(fnmatch.fnmatch(name, u) for u in UNFINISHED_PATTERNS)
    ]
    if not any(fnmatch.fnmatch(name, t) for name in names for t in TOKENIZERS):
        raise CheckpointError(f"{folder}: no tokenizer; save it beside the model (tokenizer.save_pretrained)")
    return names


def _tokenizer_has_code(folder: Path) -> bool:
    """Return whether the tokenizer names classes in Python files of the checkpoint. transformers reads its auto_map first."""
    place = folder / "tokenizer_config.json"
    return place.is_file() and "auto_map" in read_json(place)


def _names(folder: Path) -> Iterable[str]:
    for path in folder.iterdir():
        if path.is_file():
            yield path.name
    templates = folder / "additional_chat_templates"
    if templates.is_dir():
        yield from (f"{templates.name}/{p.name}" for p in templates.iterdir() if p.is_file())


def _foreign_link(folder: Path, name: str) -> Path | None:
    """Return a link in a file's path that was created by neither this user nor root."""
    place = folder
    for part in Path(name).parts:
        place /= part
        found = place.lstat()
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            return place
    return None


def _save_sums(folder: Path) -> dict[str, str]:
    """Return hashes that the hook wrote when the checkpoint was saved; empty if there are none."""
    if not (folder / SAVE_SUMS).is_file():
        return {}
    sums = read_json(folder / SAVE_SUMS).get("xxh3_128")
    if not isinstance(sums, dict):
        raise CheckpointError(f"{folder / SAVE_SUMS}: has no xxh3_128 table")
    return {str(name): str(value) for name, value in sums.items()}


def _describe(folder: Path, name: str, sums: dict[str, str]) -> CheckpointFile:
    name.encode()  # raises if JSON could not hold the name
    found = (folder / name).stat()
    if found.st_uid == os.geteuid() and not found.st_mode & 0o004 and (link := _foreign_link(folder, name)):
        raise CheckpointError(
            f"{link}: a link of another user to a file that only you may read: copy the checkpoint without it"
        )
    return CheckpointFile(name=name, size=found.st_size, mtime_ns=found.st_mtime_ns, xxh3_128=sums.get(name))
