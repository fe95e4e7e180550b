"""Inspects a checkpoint's folder: the files that inference needs, and whether they are complete.

Rule: reads names, sizes, JSON and safetensors headers, never weights. A folder that no trial could
load is refused in one line before anything is submitted. Weights are selected in transformers'
order.
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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator import trained_values
from coordinator.base.words import CONTROL, first_of
from coordinator.errors import OperatorError
from coordinator.evaluation.records import is_snapshot
from coordinator.hook import PIN_PREFIX
from evaljobs.contract.engine_traits import growing_rope
from evaljobs.contract.specs import CheckpointFile, CheckpointSpec, Weights
from evaljobs.staging.fingerprint import (
    HEADER_LIMIT,
    SAVE_SUMS,
    BadWeights,
    Header,
    content_of,
    fingerprint,
    identity,
    is_safe_name,
    read_header,
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
_ENDS = r"(?![0-9a-zA-Z]|[.,][0-9])"  # the number is whole: not that of 1e3, 20k, 3,000 or 0.5
_STEP = re.compile(
    rf"(?:step|iter(?:ation)?|checkpoint|ckpt|(?<![a-z])ba)s?[-_=]?([0-9]+){_ENDS}", re.IGNORECASE
)
_EPOCH = re.compile(rf"epochs?[-_=]?([0-9]+){_ENDS}", re.IGNORECASE)
_ALONE = re.compile(r"^([0-9]+)(?:[-_][a-zA-Z]+)*$")
LOADED_AT_ONCE = 4  # tensors that transformers reads and converts side by side
MOST_TENSORS = 1_000_000  # of all weight files together; a model of 10**12 parameters has some 10**5
MOST_TEXT = 1000  # most characters of an error
Headers = Mapping[str, Header]  # by file
WRAPPERS = frozenset(trained_values.WRAPPERS)
DDP = "module."  # begins the names of a model in DistributedDataParallel
PEFT = "base_model.model."  # begins the names of an adapter
UNFINISHED = ("*.tmp", "*.part", "*.incomplete", "*.lock")  # files of writers that still write, or died


class CheckpointError(OperatorError):
    """A folder that cannot be evaluated. One line: what is wrong and what to do."""

    def __init__(self, text: str) -> None:
        """`text` may quote a file: it is shortened and shown as one line."""
        short = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"
        super().__init__("".join(c if c.isprintable() else "?" for c in short))


def inspect(
    path: str | Path,
    *,
    allow_bin: bool = False,
    convert: str | None = None,
    step: int | None = None,
    weights: bool = True,
) -> CheckpointSpec:
    """Describe the checkpoint in `path`: the files that inference needs, their sizes, and its identity (no full read).

    `allow_bin` accepts pytorch_model.bin, which loading unpickles. `convert`: command for training's own format. `step`
    None: from the folder's name; digits of a commit's hash are none. `weights`: False leaves them out, also
    where there are none: request sets depend on config and tokenizer alone. Raises CheckpointError.
    """
    folder = _resolved(Path(path))
    if step is None and not is_snapshot(str(folder)):
        step = step_of(folder.name)
    with _refusing(folder):
        if convert is not None and not is_hugging_face(folder):
            return _inspect_raw(folder, convert, step)
        config = _config(folder)
        large, headers = _weights(folder, allow_bin=allow_bin) if weights else ([], {})
        small = _small_files(folder, code="auto_map" in config or _tokenizer_has_code(folder))
        sums = _save_sums(folder)
        files = tuple(_describe(folder, name, sums) for name in sorted({*small, *large}))
        found = identity(files, folder, headers)
        return CheckpointSpec(
            source=str(folder),
            digest=found.digest,
            samples=found.samples,
            content=_content(folder, files),
            files=files,
            step=step,
            weights=_sizes(headers, config) if headers else None,
            growing_rope=growing_rope(config),
        )


def beside(path: Path) -> str:
    """The folders beside a missing one, the most alike first, in brackets; "" where there is none, or none may be read."""
    try:
        names = [each.name for each in os.scandir(path.absolute().parent) if each.is_dir()]
    except OSError:
        return ""
    alike = sorted(names, key=lambda name: -difflib.SequenceMatcher(None, name, path.name).ratio())
    return f" (beside it: {first_of(alike, 3)})" if names else ""


def _resolved(path: Path) -> Path:
    """The folder that `path` names. CheckpointError where it is missing or unreadable."""
    try:
        folder = path.resolve(strict=True)
        there = folder.is_dir()
        str(folder).encode()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{path}: no such folder{beside(path)}; name a checkpoint: a folder with config.json, safetensors and tokenizer"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:  # no UTF-8 name; links in a circle
        raise CheckpointError(f"{path}: no folder that could be named to a job ({error})") from error
    if not there:
        raise CheckpointError(f"{path}: is a file, not a folder: name the checkpoint's folder")
    if CONTROL.search(str(folder)):
        raise CheckpointError(f"{folder}: its path has a control character: rename the folder")
    return folder


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Turn every error of the inspection into a CheckpointError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{error.filename}: it vanished during the inspection of the checkpoint"
        ) from error
    except BadWeights as error:
        raise CheckpointError(f"{folder}: {error}") from error
    except UnicodeError as error:
        raise CheckpointError(f"{folder}: a file's name is no text (UTF-8)") from error
    except RecursionError as error:
        raise CheckpointError(f"{folder}: a JSON file of it is nested too deeply") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror}") from error


def _inspect_raw(folder: Path, convert: str, step: int | None) -> CheckpointSpec:
    """Describe a checkpoint in training's own format (DCP, Megatron): all files below `folder`.

    Its identity covers the conversion command, names, sizes, mtimes and samples.
    """
    found = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(PIN_PREFIX))
    names = [p.relative_to(folder).as_posix() for p in found]
    if why := half_written(names):
        raise CheckpointError(f"{folder}: {why}")
    files = tuple(_describe(folder, name, {}) for name in names)
    if not any(f.size for f in files):
        raise CheckpointError(f"{folder}: holds nothing to convert")
    rows = [(f.name, f.size, f.mtime_ns, fingerprint(folder / f.name).hex()) for f in files]
    digest = hashlib.sha256(json.dumps([convert, *rows]).encode()).hexdigest()[:32]
    return CheckpointSpec(source=str(folder), digest=digest, files=files, step=step)


def half_written(names: Iterable[str]) -> str:
    """What tells that a save has not ended, by the paths of a checkpoint's files; "" where nothing does. Pure."""
    if unfinished := [n for n in names if any(fnmatch.fnmatch(n, f"*{u}") for u in UNFINISHED)]:
        return f"{min(unfinished)} looks unfinished"
    ends = {n.rpartition("/")[2] for n in names}
    if any(n.endswith(".distcp") for n in ends) and ".metadata" not in ends:
        return "incomplete, its .metadata (written last) is not there"
    return ""


def is_hugging_face(path: str | Path) -> bool:
    """Is the folder, perhaps half-written, in Hugging Face format, which needs no conversion?"""
    folder = Path(path)
    weights = ("model.safetensors", "model.safetensors.index.json")
    there = [os.path.exists(folder / name) for name in ("config.json", *weights)]  # noqa: PTH110 (False in a private folder)
    return there[0] and any(there[1:])


def step_of(name: str) -> int | None:
    """The training step in a checkpoint folder's name, e.g. 300 of "iter_0000300", "step-300-hf", "ep0-ba300" or "300".

    The number follows a word for a step (else for an epoch), or begins a name without another. So a number of the
    model's own name, as in "gpt2" or "Qwen3-8", and a date are none.
    """
    found = _STEP.findall(name) or _EPOCH.findall(name) or _ALONE.findall(name)
    return int(found[-1]) if found else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint's folder; CheckpointError where it is none."""
    try:
        if path.stat().st_size > HEADER_LIMIT:
            raise CheckpointError(f"{path}: longer than {HEADER_LIMIT >> 20} MiB, which no such file is")
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no valid JSON (half-written?); save the checkpoint again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return value


def _config(folder: Path) -> dict[str, Any]:
    """The model's config, of a causal language model."""
    if not (folder / "config.json").is_file():
        inside = sorted((one.parent.name for one in folder.glob("*/config.json")), key=lambda n: (len(n), n))
        hint = (
            "it holds an adapter: merge it into its model first"
            if (folder / "adapter_config.json").is_file()
            else "it holds GGUF files: name the Hugging Face folder that they were converted from"
            if any(folder.glob("*.gguf"))
            else f"it holds {', '.join(inside[-5:])}: name one of them"
            if inside
            else ""
        )
        raise CheckpointError(f"{folder}: no config.json; {hint or 'save the model with save_pretrained'}")
    config = read_json(folder / "config.json")
    architectures = config.get("architectures") or []
    auto_map = config.get("auto_map") or {}
    if not isinstance(architectures, list) or not isinstance(auto_map, dict):
        raise CheckpointError(
            f"{folder / 'config.json'}: architectures is no list of names, or auto_map no table; save the checkpoint again"
        )
    multimodal = isinstance(config.get("text_config"), dict)
    causal = any(
        str(name).endswith(CAUSAL) or (multimodal and str(name).endswith("ForConditionalGeneration"))
        for name in architectures
    )
    if not causal and "AutoModelForCausalLM" not in auto_map:
        named = ", ".join(map(str, architectures)) or "nothing"
        raise CheckpointError(
            f"{folder}: no causal language model (config.json's architectures name {named})"
        )
    if kernel := _kernel_in(config):
        raise CheckpointError(
            f"{folder / 'config.json'}: names code on the Hugging Face hub, {kernel}; delete that key, and choose "
            "a kernel in [trial] model_args where you trust it"
        )
    return config


def _kernel_in(config: Mapping[str, Any]) -> str:
    """The hub repository that transformers would fetch a kernel from and run, by the config or a part of it; "" for none."""
    for key, value in config.items():
        if isinstance(value, dict) and (found := _kernel_in(value)):
            return found
        named = list(value.values()) if isinstance(value, dict) else [value]
        if key.endswith(("attn_implementation", "experts_implementation")):
            return next((str(each) for each in named if "/" in str(each)), "")
    return ""


def _weights(folder: Path, *, allow_bin: bool) -> tuple[list[str], Headers]:
    """Names of the weight files, each checked against its own header and its index; the headers of safetensors."""
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
            return names, _headers(folder, shards)
        if not allow_bin:
            raise CheckpointError(
                f"{folder}: only .bin weights, which run code when they are loaded; convert them to safetensors or allow them"
            )
        for name in shards:
            if not zipfile.is_zipfile(folder / name):
                raise CheckpointError(f"{folder / name}: truncated, or saved by a torch before 1.6")
        return names, {}
    unfinished = [p.name for p in folder.iterdir() if any(fnmatch.fnmatch(p.name, u) for u in UNFINISHED)]
    why = f"; {min(unfinished)} looks unfinished" if unfinished else ""
    raise CheckpointError(f"{folder}: incomplete, no model.safetensors and no index of shards{why}")


def _headers(folder: Path, shards: Mapping[str, set[str]]) -> Headers:
    """Headers of safetensors. `shards`: file -> tensors that the index says it holds."""
    headers: dict[str, Header] = {}
    tensors: set[str] = set()
    for name, named in shards.items():
        try:
            headers[name] = read_header(folder / name)
        except BadWeights as error:
            raise CheckpointError(f"{folder / name}: truncated or damaged, {error}") from error
        if missing := named - headers[name].tensors.keys():
            raise CheckpointError(f"{folder / name}: lacks {min(missing)}, which the index says it holds")
        tensors |= headers[name].tensors.keys()
        if len(tensors) > MOST_TENSORS:
            raise CheckpointError(f"{folder}: has more than {MOST_TENSORS} tensors, which no model has")
    if wrapped := wrapped_name(tensors):
        raise CheckpointError(f"{folder}: {wrapped}")
    return headers


def wrapped_name(tensors: Iterable[str]) -> str:
    """Say that names of tensors are those of a wrapper, which no loader finds; "" where they are a model's own."""
    names = list(tensors)
    found = next((name for name in names if not WRAPPERS.isdisjoint(name.split("."))), "")
    if not found and names and all(name.removeprefix(PEFT).startswith(DDP) for name in names):
        found = names[0]
    how = "save the unwrapped model (of torch.compile model._orig_mod, of DDP model.module)"
    return f"its tensors have the names of a wrapped model, as {found}: {how}" if found else ""


def _sizes(headers: Headers, config: Mapping[str, Any]) -> Weights:
    """`config`: of the model; older versions of transformers write its dtype as torch_dtype."""
    sizes: Counter[str] = Counter()
    tensors = {name: tensor for header in headers.values() for name, tensor in header.tensors.items()}
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
    """Shard file -> names of its tensors, by the index; each file exists."""
    table = read_json(folder / index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{folder / index}: has no weight_map")
    shards: dict[str, set[str]] = {}
    for tensor, name in table.items():
        if not isinstance(name, str) or not is_safe_name(name):
            raise CheckpointError(f"{folder / index}: names {name!r}, which is no file of this folder")
        shards.setdefault(name, set()).add(tensor)
    for name in shards:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: incomplete, {index} names {name}, which is not there")
    return shards


def _small_files(folder: Path, *, code: bool) -> list[str]:
    """Config and tokenizer files; Python files where the model's or the tokenizer's config names them."""
    patterns = (*SMALL_FILES, "*.py") if code else SMALL_FILES
    names = [
        name
        for name in _names(folder)
        if any(fnmatch.fnmatch(name, p) and name.count("/") == p.count("/") for p in patterns)
        and not any(fnmatch.fnmatch(name, u) for u in UNFINISHED)
    ]
    if not any(fnmatch.fnmatch(name, t) for name in names for t in TOKENIZERS):
        raise CheckpointError(f"{folder}: no tokenizer; save it beside the model (tokenizer.save_pretrained)")
    return names


def _tokenizer_has_code(folder: Path) -> bool:
    """Does the tokenizer name classes in Python files of the checkpoint? transformers reads its auto_map first."""
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
    """The link on the way to a file of the folder that neither this user nor root has made."""
    place = folder
    for part in Path(name).parts:
        place /= part
        found = place.lstat()
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            return place
    return None


def _save_sums(folder: Path) -> dict[str, str]:
    """Hashes written by the hook when the checkpoint was saved; empty without them."""
    if not (folder / SAVE_SUMS).is_file():
        return {}
    sums = read_json(folder / SAVE_SUMS).get("xxh3_128")
    if not isinstance(sums, dict):
        raise CheckpointError(f"{folder / SAVE_SUMS}: holds no xxh3_128 table")
    return {str(name): str(value) for name, value in sums.items()}


def _content(folder: Path, files: Iterable[CheckpointFile]) -> str | None:
    """What the hook's hashes say of the whole checkpoint; None where one is missing, or a file was written later."""
    sums = {f.name: f.xxh3_128 for f in files if f.xxh3_128 is not None}
    if not all(f.name in sums for f in files):
        return None
    written = (folder / SAVE_SUMS).stat().st_mtime_ns
    return None if any(f.mtime_ns > written for f in files) else content_of(sums)


def _describe(folder: Path, name: str, sums: dict[str, str]) -> CheckpointFile:
    name.encode()  # raises where JSON could not hold the name
    found = (folder / name).stat()
    if found.st_uid == os.geteuid() and not found.st_mode & 0o004 and (link := _foreign_link(folder, name)):
        raise CheckpointError(
            f"{link}: a link of another user to a file that only you may read: copy the checkpoint without it"
        )
    return CheckpointFile(name=name, size=found.st_size, mtime_ns=found.st_mtime_ns, xxh3_128=sums.get(name))
