"""The table of observed run times: one JSON line per observation, appended by any number of processes.

Rule: an append holds the file's lock and is on disk before it returns. The table does not grow without end: of each task
and place the newest KEPT observations are certain to stay, and predictions need no older ones. A torn last line, left by a
killed writer, is skipped by readers and dropped by the next append. Any other line that is no
observation is refused by number.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

Count = Annotated[int, Field(ge=0, le=10**18)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
MEASURABLE = 1e-6
"""Seconds below this count as unknown."""
KEPT = 20
"""Newest observations of a task and place that stay: older ones weigh an eighth together in `priors.fit`."""
SPAN_BYTES = 1 << 18
"""Bytes appended to a table between two looks for observations to drop."""


class Observation(BaseModel):
    """One task of one evaluation, in one mode: in fast mode `prefill_tokens` are other tokens.

    `generated_tokens`: sum of the requests' caps, as in predictions. `inference_seconds`,
    `metric_seconds`: of all documents, 0 where unknown. `load_seconds`: a trial's import and load.
    `at`: unix seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    task: str = Field(min_length=1)
    key: str
    model_parameters: Count
    hardware: str
    engine: str
    batch_size: int = Field(ge=1)
    prefill_tokens: Count
    generated_tokens: Count
    documents: Count
    inference_seconds: Seconds
    metric_seconds: Seconds
    load_seconds: Seconds | None
    at: float = Field(allow_inf_nan=False)
    mode: Literal["exact", "fast"] = "exact"  # earlier tables do not say it

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves exact's mode out, so that earlier versions read a table without fast runs."""
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if (key, value) != ("mode", "exact")}

    @property
    def place(self) -> tuple[str, str, str]:
        """Hardware, engine and mode: what a learnt speed is of."""
        return self.hardware, self.engine, self.mode


def append(path: Path, observations: Iterable[Observation]) -> None:
    """Append observations; makes the file and its folder if missing. OSError where the disk refuses."""
    lines = _lines(observations)
    if not lines:
        return
    with _locked(path) as file:
        before = os.fstat(file).st_size
        _write(file, lines)
        if before // SPAN_BYTES != os.fstat(file).st_size // SPAN_BYTES:
            with suppress(ValueError, OSError):  # a corrupt table stays as it is; a full disk, too
                _drop_old(path, _whole(file))


def newest(observations: Sequence[Observation]) -> list[Observation]:
    """The newest KEPT observations of each task and place, in their order. Pure."""
    counts: Counter[tuple[str, tuple[str, str, str]]] = Counter()
    kept = []
    for one in reversed(observations):
        counts[one.task, one.place] += 1
        if counts[one.task, one.place] <= KEPT:
            kept.append(one)
    return kept[::-1]


def merge(path: Path, observations: Iterable[Observation]) -> int:
    """Append observations that the table lacks; the number appended. ValueError: a corrupt table."""
    with _locked(path) as file:
        held = {_line(one) for one in parse(_whole(file), str(path))}
        fresh = [one for one in dict.fromkeys(observations) if _line(one) not in held]
        if fresh:
            _write(file, _lines(fresh))
    return len(fresh)


def read(path: Path) -> list[Observation]:
    """All observations, oldest first; none without a file. ValueError names a corrupt line."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    return parse(text, str(path))


def parse(text: bytes, name: str) -> list[Observation]:
    """Observations in a table's bytes; `name`: for errors. A torn last line is skipped."""
    *lines, last = text.split(b"\n")
    observations = []
    for number, line in enumerate(lines, start=1):
        try:
            observations.append(Observation.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            said = f"{place}: {first['msg']}" if place else first["msg"]
            raise ValueError(f"{name}: line {number} is no observation: {said}") from error
    if last:
        with suppress(ValidationError):  # a killed writer tore this line
            observations.append(Observation.model_validate_json(last))
    return observations


def _line(observation: Observation) -> bytes:
    return observation.model_dump_json().encode()


def _lines(observations: Iterable[Observation]) -> bytes:
    return b"".join(_line(one) + b"\n" for one in observations)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    visible = stat.S_IMODE(path.parent.stat().st_mode) & 0o044 | 0o600  # as its folder, whatever the umask
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if stat.S_IMODE(os.fstat(file).st_mode) != visible:
                with suppress(PermissionError):  # another user's
                    os.fchmod(file, visible)
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):
                yield file
                return
        finally:
            os.close(file)  # releases the lock


def _is_at(path: Path, file: int) -> bool:
    """Is the open file the one at `path`? Another process may have replaced it before it gave the lock back."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False


def _drop_old(path: Path, text: bytes) -> None:
    """Replace the locked table by its newest observations, where that makes it shorter by a quarter."""
    held = parse(text, str(path))
    kept = newest(held)
    if len(kept) > 0.75 * len(held):
        return
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(_lines(kept))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _whole(file: int) -> bytes:
    parts = []
    offset = 0
    while part := os.pread(file, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _write(file: int, lines: bytes) -> None:
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        lines = _mend(file) + lines
    while lines:
        lines = lines[os.write(file, lines) :]
    os.fsync(file)


def _mend(file: int) -> bytes:
    """Drop a torn last line; the bytes to write first where a whole last line lacks only its line end."""
    text = _whole(file)
    start = text.rfind(b"\n") + 1
    try:
        Observation.model_validate_json(text[start:])
    except ValidationError:
        os.ftruncate(file, start)
        return b""
    return b"\n"
