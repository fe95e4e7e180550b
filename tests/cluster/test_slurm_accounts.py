"""Laws of the limits of accounts and QOS: those that slurmctld applies are read, with whom they belong to."""

from __future__ import annotations

import pytest

from coordinator.cluster.slurm_accounts import (
    ACCOUNT_FORMAT,
    QOS_FORMAT,
    USER_FORMAT,
    Accounting,
    parse_rows,
    parse_tres,
)
from coordinator.cluster.slurm_rules import parse_partitions

# default account, account, partition, default QOS, QOS, MaxJobs, MaxSubmit, MaxTRES, MaxTRESPerNode, GrpTRES, GrpJobs, GrpSubmit
OWN = """\
lab|lab||normal|normal,short|40||cpu=4||cpu=8,mem=20G||
lab|lab|debug|short|short|2||||||
lab|other||short|short,big|||||||
"""
# account, parent, GrpTRES, GrpJobs, GrpSubmit
ACCOUNTS = "lab|division|cpu=6,gres/gpu=3|50|100\ndivision|root|gres/gpu=64||\nroot||||\n"
# name, MinTRES, MaxTRES, PerNode, PerUser, PerAccount, GrpTRES, MaxJobsPU, PA, GrpJobs, MaxSubmitPU, PA, GrpSubmit
QOS = """\
normal||||gres/gpu=4,mem=64G|cpu=30||||||44|
short|cpu=1|||||cpu=200|7|||||
big|gres/gpu=1||||||||||||
"""

ACCOUNTING = Accounting(
    associations=parse_rows(OWN, USER_FORMAT),
    accounts={row["account"]: row for row in parse_rows(ACCOUNTS, ACCOUNT_FORMAT)},
    qos={row["name"]: row for row in parse_rows(QOS, QOS_FORMAT)},
)


def held(*asked: object) -> set[tuple[str, str, int, str]]:
    return {(limit.name, limit.what, limit.most, limit.holder) for limit in ACCOUNTING.limits(*asked)}  # type: ignore[arg-type]


def test_a_job_is_under_its_qos_its_association_and_all_accounts_above() -> None:
    """The default QOS and the default account, where the settings name none."""
    own = "your association with account lab"
    assert held(None, None, ["gpu"]) == {
        ("MaxTRESPerUser", "gres/gpu", 4, "QOS normal"),
        ("MaxTRESPerUser", "mem", 65536, "QOS normal"),
        ("MaxTRESPerAccount", "cpu", 30, "QOS normal"),
        ("MaxSubmitJobsPerAccount", "jobs", 44, "QOS normal"),
        ("MaxJobs", "jobs", 40, own),
        ("MaxTRES", "cpu", 4, own),
        ("GrpTRES", "cpu", 8, own),
        ("GrpTRES", "mem", 20480, own),
        ("GrpTRES", "cpu", 6, "account lab"),
        ("GrpTRES", "gres/gpu", 3, "account lab"),
        ("GrpTRES", "gres/gpu", 64, "account division"),
        ("GrpJobs", "jobs", 50, "account lab"),
        ("GrpSubmit", "jobs", 100, "account lab"),
    }


def test_a_limit_of_a_qos_holds_in_place_of_the_associations() -> None:
    """As slurmctld does it: even a looser one; the partition's own QOS comes first."""
    found = held("lab", "short", ["gpu"])
    assert ("GrpTRES", "cpu", 200, "QOS short") in found
    assert not any(
        name == "GrpTRES" and what == "cpu" and "account" in holder for name, what, _, holder in found
    )
    assert ("MaxJobsPerUser", "jobs", 7, "QOS short") in found
    assert not any(name == "MaxJobs" for name, *_ in found)
    found = held("lab", "normal", ["gpu"], ["short"])
    assert ("GrpTRES", "cpu", 200, "the partition's QOS short") in found
    assert ("MaxTRESPerUser", "gres/gpu", 4, "QOS normal") in found


def test_an_association_with_a_partition_holds_there_alone() -> None:
    assert ("MaxJobs", "jobs", 2, "your association with account lab") in held("lab", "normal", ["debug"])
    assert ("MaxTRES", "cpu", 4, "your association with account lab") not in held("lab", "normal", ["debug"])
    assert held("other", "normal", ["debug"]) == held("other", "normal", ["gpu"])


def test_an_account_without_the_user_has_no_limits() -> None:
    """Slurm refuses its jobs; the accounts and QOS that the user may name are known."""
    assert held("third", None, ["gpu"]) == set()
    assert ACCOUNTING.own_accounts == ["lab", "other"]
    assert ACCOUNTING.qos_of("other") == ["big", "short"]
    assert ACCOUNTING.qos_of(None) == ["normal", "short"]


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
