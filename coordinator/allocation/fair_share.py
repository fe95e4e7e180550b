"""Fair share between the users of one work folder, by GPU seconds with a half-life. Pure. Called by the daemon's loop.

Rule: the user with the least use is served first; a priority orders that user's own evaluations alone. GPU seconds
follow from the evaluations' states. An evaluation that has ended leaves nothing but its user's sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import Field

from coordinator.evaluation.indexes import gpus_running
from coordinator.evaluation.state import State
from evaljobs.contract.specs import Record

HELD_SECONDS = (
    600.0  # a GPU that a user holds counts as used for so long ahead: so users alternate in one round
)
LEAST_GPU_SECONDS = 1.0  # a user's decayed use below this is forgotten


class Usage(Record):
    """`users.json`: what users have used until `at` (unix seconds)."""

    schema_version: int = 1
    at: float = 0.0
    gpu_seconds: Mapping[str, float] = Field(default_factory=dict)  # user -> decayed sum
    counted: Mapping[str, float] = Field(default_factory=dict)  # open evaluation -> its seconds in that sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """The user who pays for an evaluation. `used`: decayed GPU seconds; `holds`: GPUs now; `since`: of the oldest wish."""

    user: str = ""
    used: float = 0.0
    holds: int = 0
    since: float = 0.0  # unix seconds

    def turn(self, given: int = 0) -> tuple[float, float, str]:
        """Sort key of users, after `given` more GPUs."""
        return self.used + HELD_SECONDS * (self.holds + given), self.since, self.user


ONE_USER = Asker()
"""The asker of every evaluation of a work folder that is not shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """GPU seconds that an evaluation has used of its user since it began or was last retried."""

    evaluation_id: str
    user: str
    gpu_seconds: float
    over: bool


def totals(states: Iterable[State], now: float) -> list[Total]:
    """`now`: unix seconds."""
    return [
        Total(
            evaluation_id=state.evaluation_id,
            user=state.users.payer,
            gpu_seconds=state.users.seconds_until(now, gpus_running(state)),
            over=state.ended_at is not None,
        )
        for state in states
    ]


def counted(usage: Usage, totals: Iterable[Total], now: float, half_life: float) -> Usage:
    """The usage at `now` (unix seconds), with what evaluations have used since. `half_life`: seconds."""
    kept = 0.5 ** (max(0.0, now - usage.at) / half_life)
    seconds = {user: kept * used for user, used in usage.gpu_seconds.items()}
    known = dict(usage.counted)
    for total in totals:
        more = total.gpu_seconds - known.pop(total.evaluation_id, 0.0)
        seconds[total.user] = seconds.get(total.user, 0.0) + max(0.0, more)
        if not total.over:
            known[total.evaluation_id] = total.gpu_seconds
    left = {user: used for user, used in seconds.items() if used >= LEAST_GPU_SECONDS}
    return Usage(at=max(now, usage.at), gpu_seconds=left, counted=known)


def askers(states: Iterable[State], usage: Usage, held: Mapping[str, int]) -> dict[str, Asker]:
    """User -> what decides the user's turn. `held`: user -> GPUs now."""
    since: dict[str, float] = {}
    for state in states:
        user, at = state.users.payer, state.record.accepted_at
        since[user] = min(at, since.get(user, at))
    return {
        user: Asker(user=user, used=usage.gpu_seconds.get(user, 0.0), holds=held.get(user, 0), since=at)
        for user, at in since.items()
    }


def turn_of(state: State, users: Mapping[str, Asker]) -> tuple[float, float, str, int, float, str]:
    """Sort key of an evaluation: by user, then by priority, then by age. `users`: empty where there is one user."""
    asker = users.get(state.users.payer, ONE_USER)
    return *asker.turn(), -state.record.priority, state.record.accepted_at, state.evaluation_id


def in_turn(states: Iterable[State], users: Mapping[str, Asker]) -> list[State]:
    """States as they are served."""
    return sorted(states, key=lambda state: turn_of(state, users))
