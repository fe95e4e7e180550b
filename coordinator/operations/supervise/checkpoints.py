"""The newest checkpoint of a training that is complete. Called by `supervision`.

Rule: names, sizes, headers, and tables of contents are read, never weights, and no code of a pickle is run. A checkpoint is
complete if it has what its own kind lists (an index, DCP's metadata, the ranks of DeepSpeed or Megatron, the file written
last), and every file that the complete ones before it have.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any

from coordinator.base.pickles import Stub, read_pickle
from coordinator.hook import PIN_PREFIX, SUMS_FILE
from coordinator.intake.checkpoint import step_of, unfinished_file
from coordinator.intake.folder_watch import is_unfinished
from evaljobs.staging.fingerprint import HEADER_LIMIT, BadWeights, read_header

EARLIER_CHECKPOINTS = (
    6  # earlier checkpoints that are looked at: what the complete ones all hold is expected of the next
)
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")  # what torch.save writes
MOST_PICKLED = 256 << 20  # bytes of a table of contents, beyond which it is not read
# Files whose number a table of contents gives. Ranks of other files are compared with the checkpoints before.
COUNTED_FILES = re.compile(
    r"\.distcp$|_(?:model|optim)_states\.pt$|-\d+-of-\d+\.(?:safetensors|bin)$|(?:^|/)mp_rank_"
)


def newest_complete(place: str) -> tuple[Path | None, list[str]]:
    """Return the complete checkpoint of the highest step, and why each newer one is incomplete. Raise OSError.

    `place`: a folder of checkpoints, or a glob. None if no checkpoint is complete.
    """
    found = sorted(_checkpoints(place), key=lambda path: (step_of(path.name), path.name))
    left: list[str] = []
    for end in range(len(found), 0, -1):
        complete: list[set[str]] = []
        why = ""
        for path in found[max(0, end - 1 - EARLIER_CHECKPOINTS) : end]:
            if not (why := missing_parts(path, complete)):
                complete.append(_names(path))
        if not why:
            return found[end - 1], left
        left.append(f"{found[end - 1]}: {why}")
    return None, left


def _checkpoints(place: str) -> Iterator[Path]:
    paths = Path("/").glob(place.lstrip("/")) if has_magic(place) else Path(place).iterdir()
    try:
        for path in paths:
            kept = path.suffix in (*TORCH_SUFFIXES, ".safetensors") or path.is_dir()
            if kept and step_of(path.name) is not None and not is_unfinished(path.name):
                yield path
    except FileNotFoundError:  # training creates it
        return


def missing_parts(path: Path, before: Sequence[set[str]] = ()) -> str:
    """Return what a checkpoint lacks, or "". It may be a file. `before`: names of earlier complete checkpoints' files."""
    try:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        if not files:
            return "it is empty"
        names = [f.relative_to(path).as_posix() for f in files if path.is_dir()]
        if why := unfinished_file(names) or next(
            (f"{f.name}: {why}" for f in files if (why := _damage(f))), ""
        ):
            return why
        if why := next(filter(None, _lacking(path, files)), ""):
            return why
        if before and (missing := set.intersection(*before) - _names(path)):
            return f"lacks {min(missing)}, which the checkpoints before have"
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    return ""


def _names(path: Path) -> set[str]:
    """Return its files, with STEP for its own step and N for numbers that a table of contents gives."""
    step = step_of(path.name)
    found = set()
    for file in path.rglob("*"):
        name = file.relative_to(path).as_posix()
        if file.is_file() and not name.startswith((PIN_PREFIX, SUMS_FILE)):
            name = re.sub(r"\d+", lambda number: "STEP" if int(number[0]) == step else number[0], name)
            found.add(re.sub(r"\d+", "N", name) if COUNTED_FILES.search(name) else name)
    return found


# --- tables of contents, by kind ------------------------------------------------------------------------------------------


def _lacking(path: Path, files: Sequence[Path]) -> Iterator[str]:
    """Yield what each kind's own table of contents lists but is missing."""
    for file in files:
        if file.name.endswith((".safetensors.index.json", ".bin.index.json")):
            index = json.loads(file.read_bytes())
            listed = index.get("weight_map") if isinstance(index, dict) else None
            if isinstance(listed, dict):
                yield _without(file, dict.fromkeys(map(str, listed.values()), 1))
        elif file.name == ".metadata":
            yield _without_parts_of_dcp(file)
        elif file.name == "training_args.bin" and not (file.parent / "trainer_state.json").exists():
            yield "lacks trainer_state.json, which Trainer writes last"
    for folder in sorted({file.parent for file in files}):
        if any(folder.glob("*.distcp")) and not (folder / ".metadata").exists():
            yield f"{folder.name} lacks .metadata, which is written last"
        yield _without_ranks_of_deepspeed(folder)
    yield _without_ranks_of_megatron(path)
    tracker = path.parent / "latest_checkpointed_iteration.txt"
    yield _behind(tracker, path)
    for folder in (path, *(f for f in path.glob("global_step*") if f.is_dir())):
        if any(folder.glob("*_states.pt")):
            yield _behind(folder.parent / "latest", folder)


def _without(table: Path, sizes: Mapping[str, int]) -> str:
    """Return the first file that a table lists and that is missing, or shorter than listed."""
    for name, size in sorted(sizes.items()):
        file = table.parent / name
        if not file.exists() or file.stat().st_size < size:
            return f"{name} is {'truncated' if file.exists() else 'missing'}, which {table.name} lists"
    return ""


def _without_parts_of_dcp(table: Path) -> str:
    head = _contents(table)
    if head is None:
        return f"{table.name} is truncated or damaged"
    sizes: dict[str, int] = {}
    for part in getattr(head, "storage_data", {}).values():
        ends = getattr(part, "offset", 0) + getattr(part, "length", 0)
        if (name := getattr(part, "relative_path", None)) is not None:
            sizes[name] = max(sizes.get(name, 0), ends)
    return _without(table, sizes)


def _without_ranks_of_deepspeed(folder: Path) -> str:
    models = sorted(folder.glob("*mp_rank_*_model_states.pt"))
    optimizers = {re.sub(r"^(?:bf16_|fp16_)", "", f.name) for f in folder.glob("*_optim_states.pt")}
    if not models:
        return f"{min(optimizers)} is there without model states" if optimizers else ""
    head = _contents(models[0])
    if not isinstance(head, dict) or not {"dp_world_size", "mp_world_size"} <= head.keys():
        return ""
    ranks = range(head["mp_world_size"])
    there = {f.name for f in models} | optimizers
    every = [(d, m) for d in range(head["dp_world_size"]) for m in ranks]
    expected = [f"mp_rank_{m:02d}_model_states.pt" for m in ranks]
    if models[0].name.startswith("zero_pp_rank_"):  # ZeRO 3
        expected = [f"zero_pp_rank_{d}_mp_rank_{m:02d}_model_states.pt" for d, m in every]
    if optimizers:
        expected += [f"zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt" for d, m in every]
    if (missing := next((name for name in expected if name not in there), None)) is None:
        return ""
    return f"{missing} is missing: {head['dp_world_size']} x {head['mp_world_size']} ranks saved it"


def _without_ranks_of_megatron(path: Path) -> str:
    folders = sorted(f for f in path.glob("mp_rank_*") if f.is_dir())
    if not folders:
        return ""
    names = set().union(*({file.name for file in folder.iterdir()} for folder in folders))
    for folder in folders:
        if missing := names - {file.name for file in folder.iterdir()}:
            return f"{folder.name} lacks {min(missing)}, which another rank has"
    head = _contents(folders[0] / "model_optim_rng.pt")
    args = head.get("args") if isinstance(head, dict) else None
    tensor, pipeline = (getattr(args, f"{kind}_model_parallel_size", None) for kind in ("tensor", "pipeline"))
    if not tensor or not pipeline or (getattr(args, "expert_model_parallel_size", None) or 1) > 1:
        return ""
    missing_ranks = tensor * pipeline - len(folders)
    return f"lacks {missing_ranks} of {tensor} x {pipeline} folders mp_rank_…" if missing_ranks > 0 else ""


def _behind(tracker: Path, path: Path) -> str:
    """Return an error if the file written last names an earlier checkpoint than `path`, or is cut off."""
    try:
        text = tracker.read_text().strip()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        return ""
    own, last = step_of(path.name) or 0, step_of(text)
    if last is None and text != "release":  # of the checkpoints there, the newest one is in doubt
        last = max(
            (s for f in path.parent.iterdir() if (s := step_of(f.name)) is not None and s < own), default=0
        )
        own = 0 if any((step_of(f.name) or 0) > own for f in path.parent.iterdir()) else own
    return f"{tracker.name} (written last) names {text or 'none'}" if last is not None and last < own else ""


def _contents(file: Path) -> Any:
    """Return the contents of a pickle, or of the one in a file of torch.save, without tensors; None if it cannot be read."""
    try:
        if not zipfile.is_zipfile(file):
            with file.open("rb") as plain:
                return read_pickle(plain) if file.stat().st_size <= MOST_PICKLED else Stub()
        with zipfile.ZipFile(file) as archive:
            part = next(p for p in archive.infolist() if p.filename.endswith("/data.pkl"))
            with archive.open(part) as packed:
                return read_pickle(packed) if part.file_size <= MOST_PICKLED else Stub()
    except (FileNotFoundError, StopIteration, zipfile.BadZipFile):
        return None


def _damage(file: Path) -> str:
    """Return evidence that a file is truncated, without looking at others."""
    size = file.stat().st_size
    if file.suffix == ".safetensors":
        try:
            read_header(file)
        except BadWeights as error:
            return f"truncated or damaged, {error}"
    if file.suffix in TORCH_SUFFIXES:
        with file.open("rb") as opened:
            began = opened.read(4)
        # torch before 1.6, and what pickle writes, begins otherwise and says nothing of its length
        if began == b"PK\x03\x04" and not zipfile.is_zipfile(file):
            return "truncated"
    if file.suffix == ".json" and size <= HEADER_LIMIT:
        try:
            json.loads(file.read_bytes())
        except (ValueError, RecursionError):
            return "no valid JSON"
    return "" if size or file.suffix not in (*TORCH_SUFFIXES, ".distcp") else "it is empty"
