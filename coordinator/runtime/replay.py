"""Finds and replays the evaluations of a work folder. Writes nothing there."""

from __future__ import annotations

from pathlib import Path

from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.evaluation.events import AnyEvent
from coordinator.evaluation.records import EvaluationRecord
from coordinator.evaluation.state import State
from coordinator.intake import resubmit
from coordinator.intake.from_settings import site_of
from coordinator.report.render import first_of
from coordinator.runtime.journal import read_events, replayed
from coordinator.runtime.status_file import read_evaluation
from evaljobs.contract.paths import EvaluationPaths, WorkPaths


def find_evaluation(config: Config, prefix: str) -> tuple[State, EvaluationPaths, list[AnyEvent]]:
    """Replay the evaluation whose id begins with `prefix` or has it as its digest."""
    paths = find_folder(config, prefix)
    events = list(read_events(paths.journal))
    return replay(events, config), paths, events


def find_folder(config: Config, prefix: str) -> EvaluationPaths:
    """The folder of that evaluation, unread. OperatorError unless exactly one id matches."""
    root = Path(config.work_dir)
    ids = sorted(p.parent.name for p in root.glob("*/journal.jsonl"))
    found = [i for i in ids if i.startswith(prefix) or i.endswith(f"-{prefix}")]
    if prefix in ids:
        found = [prefix]
    if len(found) != 1:
        known = first_of(found or ids)
        what = "no evaluation" if not found else f"{len(found)} evaluations"
        verb = "begins" if not found else "begin"
        raise OperatorError(
            f"{what} in {root} {verb} with {prefix!r} (there are: {known}): `evalspan status` lists all"
        )
    return EvaluationPaths(root / found[0])


def replay(events: list[AnyEvent], config: Config) -> State:
    """The state that a journal's events lead to. Writes nothing."""
    state = replayed(events, site_of(config))
    if state is None:
        raise OperatorError("the journal is empty: the evaluation was never accepted; submit it again")
    return state


def changed_since(record: EvaluationRecord, work: WorkPaths) -> str:
    """What has changed since the last evaluation of this checkpoint's folder on this suite; "" without one, or no change."""
    name = record.evaluation_id.rpartition("-")[0]
    records = (
        read_evaluation(EvaluationPaths(file.parent)) for file in work.root.glob(f"{name}-*/evaluation.json")
    )
    place, suite = record.checkpoint.announced, record.suite.name
    alike = [r for r in records if r is not None and (r.checkpoint.announced, r.suite.name) == (place, suite)]
    return resubmit.remade(max(alike, key=lambda r: r.accepted_at), record) if alike else ""
