"""Reuse of responses and scores: those of earlier evaluations of the same requests are linked into this one's folder.

Rule: only equal keys count: the same checkpoint, adapter, model options and cut, and a request digest of which every
batch is answered; for scores also the score keys of all tasks of an entry, and what the scoring used. Files are linked,
so the earlier folder may be removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.base.listing import beginning
from coordinator.errors import EvalspanError
from coordinator.evaluation.actions import FindResponses
from coordinator.evaluation.events import OutcomeSeen, Planned, PlannedLeaf, ResponsesFound, ShardsDumped
from coordinator.evaluation.records import EvaluationRecord, checkpoint_name, cut_on_disk
from coordinator.evaluation.state import State
from coordinator.intake.present import Present
from coordinator.planning.make_plan import PlanningError, read_sets
from coordinator.runtime.journal import read_events
from evaljobs.contract.folded import exists, file_size, open_file, read_bytes
from evaljobs.contract.names import PLACES, ShardId
from evaljobs.contract.outcomes import Scored
from evaljobs.contract.paths import EvaluationPaths, WorkPaths, slug
from evaljobs.contract.specs import BatchIndex, FrameRef, RequestSetManifest
from evaljobs.contract.storage import file_mode

log = logging.getLogger(__name__)

# File WORK_DIR/ID/responses/NAME.reused: hard link to answers of an earlier evaluation | the coordinator | folded;
# `prune --keep scores`
REUSED = ".reused"  # suffix of a linked response file; the loop does not look for new records in it

Sets = Mapping[str, tuple[RequestSetManifest, BatchIndex]]


@dataclass(frozen=True, slots=True)
class _Ours:
    """The evaluation that reuses."""

    record: EvaluationRecord
    paths: EvaluationPaths
    cuts: Mapping[str, str]  # leaf task -> its cut
    present: Present


@dataclass(slots=True)
class _Earlier:
    """What the journal of an earlier evaluation says of its responses and scores."""

    record: EvaluationRecord
    paths: EvaluationPaths
    batch_size: int | str | None  # of shards whose names have no cut
    keys: Mapping[str, Mapping[str, str]]  # leaf task -> "requests" and "score"
    leaves: dict[str, PlannedLeaf] = field(default_factory=dict)
    frames: dict[str, FrameRef] = field(default_factory=dict)
    scores: dict[int, str] = field(default_factory=dict)  # entry -> score file, where no item lacks its score

    def read(self) -> None:
        for event in read_events(self.paths.journal):
            match event:
                case Planned() | ResponsesFound():
                    self.leaves = {leaf.task: leaf for leaf in event.leaves} | self.leaves
                    if isinstance(event, ResponsesFound):
                        self.frames |= dict(event.shards)
                        self.scores |= event.scores
                case ShardsDumped():
                    self.frames = dict(event.shards) | self.frames  # the first copy counts
                case OutcomeSeen() if isinstance(event.outcome, Scored):
                    self.scores.pop(event.outcome.entry, None)
                    if not event.outcome.unscored:
                        self.scores[event.outcome.entry] = event.outcome.result_file
                case _ if event.kind == "shard-corrupted":
                    self.frames.pop(event.shard, None)
                case _:
                    pass


def find(
    state: State, wanted: FindResponses, work: WorkPaths, present: Present, now: float
) -> ResponsesFound:
    """What of `wanted` earlier evaluations of this work folder have; nothing where it cannot be read, or for `--fresh`."""
    nothing = ResponsesFound(at=now)
    if state.record.inputs is not None and state.record.inputs.fresh:
        return nothing
    folders = {task: folder for sets in wanted.sets.values() for task, folder in sets.items()}
    cuts = {t: wanted.cuts.get(entry, "") for entry, sets in wanted.sets.items() for t in sets}
    try:
        sets = read_sets(folders, {t: cut_on_disk(cut, wanted.batch_size) for t, cut in cuts.items()})
    except PlanningError:
        return nothing  # the plan will say so
    found = nothing
    ours = _Ours(state.record, work.evaluation(state.evaluation_id), cuts, present)
    for earlier in _candidates(state, work):
        wants = {
            task
            for task in sets
            if (cuts[task] or earlier.batch_size == wanted.batch_size)
            and task not in found.sources
            and earlier.keys.get(task, {}).get("requests") == sets[task][0].key
        }
        if not wants:
            continue
        try:
            earlier.read()
            found = _with(found, ours, wanted, earlier, {task: sets[task] for task in wants})
        except (OSError, EvalspanError, ValueError) as error:
            log.warning("responses of %s are not used again: %s", earlier.paths.root.name, error)
        if len(found.sources) == len(sets):
            break
    return found


def _candidates(state: State, work: WorkPaths) -> Iterator[_Earlier]:
    """Ended evaluations of this checkpoint with these options, newest first."""
    ours = state.record
    spec = state.conversion.announced or ours.checkpoint
    prefix = slug(checkpoint_name(spec.source))[:40]
    found = []
    for folder in beginning(work.root, f"{prefix}-"):
        paths = EvaluationPaths(folder)
        if paths.root.name == ours.evaluation_id:
            continue
        with contextlib.suppress(OSError, ValueError, ValidationError, AttributeError):
            record = EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
            said: dict[str, Any] = json.loads(paths.results.read_bytes()).get("evalspan", {})
            same = (record.checkpoint.digest, record.convert) == (spec.digest, ours.convert)
            same = same and _model(record) == _model(ours)
            if same and said.get("keys"):
                found.append(_Earlier(record, paths, said.get("batch_size"), said["keys"]))
    return iter(sorted(found, key=lambda e: -e.record.accepted_at))


def _model(record: EvaluationRecord) -> object:
    """The model's settings, and what its adapter is; the request digest holds what a tokenizer is."""
    rest = {key: value for key, value in record.model.model_args.items() if key not in PLACES}
    adapters = None if record.inputs is None else record.inputs.named(adapters=True)
    return record.model.model_copy(update={"model_args": rest}), adapters


def _with(
    found: ResponsesFound,
    ours: _Ours,
    wanted: FindResponses,
    earlier: _Earlier,
    sets: Sets,
) -> ResponsesFound:
    own = ours.paths
    entry_of = {
        task: (entry, folder) for entry, named in wanted.sets.items() for task, folder in named.items()
    }
    leaves: list[PlannedLeaf] = []
    shards: dict[str, FrameRef] = {}
    for task, (manifest, index) in sets.items():
        leaf = earlier.leaves.get(task)
        if leaf is None or leaf.key != manifest.key or not _whole(leaf, index, earlier, ours.cuts[task]):
            continue
        shards |= {s: _linked(earlier.paths, earlier.frames[s], own) for s in leaf.shards}
        leaves.append(_as_ours(leaf, *entry_of[task], manifest, index))
    taken = {leaf.task for leaf in leaves}
    scores = {
        entry: file
        for entry, named in wanted.sets.items()
        if named.keys() <= taken
        and (file := _score(ours, entry, {t: sets[t][0] for t in named}, earlier)) is not None
    }
    return found.model_copy(
        update={
            "leaves": (*found.leaves, *leaves),
            "shards": (*found.shards, *shards.items()),
            "scores": found.scores | scores,
            "sources": found.sources | dict.fromkeys(sorted(taken), earlier.record.evaluation_id),
        }
    )


def _whole(leaf: PlannedLeaf, index: BatchIndex, earlier: _Earlier, cut: str) -> bool:
    """Is every batch of this cut answered by a record that is there?"""
    if any(ShardId.parse(shard).cut != cut for shard in leaf.shards):
        return False
    at = 0
    for first, end in sorted((s.first_batch, s.end_batch) for s in map(ShardId.parse, leaf.shards)):
        if first != at:
            return False
        at = end
    frames = [earlier.frames.get(shard) for shard in leaf.shards]
    return at == len(index.requests) and all(
        frame is not None and _there(earlier.paths, frame) for frame in frames
    )


def _there(paths: EvaluationPaths, frame: FrameRef) -> bool:
    try:
        return file_size(paths.responses / frame.file) >= frame.offset + frame.length
    except OSError:
        return False


def _linked(earlier: EvaluationPaths, frame: FrameRef, own: EvaluationPaths) -> FrameRef:
    name = hashlib.sha256(f"{earlier.root.name}/{frame.file}".encode()).hexdigest()[:16] + REUSED
    _link(earlier.responses / frame.file, own.responses / name)
    return frame.model_copy(update={"file": name})


def _link(source: Path, target: Path) -> None:
    """A second name for a file that is never written again; a copy where it is folded, or where there are no links."""
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:
        partial = target.with_name(f".{target.name}.partial")
        with open_file(source) as whole, partial.open("wb") as copy:
            shutil.copyfileobj(whole, copy)
        partial.chmod(file_mode(target.parent))
        partial.replace(target)


def _as_ours(
    leaf: PlannedLeaf, entry: int, folder: str, manifest: RequestSetManifest, index: BatchIndex
) -> PlannedLeaf:
    documents: Iterable[tuple[int, ...]] = ()
    if manifest.executes:
        spans = ((s.first_batch, s.end_batch) for s in map(ShardId.parse, leaf.shards))
        documents = (tuple(sorted({d for b in index.documents[a:z] for d in b})) for a, z in spans)
    return leaf.model_copy(
        update={
            "entry": entry,
            "folder": folder,
            "executes": manifest.executes,
            "shard_documents": tuple(documents),
        }
    )


def _score(
    ours: _Ours, entry: int, manifests: Mapping[str, RequestSetManifest], earlier: _Earlier
) -> str | None:
    """The score file of an entry, linked with its samples; None where it has to be scored."""
    name = ours.record.suite.tasks[entry].name
    before, now = earlier.record, ours.record
    theirs = next(
        (i for i, t in enumerate(before.suite.tasks) if t.name == name and i in earlier.scores), None
    )
    settings = [
        (r.judge, r.options.bootstrap_iters, r.options.item_seconds, r.options.allow_unsafe)
        for r in (before, now)
    ]
    if theirs is None or settings[0] != settings[1]:
        return None
    if any(
        not manifests[t].score_key or earlier.keys[t].get("score") != manifests[t].score_key
        for t in manifests
    ):
        return None
    for task in manifests:
        samples = earlier.paths.samples / f"samples_{slug(task)}_{theirs:03d}.jsonl"
        if exists(samples):
            _link(samples, ours.paths.samples / f"samples_{slug(task)}_{entry:03d}.jsonl")
    scores = Path(earlier.scores[theirs])
    if not exists(scores) or _scores_otherwise(scores, ours.present):
        return None
    target = ours.paths.scores / f"{entry:03d}-{slug(name)}.json"
    _link(scores, target)
    return str(target)


def _scores_otherwise(scores: Path, present: Present) -> bool:
    """Has a file or a package changed since, that this scoring used?"""
    shown: dict[str, str] | None = json.loads(read_bytes(scores)).get("shown")
    return shown is None or bool(present.changed(shown))
