"""The table of observed run times: one JSON line per observation, written by any number of processes.

Rule: a writer holds the table's lock and replaces the file by its newest RUNS observations of each task and place, which
are all that predictions need. A line that is no observation is refused by number; a table with such a line is appended
to, so that nothing in it is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evaljobs.contract.storage import locked, write_atomic

Count = Annotated[int, Field(ge=0, le=10**18)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
MEASURABLE = 1e-6
"""Seconds below this count as unknown."""
RUNS = 5
"""Newest observations of a task and place that predictions use, and that stay."""
Place = tuple[str, str, str]
"""Hardware, engine and mode: what a ratio is of."""


class Observation(BaseModel):
    """One task of one evaluation, in one mode: in fast mode `prefill_tokens` are other tokens.

    `generated_tokens`: sum of the requests' caps, as in predictions. `inference_seconds`,
    `metric_seconds`: of all documents, 0 where unknown. `load_seconds`: a trial's start, import and load.
    `batches`: None: documents over the batch size. `together`: tasks that one metric job scored, whose
    seconds they share. `at`: unix seconds. Earlier tables lack the fields with a default.
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
    mode: Literal["exact", "fast"] = "exact"
    batches: Count | None = None
    together: int = Field(1, ge=1)

    @property
    def place(self) -> Place:
        return self.hardware, self.engine, self.mode


def append(path: Path, observations: Iterable[Observation]) -> None:
    """Add observations; makes the file and its folder if missing. OSError where the disk refuses."""
    if fresh := list(observations):
        with locked(_lock_of(path)):
            try:
                _write(path, [*read(path), *fresh])
            except ValueError:  # a person may mend it
                write_atomic(path, path.read_bytes().rstrip(b"\n") + b"\n" + _lines(fresh))


def merge(path: Path, observations: Iterable[Observation]) -> int:
    """Add observations that the table lacks; the number added. ValueError: a corrupt table."""
    with locked(_lock_of(path)):
        held = read(path)
        known = set(held)
        fresh = [one for one in dict.fromkeys(observations) if one not in known]
        if fresh:
            _write(path, held + fresh)
    return len(fresh)


def read(path: Path) -> list[Observation]:
    """All observations, oldest first; none without a file. ValueError names a corrupt line."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    return parse(text, str(path))


def parse(text: bytes, name: str) -> list[Observation]:
    """Observations in a table's bytes; `name`: for errors."""
    observations = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            observations.append(Observation.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            said = f"{place}: {first['msg']}" if place else first["msg"]
            raise ValueError(f"{name}: line {number} is no observation: {said}") from error
    return observations


def _write(path: Path, observations: Iterable[Observation]) -> None:
    """Of each task and place the newest in time; runs whose answers were used again do not displace measured ones."""
    runs: dict[tuple[object, ...], list[Observation]] = defaultdict(list)
    for one in sorted(observations, key=lambda one: one.at):
        runs[one.task, one.place, one.inference_seconds >= MEASURABLE].append(one)
    kept = (one for each in runs.values() for one in each[-RUNS:])
    write_atomic(path, _lines(sorted(kept, key=lambda one: one.at)))


def _lines(observations: Iterable[Observation]) -> bytes:
    return b"".join(one.model_dump_json().encode() + b"\n" for one in observations)


def _lock_of(path: Path) -> Path:
    # File WORK_DIR/priors/.observations.jsonl.lock: held by who writes the table | any process | never
    return path.with_name(f".{path.name}.lock")
