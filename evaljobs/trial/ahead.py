"""Shards that a trial runs while Redis is away: the next ones of its lane, as Redis last named them.

Rule: none of them is claimed, so any trial may steal them while Redis answers. A trial takes each
name once. Where two trials ran one shard meanwhile, its first record on disk counts. Called from
`trial.trial`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Ahead:
    """The trial's thread takes names; the heartbeat thread renews them."""

    def __init__(self) -> None:
        self.away = False  # a call to Redis failed, and no heartbeat has succeeded since then
        self._names: tuple[str, ...] = ()
        self._had: set[str] = set()

    def renew(self, names: Iterable[str]) -> None:
        """Redis answers, and these shards come next: the first one first."""
        self._names = tuple(names)
        self.away = False

    def had(self, shard: str) -> None:
        """The trial has this shard from Redis, so it is not taken from here as well."""
        self._had.add(shard)

    def take(self, fits: Callable[[str], bool]) -> str | None:
        """While Redis is away: the next shard that the trial has not had and that `fits`; else None."""
        if not self.away:
            return None
        shard = next((name for name in self._names if name not in self._had and fits(name)), None)
        if shard is not None:
            self._had.add(shard)
        return shard
