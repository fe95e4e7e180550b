"""The table of observed run times: one JSON line per observation, written by any number of processes.

Rule: a writer holds the table's lock and replaces the file by its newest RUNS observations of each task and place, which
suffice for predictions. An invalid line is refused by number; a table with such a line is only appended to, so that nothing
in it is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evaljobs.contract.storage import hold_lock, write_atomic

Count = Annotated[int, Field(ge=0, le=10**18)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
MIN_SECONDS = 1e-6
"""Shorter times count as unknown."""
RATIO_RUNS = 5
"""Newest observations of a task and place that are used and kept."""
Place = tuple[str, str, str]
"""Hardware, engine and mode that a ratio applies to."""


class Observation(BaseModel):
    """One task of one evaluation, in one mode: in fast mode `prefill_tokens` are counted differently.

    `generated_tokens`: sum of the requests' caps, as in predictions. `inference_seconds`, `metric_seconds`: of all documents,
    0 if unknown. `load_seconds`: a trial's start, import and load. `batches`: None: documents divided by the batch size.
    `together`: tasks that one metric job scored, whose seconds they share. `at`: unix seconds. Earlier tables lack the fields
    with a default.
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


def append_observations(path: Path, observations: Iterable[Observation]) -> None:
    """Add observations, creating the file and its folder if missing. Raise OSError if the disk refuses."""
    if fresh := list(observations):
        with hold_lock(_lock_of(path)):
            try:
                _write(path, [*read_observations(path), *fresh])
            except ValueError:  # a person may repair it
                write_atomic(path, path.read_bytes().rstrip(b"\n") + b"\n" + _lines(fresh))


def merge_observations(path: Path, observations: Iterable[Observation]) -> int:
    """Add observations that the table lacks, and return how many. Raise ValueError for a corrupt table."""
    with hold_lock(_lock_of(path)):
        held = read_observations(path)
        known = set(held)
        fresh = [one for one in dict.fromkeys(observations) if one not in known]
        if fresh:
            _write(path, held + fresh)
    return len(fresh)


def read_observations(path: Path) -> list[Observation]:
    """Return all observations, oldest first; none without a file. Raise ValueError, which names a corrupt line."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    return parse_observations(text, str(path))


def parse_observations(text: bytes, name: str) -> list[Observation]:
    """Parse the observations in a table's bytes; `name`: for errors."""
    observations = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            observations.append(Observation.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            said = f"{place}: {first['msg']}" if place else first["msg"]
            raise ValueError(f"{name}: line {number} is not an observation: {said}") from error
    return observations


def _write(path: Path, observations: Iterable[Observation]) -> None:
    """Write the newest observations of each task and place; runs with reused answers do not displace measured ones."""
    runs: dict[tuple[object, ...], list[Observation]] = defaultdict(list)
    for one in sorted(observations, key=lambda one: one.at):
        runs[one.task, one.place, one.inference_seconds >= MIN_SECONDS].append(one)
    kept = (one for each in runs.values() for one in each[-RATIO_RUNS:])
    write_atomic(path, _lines(sorted(kept, key=lambda one: one.at)))


def _lines(observations: Iterable[Observation]) -> bytes:
    return b"".join(one.model_dump_json().encode() + b"\n" for one in observations)


def _lock_of(path: Path) -> Path:
    # File WORK_DIR/priors/.observations.jsonl.lock: held by who writes the table | any process | never
    return path.with_name(f".{path.name}.lock")
