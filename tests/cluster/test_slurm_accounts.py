"""Laws of the limits of accounts and QOS; those of a real Slurm are read in `test_recorded.py`."""

from __future__ import annotations

import pytest

from coordinator.cluster.slurm_accounts import USER_FORMAT, Accounting, parse_rows, parse_tres
from coordinator.cluster.slurm_rules import parse_partitions

# default account, account, partition, default QOS, QOS, MaxJobs, MaxSubmit, MaxTRES, MaxTRESPerNode, GrpTRES, GrpJobs, GrpSubmit
OWN = """\
lab|lab||normal|normal,short|40||cpu=4||cpu=8,mem=20G||
lab|lab|debug|short|short|2||||||
lab|other||short|short,big|||||||
"""
ACCOUNTING = Accounting(associations=parse_rows(OWN, USER_FORMAT))


def held(*asked: object) -> set[tuple[str, str, int]]:
    return {(limit.name, limit.what, limit.most) for limit in ACCOUNTING.limits(*asked)}  # type: ignore[arg-type]


def test_an_association_with_a_partition_holds_there_alone() -> None:
    assert held("lab", "normal", ["debug"]) == {("MaxJobs", "jobs", 2)}
    assert ("MaxTRES", "cpu", 4) in held("lab", "normal", ["gpu"])
    assert held("other", "normal", ["debug"]) == held("other", "normal", ["gpu"])


def test_the_qos_that_an_account_may_use_are_known() -> None:
    """Of the default account where none is named; Slurm refuses jobs of an account without the user."""
    assert ACCOUNTING.qos_of("other") == ["big", "short"]
    assert ACCOUNTING.qos_of(None) == ["normal", "short"]
    assert held("third", None, ["gpu"]) == set()


@pytest.mark.parametrize(
    ("text", "amounts"),
    [
        ("", {}),
        ("cpu=4,mem=15.50G,gres/gpu:a100=2", {"cpu": 4, "mem": 15872, "gres/gpu:a100": 2}),
        ("mem=1T,node=1K,billing=16", {"mem": 1 << 20, "node": 1024, "billing": 16}),
        ("mem=500M,license/x=N", {"mem": 500}),
    ],
)
def test_amounts_of_tres_are_read(text: str, amounts: dict[str, int]) -> None:
    assert parse_tres(text) == amounts


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ("AllowAccounts=ALL AllowQos=ALL", ""),
        ("AllowAccounts=other,lab AllowQos=ALL", ""),
        ("AllowAccounts=other AllowQos=ALL", "partition gpu is for accounts other, not lab"),
        ("AllowAccounts=ALL AllowQos=high,short", "partition gpu is for QOS high,short, not normal"),
        ("DenyAccounts=lab AllowQos=ALL", "partition gpu is not for accounts lab"),
        ("AllowAccounts=ALL DenyQos=low", ""),
    ],
)
def test_a_partition_says_whose_jobs_never_start_there(fields: str, why: str) -> None:
    (partition,) = parse_partitions(f"PartitionName=gpu AllowGroups=ALL {fields} QoS=N/A State=UP\n")
    assert partition.refuses("lab", "normal") == why
