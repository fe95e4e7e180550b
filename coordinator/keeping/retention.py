"""Which files of a work folder may go, by what is kept and for how long. Pure.

Rule: of an evaluation that is open or parked, that `[retention] baselines` names, or whose responses an open one uses
again, nothing goes. Scores, results, reports and journals never go, so learning curves lose no point.
Called from `prune`, which removes, and from `status --disk`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from evaljobs.contract.specs import Record

Keep = Literal["scores", "responses"]

# parts of an evaluation's folder that go
GOING: Final[Mapping[Keep, tuple[str, ...]]] = {
    "scores": (
        "specs", "outcomes", "release", "logs", "verdicts", "judgements", "responses", "samples",
    ),
    "responses": ("specs", "outcomes", "release", "logs"),
}  # fmt: skip


class Policy(Record):
    """What is kept of evaluations that ended `older_than_seconds` ago. `baselines`: globs of ids that lose nothing."""

    keep: Keep
    older_than_seconds: float
    baselines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Size:
    """Files, and bytes that they take on the disk."""

    files: int = 0
    bytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.files + other.files, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """An evaluation's folder. `parts`: folder -> its size, loose and archived; "": its other files. An archive is one of those, without its members.

    `sets`: names of the request sets that it uses. Of an open one, `reuses`: ids of evaluations whose responses it uses
    again; `checkpoint`: the digest of its checkpoint.
    """

    evaluation_id: str
    accepted_at: float  # unix seconds
    ended_at: float | None  # unix seconds; None: open or parked
    parts: Mapping[str, Size]
    sets: frozenset[str] = frozenset()
    reuses: frozenset[str] = frozenset()
    checkpoint: str = ""

    @property
    def size(self) -> Size:
        return sum(self.parts.values(), Size())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A file or folder that evaluations share. `used_at`: its mtime, in unix seconds; that of a request set is its last use."""

    kind: str
    path: str
    size: Size
    used_at: float

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What goes of an evaluation: these parts."""

    evaluation_id: str
    ended_at: float
    parts: tuple[str, ...]
    size: Size


def removals(evaluations: Sequence[OnDisk], policy: Policy, now: float) -> list[Removal]:
    """What goes of evaluations, the oldest first."""
    reused = {name for e in evaluations if e.ended_at is None for name in e.reuses}
    found = []
    for each in evaluations:
        if each.ended_at is None or now - each.ended_at < policy.older_than_seconds:
            continue
        if each.evaluation_id in reused or is_baseline(each.evaluation_id, policy):
            continue
        parts = tuple(part for part in GOING[policy.keep] if part in each.parts)
        size = sum((each.parts[part] for part in parts), Size())
        if parts:
            found.append(
                Removal(evaluation_id=each.evaluation_id, ended_at=each.ended_at, parts=parts, size=size)
            )
    return sorted(found, key=lambda removal: removal.ended_at)


def is_baseline(evaluation_id: str, policy: Policy) -> bool:
    return any(fnmatch.fnmatchcase(evaluation_id, glob) for glob in policy.baselines)


def unused(
    shared: Iterable[Shared],
    evaluations: Sequence[OnDisk],
    going: Iterable[Removal],
    policy: Policy,
    now: float,
    *,
    code: str | None,
) -> list[Shared]:
    """What evaluations share and none of them needs: request sets, converted checkpoints, code.

    A request set is needed while an evaluation that uses it has its responses: `retry` of that one reads it. `code`:
    the name of the code folder of the coordinator that runs; None: not known, and no code folder goes.
    """
    shared = list(shared)
    loses = {removal.evaluation_id for removal in going if "responses" in removal.parts}
    open_ones = [e for e in evaluations if e.ended_at is None]
    sets = {
        name
        for e in evaluations
        if e.ended_at is None or ("responses" in e.parts and e.evaluation_id not in loses)
        for name in e.sets
    }
    digests = tuple(e.checkpoint for e in open_ones)
    # jobs of an evaluation that was open when this code came may run older code; newer code may be taken again
    came = next((item.used_at for item in shared if item.name == code), None)
    outdated = came if came is not None and all(e.accepted_at >= came for e in open_ones) else 0.0

    def needed(item: Shared) -> bool:
        match item.kind:
            case "request sets":
                return item.name in sets
            case "converted checkpoints":
                return item.name.startswith(digests) if all(digests) else True
            case "code for jobs":
                return item.used_at >= outdated
            case _:
                return True

    return [i for i in shared if now - i.used_at >= policy.older_than_seconds and not needed(i)]
