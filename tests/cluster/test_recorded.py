"""What a real Slurm 22.05 printed is read as the records that stand beside it: `support.listing_recording` records anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.slurm_options import slurm_options

from coordinator.cluster import slurm_parse as text
from coordinator.cluster.slurm_accounts import ACCOUNT_FORMAT, QOS_FORMAT, USER_FORMAT, Accounting, parse_rows
from coordinator.cluster.slurm_rules import parse_partitions

RECORDED = Path(__file__).parent / "recorded"
SITES = {
    "of the default partition": slurm_options(),
    "with CPU nodes": slurm_options(partition="gpu", cpu_partition="cpu"),
    "with a feature": slurm_options(nodes={"features": ("rack1",)}),
    "that may be preempted": slurm_options(partition="none", borrow={"best_effort": "spare"}),
    "of roles": slurm_options(
        partition="spare", slurm={"precursor": {"partition": "gpu"}, "metric": {"partition": "cpu"}}
    ),
}


def said(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def nodes() -> dict[str, list[Any]]:
    rows = text.parse_sinfo(said("sinfo"))
    return {name: text.nodes_of(rows, options) for name, options in SITES.items()}


def limits() -> Mapping[str, Sequence[object]]:
    accounting = Accounting(
        associations=parse_rows(said("user"), USER_FORMAT),
        accounts={row["account"]: row for row in parse_rows(said("accounts"), ACCOUNT_FORMAT)},
        qos={row["name"]: row for row in parse_rows(said("qos"), QOS_FORMAT)},
    )
    return {
        "own": accounting.own_accounts,
        "of the default QOS": accounting.limits(None, None, ["gpu"]),
        "of a QOS": accounting.limits("research", "few-gpus", ["gpu"]),
        "of a partition's QOS": accounting.limits(None, "few-jobs", ["gpu"], ["few-gpus"]),
        "of another account": accounting.limits("root", None, ["gpu"]),
    }


READ: dict[str, Callable[[], Any]] = {
    "squeue": lambda: text.parse_queue(said("squeue"), "t"),
    "squeue_all": lambda: [job.name for job in text.parse_queue(said("squeue"), None)],
    "sinfo": nodes,
    "partitions": lambda: parse_partitions(said("partitions")),
    "reservations": lambda: text.parse_reservations(said("reservations")),
    "limits": limits,
}


def plain(found: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(found, default=asdict))


@pytest.mark.parametrize("name", READ)
def test_a_recorded_answer_is_read_as_the_records_beside_it(name: str) -> None:
    """Jobs of others and of other work folders are not ours, an array is its members, a node of several partitions is one."""
    expected = json.loads((RECORDED / f"{name}.json").read_text())
    assert plain(READ[name]()) == expected
