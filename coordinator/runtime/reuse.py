"""Reuse of responses and scores: files of earlier evaluations of the same requests are linked into this one's folder.

Rule: only equal keys count: the same checkpoint by content, adapter, model options and cut, and a request digest with every
batch answered; for scores also the score keys of all tasks of an entry, and the inputs of the scoring. Files are linked, so
the earlier folder may be removed. An evaluation that rescores another one uses only that one's answers, and no scores.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.base.listing import entries_with_prefix
from coordinator.decide.evaluation import shards
from coordinator.decide.evaluation.actions import FindResponses
from coordinator.decide.evaluation.events import (
    OutcomeSeen,
    Planned,
    PlannedLeaf,
    ResponsesFound,
    ShardsDumped,
)
from coordinator.decide.evaluation.records import EvaluationRecord, checkpoint_name
from coordinator.decide.evaluation.state import EntryState, State
from coordinator.errors import EvalspanError
from coordinator.intake import request_sets
from coordinator.intake.source_keys import Present
from coordinator.runtime.journal import read_events
from evaljobs.contract.archived_files import file_exists, file_size, files_in, open_file, read_bytes
from evaljobs.contract.names import PLACES, ShardId
from evaljobs.contract.outcomes import Scored
from evaljobs.contract.paths import EvaluationPaths, WorkPaths, slug
from evaljobs.contract.specs import BatchIndex, FrameRef, RequestSetManifest
from evaljobs.contract.storage import file_mode, make_file, make_folder

log = logging.getLogger(__name__)

# File WORK_DIR/ID/responses/NAME.reused: hard link to answers of an earlier evaluation | the coordinator | archived;
# `prune --keep scores`
REUSED = ".reused"  # suffix of linked response files, in which the loop looks for no new records

Sets = Mapping[str, tuple[RequestSetManifest, BatchIndex]]


@dataclass(frozen=True, slots=True)
class _Ours:
    """The evaluation that reuses."""

    record: EvaluationRecord
    paths: EvaluationPaths
    cuts: Mapping[str, str]  # leaf task name -> its cut
    entries: Sequence[EntryState]
    present: Present


@dataclass(slots=True)
class EarlierEvaluation:
    """Responses and scores of an earlier evaluation, from its journal."""

    record: EvaluationRecord
    paths: EvaluationPaths
    said: Mapping[str, Any]  # "evalspan" of its results.json
    same: bool = True  # same checkpoint; False: equal samples, content unknown
    leaves: dict[str, PlannedLeaf] = field(default_factory=dict)  # by name
    asked: set[tuple[int, str, str]] = field(default_factory=set)  # (entry, leaf task, request digest)
    frames: dict[str, FrameRef] = field(default_factory=dict)
    scores: dict[int, str] = field(default_factory=dict)  # entry -> score file, if all items have scores

    def read(self) -> None:
        for event in read_events(self.paths.journal):
            match event:
                case Planned() | ResponsesFound():
                    self.leaves = {leaf.name: leaf for leaf in event.leaves} | self.leaves
                    self.asked |= {(leaf.entry, leaf.task, leaf.key) for leaf in event.leaves}
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


def find_responses(
    state: State, wanted: FindResponses, work: WorkPaths, present: Present, now: float
) -> ResponsesFound:
    """Find parts of `wanted` that another entry requests or earlier evaluations of this work folder have.

    Empty if nothing can be read; `--fresh` reuses nothing.
    """
    nothing = ResponsesFound(at=now)
    if state.record.screening is not None:
        return nothing  # documents of a screen are in other batches, and are not all answered
    cuts = {t: wanted.cuts.get(entry, "") for entry, sets in wanted.sets.items() for t in sets}
    try:
        sets = request_sets.read_wanted(wanted)
    except request_sets.RequestSetError:
        return nothing  # the plan will report it
    alike = set[str]()
    shared = {
        name: equal
        for entry, named in wanted.sets.items()
        for name, folder in named.items()
        if (equal := shards.equal_leaf(state, entry, sets[name][0], folder, cuts[name])) is not None
    }
    found = nothing.model_copy(update={"leaves": tuple(shared.values())})
    sets = {name: one for name, one in sets.items() if name not in shared}
    ours = _Ours(state.record, work.evaluation(state.evaluation_id), cuts, state.entries, present)
    fresh = bool(state.record.inputs.fresh)
    for earlier in () if fresh else _candidates(state, work):
        wants = {
            task
            for task in sets
            if (cuts[task] or earlier.said.get("batch_size") == wanted.batch_size)
            and task not in found.sources
            and any(keys.get("requests") == sets[task][0].key for keys in earlier.said["keys"].values())
        }
        if not wants:
            continue
        if not earlier.same:
            alike |= wants
            continue
        try:
            earlier.read()
            found = _with(found, ours, wanted, earlier, {task: sets[task] for task in wants})
        except (OSError, EvalspanError, ValueError) as error:
            log.warning("responses of %s are not reused: %s", earlier.paths.root.name, error)
        if len(found.sources) == len(sets):
            break
    return found.model_copy(update={"alike": bool(alike - found.sources.keys())})


def keep_samples(state: State, work: WorkPaths) -> None:
    """Let copies of this checkpoint find this evaluation, if its content is known. Raise OSError if that fails."""
    checkpoint = state.record.checkpoint
    if checkpoint.samples is not None and state.nodes.content is not None:
        make_folder(work.cache)
        with os.fdopen(make_file(work.samples), "a") as file:
            file.write(f"{checkpoint.samples} {state.evaluation_id}\n")


def _alike(work: WorkPaths, samples: str | None) -> Iterator[Path]:
    """Yield folders of evaluations of checkpoints with these samples."""
    if samples is not None:
        with contextlib.suppress(OSError), work.samples.open() as lines:
            yield from (work.root / line[33:].strip() for line in lines if line.startswith(f"{samples} "))


def _candidates(state: State, work: WorkPaths) -> Iterator[EarlierEvaluation]:
    """Yield ended evaluations of this checkpoint with these options, newest first.

    The same checkpoint: equal name and digest, or, if touched or copied, equal content. Equal samples alone do not suffice.
    """
    ours = state.record
    spec = state.conversion.announced or ours.checkpoint
    content = state.nodes.content
    prefix = slug(checkpoint_name(spec.source))[:40]
    if ours.rescores:
        yield from filter(None, [earlier_of(work.evaluation(ours.rescores))])
        return
    found = []
    for folder in {*entries_with_prefix(work.root, f"{prefix}-"), *_alike(work, spec.samples)}:
        earlier = None if folder.name == ours.evaluation_id else earlier_of(EvaluationPaths(folder))
        if earlier is None:
            continue
        its, theirs = earlier.record.checkpoint, earlier.said.get("checkpoint_content")
        same = (checkpoint_name(its.source), its.digest) == (checkpoint_name(spec.source), spec.digest)
        alike = None not in (theirs, spec.samples) and its.samples == spec.samples
        alike = alike and content in (None, theirs)
        used = earlier.record.convert == ours.convert and _model(earlier.record) == _model(ours)
        if used and (same or alike):
            earlier.same = same or content is not None
            found.append(earlier)
    yield from sorted(found, key=lambda e: -e.record.accepted_at)


def earlier_of(paths: EvaluationPaths) -> EarlierEvaluation | None:
    """Return an ended evaluation; None if its files cannot be read or name no request digests."""
    with contextlib.suppress(OSError, ValueError, ValidationError, AttributeError):
        record = EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
        said: dict[str, Any] = json.loads(paths.results.read_bytes()).get("evalspan", {})
        return EarlierEvaluation(record, paths, said) if said.get("keys") else None
    return None


def _model(record: EvaluationRecord) -> object:
    """Return the model's settings and its adapter's identity; the tokenizer is part of the request digest."""
    rest = {key: value for key, value in record.model.model_args.items() if key not in PLACES}
    return record.model.model_copy(update={"model_args": rest}), record.inputs.named(adapters=True)


def _with(
    found: ResponsesFound,
    ours: _Ours,
    wanted: FindResponses,
    earlier: EarlierEvaluation,
    sets: Sets,
) -> ResponsesFound:
    own = ours.paths
    entry_of = {
        task: (entry, folder) for entry, named in wanted.sets.items() for task, folder in named.items()
    }
    leaves: list[PlannedLeaf] = []
    frames: dict[str, FrameRef] = {}
    for name, (manifest, index) in sets.items():
        leaf = answered_leaf(earlier, manifest, index, ours.cuts[name])
        if leaf is None:
            continue
        named = leaf.model_copy(update={"name": name})
        as_ours = _as_ours(named, *entry_of[name], manifest, index)
        for their, shard in zip(leaf.shards, as_ours.shards, strict=True):
            frames[shard] = _linked(earlier.paths, earlier.frames[their], own)
        leaves.append(as_ours)
    taken = {leaf.name for leaf in leaves}
    scores = {
        entry: file
        for entry, named in wanted.sets.items()
        # the complete entry: it shares no leaf task with another entry
        if not ours.record.rescores
        and named.keys() <= taken
        and len(named) == len(ours.entries[entry].sets)
        and (file := _score(ours, entry, {t: sets[t][0] for t in named}, earlier)) is not None
    }
    return found.model_copy(
        update={
            "leaves": (*found.leaves, *leaves),
            "shards": (*found.shards, *frames.items()),
            "scores": found.scores | scores,
            "sources": found.sources | dict.fromkeys(sorted(taken), earlier.record.evaluation_id),
        }
    )


def answered_leaf(
    earlier: EarlierEvaluation, manifest: RequestSetManifest, index: BatchIndex, cut: str
) -> PlannedLeaf | None:
    """Return the leaf task that answers all of a request set in this cut."""
    equal = (e for e in earlier.leaves.values() if (e.task, e.key) == (manifest.task, manifest.key))
    return next((e for e in equal if _whole(e, index, earlier, cut)), None)


def _whole(leaf: PlannedLeaf, index: BatchIndex, earlier: EarlierEvaluation, cut: str) -> bool:
    """Return whether an existing record answers every batch of this cut."""
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
    """Hard-link a file that is never written again; copy it if it is archived or links are not supported."""
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
            "shards": tuple(str(replace(ShardId.parse(shard), task=leaf.name)) for shard in leaf.shards),
            "entry": entry,
            "folder": folder,
            "executes": manifest.executes,
            "shard_documents": tuple(documents),
        }
    )


def _score(
    ours: _Ours, entry: int, manifests: Mapping[str, RequestSetManifest], earlier: EarlierEvaluation
) -> str | None:
    """Link the score file of an entry with its samples and return it; None if the entry has to be scored."""
    name = ours.record.suite.tasks[entry].name
    before, now = earlier.record, ours.record
    theirs = next(
        (i for i, t in enumerate(before.suite.tasks) if t.name == name and i in earlier.scores), None
    )
    settings = [
        (
            *(
                r.judge,
                r.options.metric.bootstrap_iters,
                r.options.metric.item_seconds,
                r.options.metric.allow_unsafe,
            ),
            (r.inputs.env, r.inputs.command),  # a scorer may read a variable
        )
        for r in (before, now)
    ]
    if theirs is None or settings[0] != settings[1]:
        return None
    if before.suite.tasks[theirs].cluster != now.suite.tasks[entry].cluster:
        return None  # other clusters in its columns
    for manifest in manifests.values():
        before_keys = {
            k.get("score") for k in earlier.said["keys"].values() if k.get("requests") == manifest.key
        }
        if not manifest.score_key or before_keys != {manifest.score_key}:
            return None
        if (theirs, manifest.task, manifest.key) not in earlier.asked:
            return None  # another entry requested that
    places = ((earlier.paths, theirs), (ours.paths, entry))
    for task in (manifest.task for manifest in manifests.values()):
        source, target = (f.samples / f"samples_{slug(task)}_{i:03d}.jsonl" for f, i in places)
        if file_exists(source):
            _link(source, target)
    scores = Path(earlier.scores[theirs])
    if not file_exists(scores) or _scores_otherwise(scores, ours.present):
        return None
    # the entry's own file, or the one that it was merged into
    own = files_in(earlier.paths.scores, f"{theirs:03d}-*.parquet")
    for file in own[-1:] or filter(file_exists, [earlier.paths.documents]):
        _link(file, ours.paths.columns(entry, int(file.stem[-3:]) if own else theirs))
    target = ours.paths.scores / f"{entry:03d}-{slug(name)}.json"
    _link(scores, target)
    return str(target)


def _scores_otherwise(scores: Path, present: Present) -> bool:
    """Return whether a file or package that this scoring used has changed."""
    shown: dict[str, str] | None = json.loads(read_bytes(scores)).get("shown")
    return shown is None or bool(present.changed(shown))
