"""The table of observed run times: one JSON line per observation, appended by any number of processes.

Rule: an append holds the file's lock and is on disk before it returns. A torn last line, left by a
killed writer, is skipped by readers and dropped by the next append. Any other line that is no
observation is refused by number.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
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
        _write(file, lines)


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
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        if stat.S_IMODE(os.fstat(file).st_mode) != visible:
            with suppress(PermissionError):  # another user's
                os.fchmod(file, visible)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)  # releases the lock


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
