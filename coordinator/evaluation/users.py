"""Users who asked for an evaluation, and the GPU seconds that its trials have held: a part of the state.

Rule: the first asker pays: the evaluation is served in that user's turn. Both follow from journalled events alone; time
in which no coordinator ran counts for no user. Called from: `step`, for every event.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.evaluation.events import Event, Restarted


@dataclass(slots=True, kw_only=True)
class Users:
    """`gpu_seconds`: of running trials until `counted_at` (unix seconds), since it began or was last retried."""

    asked_by: list[str] = field(default_factory=list)  # the first one pays; empty: a work folder of one user
    gpu_seconds: float = 0.0
    counted_at: float = 0.0

    def add(self, user: str, *, alone: bool) -> None:
        """A user asks for it. `alone`: it was cancelled, and no earlier wish stands."""
        if alone:
            self.asked_by = [user]
        elif user not in self.asked_by:
            self.asked_by.append(user)

    def remove(self, user: str) -> None:
        """One of several users wants it no more. The last one stays: that one's wish ends with a cancellation."""
        if len(self.asked_by) > 1 and user in self.asked_by:
            self.asked_by.remove(user)

    @property
    def payer(self) -> str:
        """The user in whose turn it is served; "": the work folder's own."""
        return self.asked_by[0] if self.asked_by else ""

    def seconds_until(self, now: float, gpus: int) -> float:
        """GPU seconds until `now` (unix seconds). `gpus`: held since `counted_at`."""
        return self.gpu_seconds + gpus * max(0.0, now - self.counted_at)

    def count(self, gpus: int, event: Event) -> None:
        """Count GPUs held until this event; until the last sign of the coordinator before where it is a restart."""
        until = event.at
        if isinstance(event, Restarted) and event.seen_at is not None:
            until = min(until, event.seen_at)
        self.gpu_seconds = self.seconds_until(until, gpus)
        self.counted_at = max(self.counted_at, event.at)
