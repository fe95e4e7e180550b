"""Laws of the limits of accounts and QOS; those of a real Slurm are read in `test_recorded.py`."""

from __future__ import annotations

import pytest
from support.slurm_options import slurm_options

from coordinator.cluster import Job
from coordinator.cluster.daemon_job import daemon_job, own_options
from coordinator.cluster.slurm_accounts import USER_FORMAT, Accounting, parse_rows, parse_tres
from coordinator.cluster.slurm_parse import seconds_of
from coordinator.cluster.slurm_rules import SiteRules, parse_partitions, within_limits

# default account, account, partition, default QOS, QOS, MaxJobs, MaxSubmit, MaxTRES, MaxTRESPerNode, GrpTRES, GrpJobs, GrpSubmit, MaxWall
OWN = """\
lab|lab||normal|normal,short|40||cpu=4||cpu=8,mem=20G|||45:00
lab|lab|debug|short|short|2|||||||
lab|other||short|short,big||||||||
"""
QOS = {
    name: {"name": name, "maxwall": wall}
    for name, wall in (("normal", ""), ("short", "00:30:00"), ("long", "1-00:00:00"))
}
ACCOUNTING = Accounting(associations=parse_rows(OWN, USER_FORMAT), qos=QOS)
PARTITIONS = """\
PartitionName=all Default=YES QoS=short
PartitionName=gpu MaxTime=UNLIMITED QoS=N/A
PartitionName=tiny MaxTime=00:01:00 QoS=N/A
PartitionName=quick QoS=short
"""
RULES = SiteRules(config={}, partitions=parse_partitions(PARTITIONS))


def held(*asked: object) -> set[tuple[str, str, int]]:
    found = ACCOUNTING.limits(*asked)  # type: ignore[arg-type]
    return {(limit.name, limit.what, limit.most) for limit in found if limit.what != "wall"}


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 1800),  # the default partition's QOS
        ({"partition": "gpu"}, 2700),
        ({"qos": "short"}, 1800),
        ({"qos": "long", "partition": "gpu"}, 3600),  # hides that of the association
        ({"qos": "normal", "account": "other", "partition": "gpu"}, 3600),
        ({"account": "lab", "partition": "tiny"}, 60),
        ({"account": "other", "partition": "gpu"}, 1800),  # its default QOS
        ({"account": "third", "partition": "gpu"}, 3600),
        ({"account": "other", "partition": "gpu,quick"}, 1800),
    ],
)
def test_no_job_asks_for_more_time_than_partition_account_and_qos_allow(
    settings: dict[str, str], seconds: int
) -> None:
    """A role's own settings are for its jobs alone: the daemon's line asks for what [cluster] allows."""
    job = Job(name="j", argv=("true",), log="/dev/null", time_limit_seconds=3600)
    options = slurm_options(**settings, slurm={"build": {"partition": "tiny", "account": "x", "qos": "y"}})
    assert within_limits(job, options, RULES, ACCOUNTING).time_limit_seconds == seconds
    daemon = within_limits(daemon_job(options), own_options(options), RULES, ACCOUNTING)
    assert min(3600, daemon.time_limit_seconds) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1:00:00", 3600), ("30:00", 1800), ("2-00:00:00", 172_800), ("infinite", None), ("n/a", None)],
)
def test_a_time_limit_is_read(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


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
