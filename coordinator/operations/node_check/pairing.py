"""Rounds of tests in pairs that find bad nodes, and the meaning of their records. Pure. Called by `run`.

A test of several nodes fails if one of them is bad, without saying which. So round 1 pairs all nodes; with an odd number
three are tested together. Nodes that pass are good. Later rounds pair each suspect with a good node: if such a test fails,
the suspect is bad. With at most n/4 bad nodes there is a good partner for each suspect in round 2. (With an odd number one
suspect of the three may wait for round 3.) More bad nodes take more rounds. If no test has passed, suspects are paired with
one another in every possible way; if none passes then, nothing is decided.

Rule: a node is accused by a failed test with otherwise good nodes, or by direct evidence (`accuse`). A test that did not take
place says nothing. Rates are compared within a round, between similar devices, so that a common slowdown accuses no node. A
rate counts as slow far below the median: page sizes, clocks and networks between racks differ by less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any, Literal

from coordinator.site.diagnosis.diagnose import diagnose_text

MOST_ROUNDS = 8  # of one check; more only find bad nodes if nearly half of all are bad
SLOW_SHARE = 0.4  # fraction of the median rate of similar devices, below which a node is slow
SLOW_GATHER_SHARE = 0.25  # fraction of the median rate of the all-gathers, below which one fails
RATE_WORDS = {"matmul": "its matrix product", "memory": "its memory", "copy": "its copy from the host"}

World = tuple[str, ...]  # nodes tested together
Node = Mapping[str, Any]  # a record of `evaljobs.node_check`
Verdict = Literal["ok", "bad", "suspect", "not checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a test. `passed` None: it did not take place. `why`: a description, unless it passed."""

    passed: bool | None
    why: str = ""


@dataclass(slots=True)
class Pairing:
    """What is known of the nodes after the rounds so far. `nodes`: in the order in which round 1 pairs them."""

    nodes: Sequence[str]
    most_rounds: int = MOST_ROUNDS
    rounds: int = 0
    good: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)  # node -> why, as in the next two
    unchecked: dict[str, str] = field(default_factory=dict)
    _why: dict[str, str] = field(default_factory=dict)  # of suspects

    @property
    def suspects(self) -> list[str]:
        return [n for n in self.nodes if n not in self.good and n not in self.bad and n not in self.unchecked]

    @property
    def undetermined(self) -> bool:
        """Return whether no test passed and some node is undecided."""
        return not self.good and bool(self.suspects)

    def worlds(self) -> list[World]:
        """Return the concurrent tests of the next round; empty if all is decided, or no further round helps."""
        left = self.suspects
        if not left or self.rounds >= self.most_rounds:
            return []
        if self.rounds == 0:
            return _round_one(left)
        if self.good:
            return [(suspect, partner) for suspect, partner in zip(left, self.good, strict=False)]
        # round 1 of an even number was turn 0; a test of three was not a test of two
        turn = self.rounds - (len(self.nodes) % 2)
        return _turn(self.nodes, turn, set(left))

    def learn(self, results: Mapping[World, Outcome]) -> None:
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
        """Make a node whose tests passed a suspect again: the next round tests it once more."""
        if node not in self.bad:
            self.good = [n for n in self.good if n != node]
            self._why[node] = why

    def accuse(self, node: str, why: str) -> None:
        """Mark a node as bad because of direct evidence, such as a wrong product."""
        self.bad[node] = why
        self.good = [n for n in self.good if n != node]
        self.unchecked.pop(node, None)

    def verdict(self, node: str) -> tuple[Verdict, str]:
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
    """Return pairs of a round-robin tournament (the circle method): after n - 1 turns (n: an odd number) all pairs have met."""
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


# --- records ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTest:
    """A completed test. `tasks`: processes per node; `ran`: its job began; `said`: how the job ended."""

    world: World
    records: Sequence[Node]
    tasks: int = 1
    ran: bool = True
    said: str = ""


def judge_round(pairing: Pairing, held: Sequence[PairTest], was_slow: set[str]) -> None:
    """Evaluate a round. A slow node is a suspect; one that was slow before (`was_slow`, which grows) is bad."""
    results = {test.world: outcome_of_test(test) for test in held}
    gathers = {test.world: rate for test in held if (rate := gather_rate(test.records))}
    results |= {world: Outcome(passed=False, why=why) for world, why in slow_gathers(gathers).items()}
    pairing.learn(results)
    every = [record for test in held for record in test.records]
    for record in every:
        if said := hardware_trouble(record):
            pairing.accuse(record["node"], said)
    slow = slow_nodes(every)
    for node, why in slow.items():
        pairing.accuse(node, why) if node in was_slow else pairing.doubt(node, why)
    was_slow.update(slow)


def hardware_trouble(record: Node) -> str:
    """Return evidence that this node is bad: what it measured, or an Xid of its GPUs, by the rules of diagnosis."""
    kernel = diagnose_text("\n".join(record.get("kernel", ())))
    return "; ".join(filter(None, (record["trouble"], kernel.line if kernel.owner == "gpu" else "")))


def outcome_of_test(test: PairTest) -> Outcome:
    world, records, said = test.world, test.records, test.said
    if not test.ran and not records:
        return Outcome(passed=None, why=said)
    if lost := [str(r["lost"]) for r in records if r["lost"]]:
        return Outcome(passed=None, why=lost[0])
    missing = [n for n in world if sum(r["node"] == n for r in records) < test.tasks]
    if missing:
        return Outcome(passed=False, why=f"no answer of {', '.join(missing)} ({said})")
    hung = sorted({str(r["node"]) for r in records if not r["done"]})
    failed = [f"{r['node']}: {r['together']}" for r in records if r["together"]]
    failed.sort(key=lambda said: "measurement failed" not in said)  # it caused the failure of the others
    if hung:
        return Outcome(passed=False, why=f"{', '.join(hung)} did not end the all-gather ({said})")
    return Outcome(passed=not failed, why=failed[0] if failed else "")


def gather_rate(records: Iterable[Node]) -> float | None:
    """Return bytes per second of a test's all-gather, from its slowest process; None if there was none."""
    return min((float(r["gathered"]) for r in records if "gathered" in r), default=None)


def slow_gathers(rates: Mapping[World, float]) -> dict[World, str]:
    """Describe tests of a round whose all-gather is much slower than the others'."""
    usual = median_high(rates.values()) if rates else 0.0
    return {
        world: f"the all-gather of {', '.join(world)} is {usual / rate:.1f} times slower than the median"
        for world, rate in rates.items()
        if rate < SLOW_GATHER_SHARE * usual
    }


def own_rates(records: Iterable[Node]) -> dict[str, dict[str, float]]:
    """Return node -> rates of its slowest device."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        own = found.setdefault(str(record["node"]), {})
        for name, rate in record.get("rates", {}).items():
            own[name] = min(rate, own.get(name, rate))
    return found


def slow_nodes(records: Sequence[Node]) -> dict[str, str]:
    """Describe nodes of a round with a rate much slower than that of the round's nodes with the same device."""
    kinds: dict[str, list[Node]] = {}
    for record in records:
        kinds.setdefault(str(record.get("device", "")), []).append(record)
    found: dict[str, str] = {}
    for kind, alike in kinds.items():
        rates = own_rates(alike)
        for name, words in RATE_WORDS.items():
            known = {node: own[name] for node, own in rates.items() if name in own}
            usual = median_high(known.values()) if known else 0.0
            for node, rate in known.items():
                if rate < SLOW_SHARE * usual:
                    found.setdefault(
                        node, f"{words} is {usual / rate:.1f} times slower than the median of {kind}"
                    )
    return found
