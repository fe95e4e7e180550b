"""What a submission means for an evaluation that is known. Pure.

Rule: whoever submits wants scores, so what was cancelled or dropped is taken up again, as `evalspan eval` does; a higher
priority is taken over and a lower one is not; what failed is tried again only where that is asked for (`retry`).
It does not know: how the daemon is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coordinator.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """What comes of a submission: `what` for scripts, `said` for people; whether the daemon is to hear the notice, and to retry."""

    what: Literal["new", "known", "priority-raised", "taken-up-again", "ended"]
    said: str = ""
    announce: bool = False
    again: bool = False


def submitted(known: State | None, priority: int) -> Submitted:
    """`known`: the evaluation as its journal shows it, None where there is none yet."""
    if known is None:
        return Submitted(what="new", announce=True)
    before = known.record.priority
    raised = f"its priority is raised from {before} to {priority}" if priority > before else ""
    if known.cancelled:
        said = f"it was cancelled ({known.cancelled}) and is taken up again; what is scored is kept"
        said = f"{said}; {raised}" if raised else said
        return Submitted(what="taken-up-again", said=said, announce=bool(raised), again=True)
    if known.ended_at is not None:
        failed = len(known.failed_entries())
        if failed or known.unscored_items:
            said = (
                f"it has ended, and {failed} of {len(known.entries)} tasks failed"
                if failed
                else "it has ended with items unscored"
            )
            return Submitted(what="ended", said=f"{said}: `evalspan retry {known.evaluation_id}` tries again")
        return Submitted(
            what="ended", said=f"it has ended, all is scored: `evalspan report {known.evaluation_id}`"
        )
    if raised:
        return Submitted(what="priority-raised", said=raised, announce=True)
    kept = f"; its priority stays {before} (a submission lowers none)" if priority < before else ""
    return Submitted(what="known", said=f"it is known already{kept}")
