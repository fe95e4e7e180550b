"""Decides the effect of a submission on an existing evaluation. Pure.

Rule: a submission resumes a cancelled or dropped evaluation and may raise its priority, never lower
it. Failed tasks are retried only by `evalspan retry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from coordinator.base.words import first_of
from coordinator.decide.evaluation.records import EvaluationRecord, Inputs
from coordinator.decide.evaluation.state import State
from evaljobs.contract.specs import ModelOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Resubmission:
    """Effect of a submission: `what` for scripts, `said` for users, and what to send to the daemon."""

    what: Literal["new", "known", "priority-raised", "taken-up-again", "ended"]
    said: str = ""
    announce: bool = False  # a notice
    again: bool = False  # a retry command


def format_day(at: float) -> str:
    """Local date and time of unix seconds."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M")


def resumed_message(state: State) -> str:
    """Return a message for a user who runs an evaluation that was begun before; "" if it had ended."""
    if state.ended_at is not None and not state.ending.cancelled:
        return ""
    scored = sum(entry.status == "scored" for entry in state.entries)
    was = f"it was cancelled ({state.ending.cancelled})" if state.ending.cancelled else "it was begun"
    return (
        f"{state.evaluation_id}: {was} on {format_day(state.ended_at or state.record.accepted_at)} from the same inputs and is "
        f"resumed: {scored} of {len(state.entries)} tasks are scored, and {_answered(state)}"
    )


def _answered(state: State) -> str:
    shards = state.shards.by_name
    return (
        f"{len(shards) - state.shards.todo} of {len(shards)} shards answered"
        if shards
        else "no shard is planned"
    )


def remade_message(before: EvaluationRecord, now: EvaluationRecord, shown: Sequence[str] = ()) -> str:
    """Return a message for a user whose repeated evaluation has changed inputs; "" if these are unchanged.

    `shown`: files and packages, described, that earlier builds or scores used and that differ now. Values are not revealed.
    """
    changed = []
    if before.checkpoint.digest != now.checkpoint.digest:
        changed.append("the checkpoint's files")
    if before.suite != now.suite:
        changed.append("settings of the suite")
    if before.model != now.model:
        changed.append("settings of the model")
    changed += _of_inputs(before.inputs, now.inputs)
    if tasks := _edited(before, now):
        changed.append(f"files or data of {first_of(tasks, 3)}")
    elif shown:
        changed.append(first_of(list(dict.fromkeys(shown)), 3))
    if now.inputs.fresh:
        return "--fresh: everything is built, inferred and scored again"
    if not changed:
        return ""
    return (
        f"{' and '.join(changed)} changed since {before.evaluation_id}: this is a new evaluation, and responses to "
        "unchanged requests are reused"
    )


def _of_inputs(before: Inputs, now: Inputs) -> list[str]:
    """Return the differences between two evaluations' inputs, apart from the files of their tasks."""
    changed = [f"lm_eval {before.lm_eval} to {now.lm_eval}"] if before.lm_eval != now.lm_eval else []
    for adapters in (True, False):
        were, are = before.named(adapters=adapters), now.named(adapters=adapters)
        changed += [
            f"what {key} of the model names" for key in were.keys() & are.keys() if were[key] != are[key]
        ]
    names = sorted(n for n in before.env.keys() | now.env.keys() if before.env.get(n) != now.env.get(n))
    changed += [f"{first_of(names, 3)} of [trial] env"] if names else []
    return (
        [*changed, "prologue, container or python of [trial]"] if before.command != now.command else changed
    )


def kept_settings_message(before: EvaluationRecord, model: ModelOptions) -> str:
    """Return a message about settings of the model that a retry keeps. `model`: the current ones; "" if unchanged."""
    if before.model == model:
        return ""
    return (
        f"a retry keeps the settings of the model that {before.evaluation_id} began with, and the present ones differ: "
        "`evalspan eval` makes a new evaluation with these"
    )


def _edited(before: EvaluationRecord, now: EvaluationRecord) -> list[str]:
    """Return tasks of both evaluations whose source keys differ."""
    known = dict(zip((t.name for t in before.suite.tasks), before.inputs.entries, strict=False))
    new = zip((t.name for t in now.suite.tasks), now.inputs.entries, strict=False)
    return [name for name, key in new if name in known and known[name] != key]


def reused_in_words(state: State) -> str:
    """Return which responses and scores came from earlier evaluations, in parentheses; "" if none did."""
    if not state.plan.reused:
        return ""
    sources = ", ".join(sorted(set(state.plan.reused.values())))
    scores = f", scores of {len(state.plan.reused_scores)} tasks too" if state.plan.reused_scores else ""
    return f" (responses of {len(state.plan.reused)} tasks are those of {sources}, since the requests are the same{scores})"


def nothing_run(state: State) -> str:
    """Return a message for a user who runs an evaluation that had ended before."""
    failed, at = len(state.failed_entries()), format_day(state.ended_at or 0.0)
    if failed:
        return (
            f"ended on {at} from the same inputs, {failed} of {len(state.entries)} tasks failed; nothing was run: "
            f"`evalspan retry {state.evaluation_id}` tries again"
        )
    again = (
        f": `evalspan retry {state.evaluation_id}` scores what lacks a score" if state.unscored_items else ""
    )
    return f"scored on {at} from the same inputs; nothing was run{again}"


def resubmission_of(known: State | None, priority: int) -> Resubmission:
    """Return the effect of a submission. `known`: the evaluation from its journal; None: there is none yet."""
    if known is None:
        return Resubmission(what="new", announce=True)
    before = known.record.priority
    raised = f"its priority is raised from {before} to {priority}" if priority > before else ""
    if known.ending.cancelled:
        said = f"it was cancelled ({known.ending.cancelled}) and is resumed; what is scored is kept"
        said = f"{said}; {raised}" if raised else said
        return Resubmission(what="taken-up-again", said=said, announce=bool(raised), again=True)
    if known.ended_at is not None:
        failed = len(known.failed_entries())
        if failed or known.unscored_items:
            said = (
                f"it has ended, and {failed} of {len(known.entries)} tasks failed"
                if failed
                else "it has ended with items unscored"
            )
            return Resubmission(
                what="ended", said=f"{said}: `evalspan retry {known.evaluation_id}` tries again"
            )
        return Resubmission(
            what="ended",
            said=f"it was scored on {format_day(known.ended_at)} from the same inputs, and nothing is run: "
            f"`evalspan report {known.evaluation_id}`",
        )
    if raised:
        return Resubmission(what="priority-raised", said=raised, announce=True)
    kept = f"; its priority stays {before} (a submission lowers none)" if priority < before else ""
    if known.nodes.paused_at is not None:
        since = format_day(known.nodes.paused_at)
        kept += f"; it is paused since {since}, and `evalspan resume {known.evaluation_id}` lets it go on"
    return Resubmission(what="known", said=f"it is known already{kept}")
