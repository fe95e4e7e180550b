"""Which files of a work folder may be removed, by the policy and their age. Pure.

Rule: nothing is removed from an evaluation that is open or parked, that `[retention] baselines` names, or whose responses an
open one reuses. Scores, results, reports and journals are never removed, so learning curves lose no point. Called from
`prune`, which removes, and from `status --disk`.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from coordinator.site.config.schema import RetentionConfig

# `keep` of [retention] -> parts of an evaluation's folder to remove
REMOVED_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "scores": (
        "specs", "outcomes", "release", "logs", "verdicts", "judgements", "responses", "samples",
    ),
    "responses": ("specs", "outcomes", "release", "logs"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """Files, and the bytes that they use on disk."""

    files: int = 0
    bytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.files + other.files, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """An evaluation's folder, or what is removed from it.

    `parts`: folder -> its size, loose and archived; "": its other files, including an archive without its members. `sets`:
    names of the request sets that it uses. For an open one, `reuses`: ids of evaluations whose responses it reuses;
    `checkpoint`: the digest of its checkpoint.
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
class SharedFile:
    """A file or folder that evaluations share. `used_at`: its mtime, in unix seconds; for request sets, the last use."""

    kind: str
    path: str
    size: Size
    used_at: float

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """A work folder, or what is removed from it: evaluations, shared files, and the rest by its top-level name."""

    evaluations: tuple[OnDisk, ...]
    shared: tuple[SharedFile, ...]
    others: Mapping[str, Size] = field(default_factory=dict)

    def by_kind(self) -> dict[str, Size]:
        """Return the size of each part of evaluations, and of each kind of shared files; the largest first."""
        kinds: dict[str, Size] = defaultdict(Size, self.others)
        for evaluation in self.evaluations:
            for part, size in evaluation.parts.items():
                kinds[f"evaluations: {part or 'records'}"] += size
        for item in self.shared:
            kinds[item.kind] += item.size
        return dict(sorted(kinds.items(), key=lambda kind: -kind[1].bytes))

    @property
    def size(self) -> Size:
        return sum(self.by_kind().values(), Size())


def removable_parts(
    folder: WorkFolder, policy: RetentionConfig, now: float, *, code: str | None
) -> WorkFolder:
    """Return what to remove from a work folder: parts of evaluations, the oldest first, and what none of them needs then.

    A request set is needed while an evaluation that uses it has its responses, since its `retry` reads it. `code`: the name
    of the running coordinator's code folder; None: unknown, and no code folder is removed.
    """

    def is_old(at: float | None) -> bool:
        return now - (at or 0.0) >= policy.older_than_seconds

    open_ones = [e for e in folder.evaluations if e.ended_at is None]
    ended = [e for e in folder.evaluations if e.ended_at is not None]
    reused = {name for e in open_ones for name in e.reuses}
    removals = [
        replace(
            e, parts={part: e.parts[part] for part in REMOVED_PARTS[policy.keep or ""] if part in e.parts}
        )
        for e in sorted(ended, key=lambda e: e.ended_at or 0.0)
        if is_old(e.ended_at)
        and e.evaluation_id not in reused
        and not any(fnmatch.fnmatchcase(e.evaluation_id, glob) for glob in policy.baselines)
    ]
    losing = {e.evaluation_id for e in removals if "responses" in e.parts}
    keeping = [e for e in ended if "responses" in e.parts and e.evaluation_id not in losing]
    sets = {name for e in (*open_ones, *keeping) for name in e.sets}
    digests = tuple(e.checkpoint for e in open_ones)
    # jobs of an evaluation that was open when this code arrived may run older code; newer code may be needed again
    came = next((item.used_at for item in folder.shared if item.name == code), None)
    outdated = came if came is not None and all(e.accepted_at >= came for e in open_ones) else 0.0
    unneeded: Mapping[str, Callable[[SharedFile], bool]] = {
        "request sets": lambda item: item.name not in sets,
        "converted checkpoints": lambda item: all(digests) and not item.name.startswith(digests),
        "code for jobs": lambda item: item.used_at < outdated,
    }
    return WorkFolder(
        tuple(e for e in removals if e.parts),
        tuple(i for i in folder.shared if i.kind in unneeded and is_old(i.used_at) and unneeded[i.kind](i)),
    )
