"""Rounds of tests in pairs that find bad nodes. Pure. Called by `run`.

A test of several nodes fails if one of them is bad, and does not say which. So round 1 pairs all nodes; with an odd number
three are tested together. Whoever passed is good. Later rounds pair each suspect with a good node: where such a test
fails, the suspect is bad. At most n/4 bad nodes leave a good partner for each suspect in round 2. (With an odd number one
suspect of the three may wait for round 3.) More bad nodes take more rounds. Where no test has passed, suspects are paired
with one another in each way that there is; where none passes then, nothing is decided.

Rule: a node is accused by a failed test with good nodes alone, or by evidence of its own (`accuse`). A test that did not
take place says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

MOST_ROUNDS = 8  # of one check; more find bad nodes only where nearly half of all are bad

World = tuple[str, ...]  # nodes that are tested together
Verdict = Literal["ok", "bad", "suspect", "not checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a test. `passed` None: it did not take place. `why`: in words, where it did not pass."""

    passed: bool | None
    why: str = ""


@dataclass(slots=True)
class Pairing:
    """What is known of the nodes after the rounds so far. `nodes`: in the order in which round 1 pairs them."""

    nodes: Sequence[str]
    most_rounds: int = MOST_ROUNDS
    rounds: int = 0  # that were held
    good: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)  # node -> why, also in the next two
    unchecked: dict[str, str] = field(default_factory=dict)
    _why: dict[str, str] = field(default_factory=dict)  # of suspects

    @property
    def suspects(self) -> list[str]:
        """Nodes of which nothing is decided yet."""
        return [n for n in self.nodes if n not in self.good and n not in self.bad and n not in self.unchecked]

    @property
    def undetermined(self) -> bool:
        """Did no test pass, and is nothing decided of some node?"""
        return not self.good and bool(self.suspects)

    def worlds(self) -> list[World]:
        """The tests of the next round, side by side; none where all is decided, or no round can decide more."""
        left = self.suspects
        if not left or self.rounds >= self.most_rounds:
            return []
        if self.rounds == 0:
            return _round_one(left)
        if self.good:
            return [(suspect, partner) for suspect, partner in zip(left, self.good, strict=False)]
        # round 1 of an even number was turn 0; a test of three was none of two
        turn = self.rounds - (len(self.nodes) % 2)
        return _turn(self.nodes, turn, set(left))

    def learn(self, results: Mapping[World, Outcome]) -> None:
        """Take in what came of a round's tests."""
        self.rounds += 1
        known = set(self.good)
        for world, outcome in results.items():
            new = [n for n in world if n not in known and n not in self.bad]
            if outcome.passed:
                self.good += new
            elif outcome.passed is None:
                self.unchecked |= {n: self._why.get(n, outcome.why) for n in new}
            elif len(new) == 1 < len(world) and known.issuperset(set(world) - set(new)):
                self.bad[new[0]] = outcome.why
            else:
                self._why |= dict.fromkeys(new, outcome.why)

    def doubt(self, node: str, why: str) -> None:
        """A node whose tests passed is a suspect again: the next round tests it once more."""
        if node not in self.bad:
            self.good = [n for n in self.good if n != node]
            self._why[node] = why

    def accuse(self, node: str, why: str) -> None:
        """Evidence of the node's own, such as a wrong product: it is bad, whatever else was seen."""
        self.bad[node] = why
        self.good = [n for n in self.good if n != node]
        self.unchecked.pop(node, None)

    def verdict(self, node: str) -> tuple[Verdict, str]:
        """A node's verdict so far, and why."""
        if node in self.bad:
            return "bad", self.bad[node]
        if node in self.good:
            return "ok", ""
        if node in self.unchecked:
            return "not checked", self.unchecked[node]
        return "suspect", self._why.get(node, "it was not tested")


def _round_one(nodes: Sequence[str]) -> list[World]:
    pairs: list[World] = [tuple(nodes[i : i + 2]) for i in range(0, len(nodes), 2)]
    if len(nodes) > 1 and len(nodes) % 2:
        last = pairs.pop()
        pairs[-1] += last
    return pairs


def _turn(nodes: Sequence[str], turn: int, left: set[str]) -> list[World]:
    """Pairs of a round-robin tournament (the circle method): after n - 1 turns (n: an odd number) each two nodes have met."""
    ring: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    # neighbours meet in turn 0, as in round 1
    ring = [*ring[0::2], *reversed(ring[1::2])]
    if turn >= len(ring) - 1:
        return []
    first, *others = ring
    others = others[turn:] + others[:turn]
    ring = [first, *others]
    half = len(ring) // 2
    pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
    return [(a, b) for a, b in pairs if a is not None and b is not None and {a, b} <= left]
