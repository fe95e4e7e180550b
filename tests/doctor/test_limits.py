"""Laws of what `evalspan doctor` says of limits, accounts and reservations, before an evaluation meets them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import fake_node

from coordinator.cluster.slurm_accounts import (
    ACCOUNT_FORMAT,
    QOS_FORMAT,
    USER_FORMAT,
    Accounting,
    parse_rows,
)
from coordinator.cluster.slurm_limits import Limit
from coordinator.cluster.slurm_parse import parse_reservations
from coordinator.cluster.slurm_rules import Partition, SiteRules
from coordinator.config.schema import Config
from coordinator.doctor import collect
from coordinator.doctor.facts import Facts, Finding
from coordinator.doctor.findings import judge
from coordinator.doctor.limit_findings import case_of, judge_limit
from coordinator.runtime import wiring

LANES = 8
# default account, account, partition, default QOS, QOS, MaxJobs, MaxSubmit, MaxTRES, MaxTRESPerNode, GrpTRES, GrpJobs, GrpSubmit, MaxWall
ASSOCIATION = "lab|lab||normal|normal,short|{jobs}|{submits}|{a_job}|||||{wall}\n"
ACCOUNT = "lab|root|{group}||\nroot||||\n"
# name, MinTRES, MaxTRES, PerNode, PerUser, PerAccount, GrpTRES, MaxJobsPU, PA, GrpJobs, MaxSubmitPU, PA, GrpSubmit, MaxWall
QOS = "normal|{least}|||{user}||{qos_group}|||||||\nshort|||||||2||||||\n"


def accounting(**limits: str) -> Accounting:
    """Of a user with the default account lab and the default QOS normal."""
    every = (
        dict.fromkeys(("jobs", "submits", "a_job", "group", "least", "user", "qos_group", "wall"), "")
        | limits
    )
    return Accounting(
        associations=parse_rows(ASSOCIATION.format(**every), USER_FORMAT),
        accounts={row["account"]: row for row in parse_rows(ACCOUNT.format(**every), ACCOUNT_FORMAT)},
        qos={row["name"]: row for row in parse_rows(QOS.format(**every), QOS_FORMAT)},
    )


def facts_of(settings: dict[str, Any] | None = None, nodes: int = 4, **facts: Any) -> Facts:
    """A site of nodes with eight GPUs each, whose Slurm applies the limits of its accounting."""
    config = Config.model_validate({"cluster": {"kind": "slurm"}} | (settings or {}))
    known: dict[str, Any] = {
        "config": config,
        "python": "",
        "work_fs": "nfs4",
        "work_free": 1 << 40,
        "rules": rules(),
        "options": wiring.slurm_options(config),
        "jobs": collect.samples(config, [fake_node("n0")]),
        "lanes": LANES,
        "gpu_nodes": [fake_node(f"n{i}", gpus=LANES) for i in range(nodes)],
        "user": "me",
    }
    return Facts(**{**known, **facts})


def judged(settings: dict[str, Any] | None = None, **facts: Any) -> dict[str, Finding]:
    return {finding.what: finding for finding in judge(facts_of(settings, **facts))}


@given(
    name=st.sampled_from(
        ["MaxJobs", "GrpTRES cpu", "GrpTRES mem", "GrpTRES gres/gpu", "MaxTRESPerUser node"]
    ),
    most=st.integers(0, 200),
    hosting=st.booleans(),
)
def test_settings_that_a_finding_names_end_its_warning(name: str, most: int, hosting: bool) -> None:
    """Typed in as they stand, they leave a limit that is enough."""
    kind, _, what = name.partition(" ")
    most *= 1000 if what == "mem" else 1
    limit = Limit(name=kind, what=what or "jobs", most=most, holder="QOS normal")
    settings: dict[str, Any] = {"stage": {"host_trials": hosting}}

    def found() -> Finding:
        facts = facts_of(settings)
        (only,) = judge_limit(case_of(facts, limit, list(facts.jobs)))
        return only

    words = found().todo.replace(",", "").replace(":", "").split()
    named = [
        (words[i - 2].strip("[]"), words[i - 1], words[i + 1]) for i, word in enumerate(words) if word == "="
    ]
    for table, key, value in named:
        settings[table] = settings.get(table, {}) | {key: int(value)}
    assert not named or found().status == "ok", (settings, found())


def test_a_limit_counts_the_jobs_of_its_roles_alone() -> None:
    """Metric workers with a QOS of their own are named with the setting that holds it."""
    settings = {"slurm": {"metric": {"qos": "short"}}}
    found = judged(settings, accounting=accounting(user="gres/gpu=64"))
    assert found["MaxJobsPerUser"].status == "warn"
    assert found["MaxJobsPerUser"].todo == "set [metric] workers = 2, or another [slurm.metric] qos"
    assert found["MaxTRESPerUser gres/gpu"].status == "ok"


def rules(enforced: str = "associations,limits,qos", **partition: Any) -> SiteRules:
    gpu = Partition(name="gpu", default=True, **partition)
    return SiteRules(config={"AccountingStorageEnforce": enforced}, partitions=(gpu,))


KNOWN = {"accounting": accounting()}
ASLEEP = replace(fake_node("n1"), state="idle~", usable=False)
SMALL, LARGE = fake_node("n1", memory_mb=2000), fake_node("n2", memory_mb=64000)
CUT = {"accounting": accounting(wall="30:00")}
HIDDEN = Accounting(associations=KNOWN["accounting"].associations, qos=KNOWN["accounting"].qos)


@pytest.mark.parametrize(
    ("facts", "what", "status", "says"),
    [
        # limits that Slurm does not apply are no obstacle; those that cannot be read are never ok
        ({"rules": rules("none"), "accounting": accounting(jobs="0")}, "limits", "ok", "(AccountingStorageEnforce=none)"),
        ({"rules": rules("associations"), "accounting": accounting(jobs="0")}, "limits", "ok", "=associations)"),
        (KNOWN, "limits", "ok", "none on the jobs"),
        ({"accounting_error": "slurmdbd is away"}, "limits", "warn", ""),
        ({"accounting": HIDDEN}, "limits", "warn", "account lab"),
        ({"rules_error": "scontrol timed out"}, "reservations", "warn", ""),
        # time that account and QOS cut; what MaxTime of the partition cuts has a finding of its own
        (CUT, "MaxWall", "warn", "0.5 h: build, stage, trial, metric jobs"),
        (CUT | {"rules": rules("all", max_seconds=1800)}, "MaxWall", "", ""),
        ({"accounting": accounting(wall="05:00")}, "coordinator's job", "warn", "a successor goes on"),
        (CUT, "coordinator's job", "ok", "a successor goes on"),
        # `sbatch` takes a job for a partition of other accounts, and it waits for ever
        (KNOWN | {"rules": rules("all", allowed={"AllowAccounts": "chemistry"})}, "partition access", "fail", "chemistry, not lab"),
        # nodes
        ({"gpu_nodes": [ASLEEP]}, "GPU nodes", "fail", "set [nodes] wake = true"),
        ({"gpu_nodes": [SMALL, LARGE]}, "nodes with little memory", "warn", "n1 (2000 MB)"),
        ({"gpu_nodes": [SMALL, SMALL]}, "nodes with little memory", "fail", "n1 (2000 MB)"),
        ({}, "nodes with little memory", "", ""),
        ({"rules": SiteRules(config={"MaxArraySize": "1"})}, "job arrays", "ok", "in jobs of 1"),
    ],
)  # fmt: skip
def test_a_rule_of_the_site_is_found_with_what_to_do(
    facts: dict[str, Any], what: str, status: str, says: str
) -> None:
    """ "": nothing is said of it."""
    found = judged(**facts).get(what)
    assert (found.status if found else "") == status
    assert not found or says in f"{found.found} -> {found.todo}"


def test_a_limit_on_what_no_job_asks_for_is_passed_over() -> None:
    """Such as billing: sites name resources of their own."""
    found = judged(accounting=accounting(least="billing=10,gres/shard=1"))
    assert not [what for what in found if "billing" in what or "shard" in what]


def test_a_job_that_hosts_trials_keeps_a_limit_on_each_job_with_fewer_of_them() -> None:
    settings = {"stage": {"host_trials": True}}
    found = judged(settings, accounting=accounting(a_job="cpu=5"))["MaxTRES cpu"]
    assert (found.status, "[borrow] max_gpus = 5" in found.todo) == ("warn", True)


@pytest.mark.parametrize(
    ("settings", "refusal", "todo"),
    [
        ({"cluster": {"kind": "slurm", "account": "nope"}}, "Invalid account or account/partition combination", "[cluster] account is 'nope'; your accounts: lab"),
        ({}, "Invalid account or account/partition combination", "[cluster] account is not set; your accounts: lab"),
        ({}, "name your account: --account=ACCOUNT; Unspecified error", "[cluster] account is not set; your accounts: lab"),
        ({"slurm": {"trial": {"account": "x"}}}, "Invalid account", "[slurm.trial] account is 'x'; your accounts: lab"),
        ({"slurm": {"trial": {"qos": "high"}}}, "Invalid qos specification", "[slurm.trial] qos is 'high'; your QOS: normal, short"),
        ({}, "Requested reservation is invalid", "[cluster] reservation; `scontrol show reservation` lists them"),
        ({}, "More processors requested than permitted", "see [trial], [cluster] and [slurm]"),
    ],
)  # fmt: skip
def test_a_refused_name_is_shown_with_its_setting_and_the_users_own_names(
    settings: dict[str, Any], refusal: str, todo: str
) -> None:
    kinds = {"trial": ("fail", f"refused: {refusal}", True)}
    found = judged(settings, accounting=accounting(), job_kinds=kinds)["trial jobs"]
    assert (found.status, found.todo) == ("fail", todo)


# as `scontrol --oneliner show reservation` prints them
RESERVATION = (
    "ReservationName=fix StartTime=2026-11-22T17:15:43 EndTime=2027-11-22T17:15:43 Nodes={nodes} NodeCnt=1 "
    "Flags=SPEC_NODES TRES=cpu=8 Users={users} Groups=(null) Accounts={accounts} Licenses=(null) State={state}\n"
)


@pytest.mark.parametrize(
    ("row", "setting", "status", "says"),
    [
        ({}, None, "warn", "2 of 4 GPU nodes (n0, n1), until 2027-11-22 17:15, for users root"),
        ({"nodes": "n[0-3]"}, None, "fail", "nothing runs before its end"),
        ({"nodes": "c1"}, None, "warn", "1 of 1 CPU nodes (c1)"),
        ({"accounts": "lab", "users": "(null)"}, None, "warn", 'set [cluster] reservation = "fix" to use these nodes'),
        ({"accounts": "lab", "users": "-me"}, None, "warn", "for users all but me and accounts lab -> nothing"),
        ({"state": "INACTIVE"}, None, "warn", "from 2026-11-22 17:15 until 2027-11-22 17:15, for users root -> jobs whose time"),
        ({"users": "me"}, "fix", "ok", "for users me"),
        ({"users": "me", "state": "INACTIVE"}, "fix", "warn", "jobs wait until it begins"),
        ({}, "fix", "warn", "remove [cluster] reservation"),
        ({"nodes": "x[1-9]"}, None, "", ""),
    ],
)  # fmt: skip
def test_a_reservation_is_named_with_its_holder_its_end_and_the_nodes_that_it_takes(
    row: dict[str, str], setting: str | None, status: str, says: str
) -> None:
    text = RESERVATION.format(
        **{"nodes": "n[0-1]", "users": "root", "accounts": "(null)", "state": "ACTIVE"} | row
    )
    found = judged(
        {"cluster": {"kind": "slurm", "reservation": setting}},
        accounting=accounting(),
        reservations=parse_reservations(text),
        cpu_nodes=[replace(fake_node("c1"), gpus=0)],
    ).get("reservation fix")
    assert (found.status if found else "") == status
    assert not found or says in f"{found.found} -> {found.todo}"


def test_one_cause_is_one_line() -> None:
    """A site that demands an account refuses all kinds of jobs by the same words: the accounts are named once."""
    kinds = dict.fromkeys(("build", "trial", "metric"), ("fail", "refused: name your account", True))
    found = judge(facts_of(accounting=accounting(), job_kinds=kinds))
    (line,) = [f for f in found if f.found.startswith("refused")]
    assert line.what == "build jobs, trial jobs, metric jobs"
    assert line.todo == "[cluster] account is not set; your accounts: lab"
