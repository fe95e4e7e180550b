"""What the records of a test say: whether it passed, which nodes are bad by their own evidence, which are slow. Pure.

Rule: rates are compared within a round, between like devices, so that what slows all of them accuses none. A rate counts as
slow far below the median: pages of a system, clocks and networks between racks differ by less. Called by `run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

from coordinator.diagnosis.verdict import of_text
from coordinator.node_check.pairing import Outcome, Pairing, World

SLOW = 0.4  # share of the median rate of like devices, below which a node is slow
SLOW_GATHER = 0.25  # share of the median rate of the all-gathers, below which one fails
SAID = {"matmul": "its matrix product", "memory": "its memory", "copy": "its copy from the host"}

Node = Mapping[str, Any]  # a record of `evaljobs.node_check`


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A test that was held. `tasks`: processes of a node; `ran`: its job began; `said`: how the job ended."""

    world: World
    records: Sequence[Node]
    tasks: int = 1
    ran: bool = True
    said: str = ""


def judge(pairing: Pairing, held: Sequence[Held], was_slow: set[str]) -> None:
    """Take in a round. A node that is slow is a suspect; one that was slow before (`was_slow`, which grows) is bad."""
    results = {test.world: outcome(test) for test in held}
    gathers = {test.world: rate for test in held if (rate := gathered(test.records))}
    results |= {world: Outcome(passed=False, why=why) for world, why in slow_gathers(gathers).items()}
    pairing.learn(results)
    every = [record for test in held for record in test.records]
    for record in every:
        if said := trouble(record):
            pairing.accuse(record["node"], said)
    slow = slow_nodes(every)
    for node, why in slow.items():
        pairing.accuse(node, why) if node in was_slow else pairing.doubt(node, why)
    was_slow.update(slow)


def trouble(record: Node) -> str:
    """Evidence that this node is bad: what it measured, and an Xid that is of its GPUs, by the rules of diagnosis."""
    kernel = of_text("\n".join(record.get("kernel", ())))
    return "; ".join(filter(None, (record["trouble"], kernel.line if kernel.owner == "gpu" else "")))


def outcome(test: Held) -> Outcome:
    """What came of a test."""
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
    failed.sort(key=lambda said: "measurement failed" not in said)  # it began the others' failure
    if hung:
        return Outcome(passed=False, why=f"{', '.join(hung)} did not end the all-gather ({said})")
    return Outcome(passed=not failed, why=failed[0] if failed else "")


def gathered(records: Iterable[Node]) -> float | None:
    """Bytes a second of a test's all-gather: its slowest process's; None where there was none."""
    return min((float(r["gathered"]) for r in records if "gathered" in r), default=None)


def slow_gathers(rates: Mapping[World, float]) -> dict[World, str]:
    """Tests of a round whose all-gather is much slower than the others', in words."""
    usual = median_high(rates.values()) if rates else 0.0
    return {
        world: f"the all-gather of {', '.join(world)} is {usual / rate:.1f} times slower than the median"
        for world, rate in rates.items()
        if rate < SLOW_GATHER * usual
    }


def own_rates(records: Iterable[Node]) -> dict[str, dict[str, float]]:
    """Node -> rates of its slowest device."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        own = found.setdefault(str(record["node"]), {})
        for name, rate in record.get("rates", {}).items():
            own[name] = min(rate, own.get(name, rate))
    return found


def slow_nodes(records: Sequence[Node]) -> dict[str, str]:
    """Nodes of a round with a rate that is much slower than that of the round's nodes with the same device, in words."""
    kinds: dict[str, list[Node]] = {}
    for record in records:
        kinds.setdefault(str(record.get("device", "")), []).append(record)
    found: dict[str, str] = {}
    for kind, alike in kinds.items():
        rates = own_rates(alike)
        for name, words in SAID.items():
            known = {node: own[name] for node, own in rates.items() if name in own}
            usual = median_high(known.values()) if known else 0.0
            for node, rate in known.items():
                if rate < SLOW * usual:
                    found.setdefault(
                        node, f"{words} is {usual / rate:.1f} times slower than the median of {kind}"
                    )
    return found
