"""The newest checkpoint of a training that is whole. Called by `run`.

Rule: names, sizes and headers are read, never weights, and no pickle is opened. A killed save leaves a file that is shorter
than its header says, or not all of the files that the checkpoints before have.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from glob import has_magic
from pathlib import Path

from coordinator.hook import PIN_PREFIX, SUMS
from coordinator.intake.checkpoint import half_written, step_of
from coordinator.intake.folder_watch import is_unfinished
from evaljobs.staging.fingerprint import HEADER_LIMIT, BadWeights, read_header

BEFORE = 3  # earlier whole checkpoints: what all of them hold is expected of the next one
ZIPPED = (".pt", ".pth", ".bin", ".ckpt")  # what torch.save writes


def newest_whole(place: str) -> tuple[Path | None, list[str]]:
    """The whole checkpoint of the highest step, and why each newer one is none. `place`: a folder of checkpoints, or a glob.

    None where there is none. OSError.
    """
    found = sorted(_checkpoints(place), key=lambda path: (step_of(path.name), path.name))
    left: list[str] = []
    while found:
        path = found.pop()
        if not (why := wanting(path, found[-BEFORE:])):
            return path, left
        left.append(f"{path}: {why}")
    return None, left


def _checkpoints(place: str) -> Iterator[Path]:
    paths = Path("/").glob(place.lstrip("/")) if has_magic(place) else Path(place).iterdir()
    try:
        for path in paths:
            kept = path.suffix in (*ZIPPED, ".safetensors") or path.is_dir()
            if kept and step_of(path.name) is not None and not is_unfinished(path.name):
                yield path
    except FileNotFoundError:  # the training makes it
        return


def wanting(path: Path, before: Sequence[Path] = ()) -> str:
    """What this checkpoint lacks; "" where it is whole. It may be a file. `before`: earlier checkpoints."""
    try:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        names = [f.relative_to(path).as_posix() for f in files if path.is_dir()]
        if why := half_written(names):
            return why
        expected = [_names(other) for other in before if not wanting(other)]
        if expected and (missing := set.intersection(*expected) - _names(path)):
            return f"lacks {min(missing)}, which the checkpoints before have"
        return next(
            (f"{f.name}: {why}" for f in files if (why := _damage(f))), "" if files else "it is empty"
        )
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"


def _names(path: Path) -> set[str]:
    """Its files, with N for each number in their names."""
    names = (p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    return {re.sub(r"\d+", "N", n) for n in names if not n.startswith((PIN_PREFIX, SUMS))}


def _damage(file: Path) -> str:
    if file.suffix == ".safetensors":
        try:
            read_header(file)
        except BadWeights as error:
            return f"truncated or damaged, {error}"
    if file.suffix in ZIPPED:
        with file.open("rb") as opened:
            began = opened.read(4)
        # torch before 1.6, and what pickle writes, begins otherwise and says nothing of its length
        if began == b"PK\x03\x04" and not zipfile.is_zipfile(file):
            return "truncated"
    if file.suffix == ".json" and file.stat().st_size <= HEADER_LIMIT:
        try:
            json.loads(file.read_bytes())
        except ValueError:
            return "no valid JSON"
    return "" if file.stat().st_size or file.suffix not in (*ZIPPED, ".distcp") else "it is empty"
