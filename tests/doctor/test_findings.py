"""Laws of what `evalspan doctor` says of facts: what stops an evaluation fails, with what to do; what is unknown is never ok."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, fake_node

from coordinator.interface.cli.doctor import show_findings
from coordinator.operations.doctor import collect, findings
from coordinator.operations.doctor.facts import Checkup, Facts, Finding
from coordinator.operations.doctor.limit_findings import case_of, judge_limit
from coordinator.operations.doctor.node_jobs import NodeJob, Target
from coordinator.runtime import wiring
from coordinator.site.cluster.node_choice import apply_node_settings
from coordinator.site.cluster.slurm_accounts import (
    ACCOUNT_FORMAT,
    QOS_FORMAT,
    USER_FORMAT,
    Accounting,
    parse_rows,
)
from coordinator.site.cluster.slurm_limits import Limit
from coordinator.site.cluster.slurm_parse import parse_reservations
from coordinator.site.cluster.slurm_rules import SAMPLE_PRECURSOR, Partition, SiteRules
from coordinator.site.config.schema import Config, NodesConfig

LANES = 8
STAGED = {"fs": "tmpfs", "rung": "shm", "size": 8 << 30, "free": 8 << 30, "write_rate": 5e9, "read_rate": 9e9}
VERSIONS = {"lm_eval": "0.4.13", "torch": "2.9", "transformers": "5.1", "redis": "6"}
# default account, account, partition, default QOS, QOS, MaxJobs, MaxSubmit, MaxTRES, MaxTRESPerNode, GrpTRES, GrpJobs, GrpSubmit, MaxWall
ASSOCIATION = "lab|lab||normal|normal,short|{jobs}|{submits}|{a_job}|||||{wall}\n"
ACCOUNT = "lab|root|{group}||\nroot||||\n"
# name, MinTRES, MaxTRES, PerNode, PerUser, PerAccount, GrpTRES, MaxJobsPU, PA, GrpJobs, MaxSubmitPU, PA, GrpSubmit, MaxWall
QOS = "normal|{least}|||{user}||{qos_group}|||||||\nshort|||||||2||||||\n"
LIMITS = dict.fromkeys(("jobs", "submits", "a_job", "group", "least", "user", "qos_group", "wall"), "")
# as `scontrol --oneliner show reservation` prints them
RESERVATION = (
    "ReservationName=fix StartTime=2026-11-22T17:15:43 EndTime=2027-11-22T17:15:43 Nodes={nodes} NodeCnt=1 "
    "Flags=SPEC_NODES TRES=cpu=8 Users={users} Groups=(null) Accounts={accounts} Licenses=(null) State={state}\n"
)


def accounting(**limits):
    """Of a user with the default account lab and the default QOS normal."""
    every = LIMITS | limits
    return Accounting(
        associations=parse_rows(ASSOCIATION.format(**every), USER_FORMAT),
        accounts={row["account"]: row for row in parse_rows(ACCOUNT.format(**every), ACCOUNT_FORMAT)},
        qos={row["name"]: row for row in parse_rows(QOS.format(**every), QOS_FORMAT)},
    )


def rules(enforced="associations,limits,qos", more=(), **gpu):
    partitions = (Partition(name="gpu", default=True, **gpu), *more)
    return SiteRules(config={"AccountingStorageEnforce": enforced}, partitions=partitions)


def slurm(**tables):
    return Config.model_validate({"cluster": {"kind": "slurm"}} | tables)


def local(**facts):
    """A site without Slurm's listings, whose own checks are all ok."""
    calm = {
        "config": Config(),
        "python": "3.11",
        "versions": VERSIONS,
        "work_fs": "ext4",
        "work_free": 1 << 40,
        "redis": "answers",
    }
    return Facts(**{**calm, **facts})


def site(settings=None, **facts):
    """A site of four nodes with eight GPUs each, whose Slurm applies the limits of its accounting."""
    config = slurm(**settings or {})
    known = {
        "config": config,
        "work_fs": "nfs4",
        "rules": rules(),
        "options": wiring.slurm_options(config),
        "jobs": collect.sample_jobs(config, [fake_node("n0")]),
        "gpu_nodes": [fake_node(f"n{i}", gpus=LANES) for i in range(4)],
        "user": "me",
    }
    return local(**{**known, **facts})


def answer(*, shared=True, trouble="", refused=False, **record):
    roots = [{"root": "/dev/shm", "usable": True, "why": "", **STAGED}]
    facts = {"roots": roots, "versions": VERSIONS, "memory_cgroup_limit": None, **record}
    target = Target(node="n1", cluster=FakeCluster(fleet=()), sandbox=False)
    return NodeJob(
        target=target,
        job=SAMPLE_PRECURSOR,
        out=Path(),
        record=facts,
        shared=shared,
        trouble=trouble,
        refused=refused,
    )


def refused(words, **settings):
    return site(settings, accounting=accounting(), job_kinds={"trial": ("fail", f"refused: {words}", True)})


def reserved(setting=None, **row):
    shown = {"nodes": "n[0-1]", "users": "root", "accounts": "(null)", "state": "ACTIVE"} | row
    found = parse_reservations(RESERVATION.format(**shown))
    cluster = {"cluster": {"kind": "slurm", "reservation": setting}}
    return site(
        cluster, accounting=accounting(), reservations=found, cpu_nodes=[replace(fake_node("c1"), gpus=0)]
    )


def roles(**partitions):
    """Settings that name a partition for each of these roles."""
    tables = {role: {"partition": name} for role, name in partitions.items()}
    return site({"slurm": tables}, rules=rules(more=(Partition(name="old", up=False),)))


AWAY = "the controller is away"
SGLANG = Config.model_validate({"trial": {"engine": "sglang"}})
LOST, BUSY = answer(trouble="left no answer"), answer(trouble="no answer within 60 s")
REFUSED = answer(trouble="its job is FAILED", refused=True)
DRAINED = replace(fake_node("n1"), usable=False, state="drained", reason="new driver")
EXCLUDED = apply_node_settings(fake_node("n1"), Config(nodes=NodesConfig(exclude=("n1",))))
ASLEEP = replace(fake_node("n1"), state="idle~", usable=False)
SMALL, LARGE = fake_node("n1", memory_mb=2000), fake_node("n2", memory_mb=64000)
CUT, NO_ACCOUNT = accounting(wall="30:00"), "Invalid account or account/partition combination"
HIDDEN = Accounting(associations=accounting().associations, qos=accounting().qos)
OTHERS = {"user": "gres/gpu=64"}
METRIC_QOS = {"slurm": {"metric": {"qos": "short"}}}
HOSTS, FORBID = ({"stage": {"host_trials": value}} for value in (True, False))


@pytest.mark.parametrize(
    ("facts", "what", "status", "says"),
    [
        # what cannot be read is never ok, and shows with its reason
        (local(interpreter_error="no such file"), "trial interpreter", "fail", "no such file"),
        (local(redis_error="connection refused"), "Redis", "fail", "connection refused"),
        (local(config=SGLANG, versions={**VERSIONS, "sglang": "0.5"}), "trial interpreter", "ok", "not tried with SGLang"),
        (local(cluster_error="sinfo is not there"), "cluster", "fail", "sinfo is not there"),
        (local(config=slurm(), rules_error=AWAY), "Slurm's settings", "warn", AWAY),
        (local(config=slurm(), job_kinds={"trial": ("warn", AWAY, True)}), "trial jobs", "warn", AWAY),
        (local(config=slurm(), job_kinds={"metric": ("fail", "no CPUs", False)}), "metric jobs", "fail", "no CPUs"),
        # nodes write their answers to the work folder: whatever its file system, those that answered see it
        (local(config=slurm()), "work folder", "warn", ""),
        (local(config=slurm(), answers=[answer(), LOST]), "work folder", "warn", ""),
        (local(config=slurm(), answers=[answer()]), "work folder", "ok", ""),
        (local(config=slurm(), work_fs="tmpfs", answers=[answer()]), "work folder", "fail", ""),
        # a busy node is passed over; where every one was refused, no evaluation would run
        (local(answers=[BUSY, answer()]), "n1", "warn", "60 s"),
        (local(answers=[REFUSED]), "GPU nodes", "fail", ""),
        (local(answers=[REFUSED, BUSY]), "GPU nodes", "", ""),
        # nodes that take no job are counted; those that the settings exclude are no warning unless none is left
        (local(config=slurm(), gpu_nodes=[DRAINED]), "GPU nodes", "fail", "0 of 1 usable: n1 is drained (new driver)"),
        (local(config=slurm(), gpu_nodes=[DRAINED, fake_node("n2")]), "GPU nodes", "warn", "1 of 2 usable"),
        (local(config=slurm(), gpu_nodes=[fake_node("n2")]), "GPU nodes", "ok", "1 of 1 usable"),
        (local(config=slurm(), gpu_nodes=[EXCLUDED, fake_node("n2")]), "GPU nodes", "ok", "1 more excluded"),
        (local(config=slurm(), gpu_nodes=[EXCLUDED]), "GPU nodes", "fail", "[nodes] exclude"),
        (site(gpu_nodes=[ASLEEP]), "GPU nodes", "fail", "set [nodes] wake = true"),
        (site(gpu_nodes=[SMALL, LARGE]), "nodes with little memory", "warn", "n1 (2000 MB)"),
        (site(gpu_nodes=[SMALL, SMALL]), "nodes with little memory", "fail", "n1 (2000 MB)"),
        (site(), "nodes with little memory", "", ""),
        # what Slurm's commands do under pyslurm
        (local(config=slurm(), api="25.11.2; by Slurm's commands: scancel"), "pyslurm", "ok", "scancel"),
        # what stops the daemon or members' checkpoints
        (local(config=slurm()), "[watch]", "", ""),
        (local(config=slurm(shared_group="team")), "[watch]", "warn", ""),
        (local(config=slurm(shared_group="team", watch={"roots": ["/"]})), "[watch]", "", ""),
        (local(config=slurm(watch={"roots": ["/nowhere"]})), "[watch]", "warn", ""),
        (local(config=slurm(watch={"roots": ["/"], "suite": "mien"})), "[watch]", "fail", ""),
        # limits that Slurm does not apply are no obstacle, nor those on what no job asks for
        (site(rules=rules("none"), accounting=accounting(jobs="0")), "limits", "ok", "(AccountingStorageEnforce=none)"),
        (site(rules=rules("associations"), accounting=accounting(jobs="0")), "limits", "ok", "=associations)"),
        (site(accounting=accounting()), "limits", "ok", "none on the jobs"),
        (site(accounting=accounting(least="billing=10")), "MinTRES billing", "", ""),
        (site(accounting=accounting(least="gres/shard=1")), "MinTRES gres/shard", "", ""),
        (site(accounting_error="slurmdbd is away"), "limits", "warn", ""),
        (site(accounting=HIDDEN), "limits", "warn", "account lab"),
        # a limit counts the jobs of its roles alone; of a job that hosts trials fewer trials keep it
        (site(METRIC_QOS, accounting=accounting(**OTHERS)), "MaxJobsPerUser", "warn", "-> set [metric] workers = 2, or another [slurm.metric] qos"),
        (site(METRIC_QOS, accounting=accounting(**OTHERS)), "MaxTRESPerUser gres/gpu", "ok", ""),
        (site(HOSTS, accounting=accounting(a_job="cpu=5")), "MaxTRES cpu", "warn", "[borrow] max_gpus = 5"),
        # time that account and QOS cut; what MaxTime of the partition cuts has a finding of its own
        (site(accounting=CUT), "MaxWall", "warn", "0.5 h: build, stage, trial, metric jobs"),
        (site(accounting=CUT, rules=rules("all", max_seconds=1800)), "MaxWall", "", ""),
        (site(accounting=accounting(wall="05:00")), "coordinator's job", "warn", "a successor goes on"),
        (site(accounting=CUT), "coordinator's job", "ok", "a successor goes on"),
        (site(rules=rules(max_seconds=600)), "GPU partition", "warn", "at most 10 min"),
        (site(rules=rules(max_seconds=240)), "GPU partition", "warn", "at most 4 min"),
        (site(rules=rules(max_seconds=5400)), "GPU partition", "warn", "at most 1.5 h"),
        # each partition that a role names is there and up; a partition of other accounts takes jobs that wait for ever
        (roles(), "GPU partition", "ok", ""),
        (roles(trial="gpu"), "GPU partition", "", ""),
        (roles(trial="gpu"), "partition of trials", "ok", ""),
        (roles(metric="nope"), "partition of metric workers", "fail", "[slurm.metric] partition"),
        (roles(precursor="old"), "partition of precursors", "fail", "not up"),
        (site(rules=rules("all", allowed={"AllowAccounts": "chemistry"}), accounting=accounting()), "partition access", "fail", "chemistry, not lab"),
        (site(rules=SiteRules(config={"MaxArraySize": "1"})), "job arrays", "ok", "in jobs of 1"),
        # one job a node hosts the trials where a rule demands it, and settings do not forbid it
        (site(host_reason="EXCLUSIVE"), "staging", "warn", "EXCLUSIVE"),
        (site(FORBID, host_reason="EXCLUSIVE"), "staging", "fail", "EXCLUSIVE"),
        (site(FORBID, host_reason="/dev/shm is private to each job"), "staging", "warn", "private"),
        (site(HOSTS), "staging", "ok", "rung 2"),
        (site(), "staging", "ok", "rung 1"),
        # a refused name is shown with its setting and the user's own names
        (refused(NO_ACCOUNT, cluster={"kind": "slurm", "account": "nope"}), "trial jobs", "fail", "-> [cluster] account is 'nope'; your accounts: lab"),
        (refused(NO_ACCOUNT), "trial jobs", "fail", "-> [cluster] account is not set; your accounts: lab"),
        (refused("name your account: --account=ACCOUNT; Unspecified error"), "trial jobs", "fail", "-> [cluster] account is not set; your accounts: lab"),
        (refused("Invalid account", slurm={"trial": {"account": "x"}}), "trial jobs", "fail", "-> [slurm.trial] account is 'x'; your accounts: lab"),
        (refused("Invalid qos specification", slurm={"trial": {"qos": "high"}}), "trial jobs", "fail", "-> [slurm.trial] qos is 'high'; your QOS: normal, short"),
        (refused("Requested reservation is invalid"), "trial jobs", "fail", "-> [cluster] reservation; `scontrol show reservation` lists them"),
        (refused("More processors requested than permitted"), "trial jobs", "fail", "-> see [trial], [cluster] and [slurm]"),
        # a reservation is named with its holder, its end and the nodes that it takes
        (site(rules_error="scontrol timed out"), "reservations", "warn", ""),
        (reserved(), "reservation fix", "warn", "2 of 4 GPU nodes (n0, n1), until 2027-11-22 17:15, for users root"),
        (reserved(nodes="n[0-3]"), "reservation fix", "fail", "nothing runs before its end"),
        (reserved(nodes="c1"), "reservation fix", "warn", "1 of 1 CPU nodes (c1)"),
        (reserved(accounts="lab", users="(null)"), "reservation fix", "warn", 'set [cluster] reservation = "fix" to use these nodes'),
        (reserved(accounts="lab", users="-me"), "reservation fix", "warn", "for users all but me and accounts lab -> nothing"),
        (reserved(state="INACTIVE"), "reservation fix", "warn", "from 2026-11-22 17:15 until 2027-11-22 17:15, for users root -> jobs whose time"),
        (reserved("fix", users="me"), "reservation fix", "ok", "for users me"),
        (reserved("fix", users="me", state="INACTIVE"), "reservation fix", "warn", "jobs wait until it begins"),
        (reserved("fix"), "reservation fix", "warn", "remove [cluster] reservation"),
        (reserved(nodes="x[1-9]"), "reservation fix", "", ""),
    ],
)  # fmt: skip
def test_a_fact_is_found_with_its_reason_and_what_to_do(facts, what, status, says):
    """ "": nothing is said of it. Nothing else of an ordinary site is more than ok."""
    assert {f.status for f in findings.judge_site(local())} == {"ok"}
    found = {f.what: f for f in findings.judge_site(facts)}.get(what)
    assert (found.status if found else "") == status
    assert not found or says in f"{found.found} -> {found.todo}"
    assert not found or found.todo or status == "ok"


UNUSABLE = [{"root": "/dev/shm", "usable": False, "why": "full"}]
SCRATCH = {"root": "/scratch", "usable": True, "why": "", **STAGED, "rung": "disk"}


@pytest.mark.parametrize(
    ("seen", "hosting", "status"),
    [
        (answer(), False, {"ok"}),
        (answer(shared=False), False, {"warn"}),
        (answer(shared=False), True, {"ok"}),
        (answer(shared=None), False, {"warn"}),
        (answer(redis_trouble="connection refused"), False, {"ok", "fail"}),
        (answer(versions={"lm_eval": None}), False, {"ok", "fail"}),
        (answer(versions={**VERSIONS, "torch": "2.9+cpu"}), False, {"ok", "fail"}),
        (answer(roots=UNUSABLE), False, {"warn"}),
        (answer(shared=None, roots=[*UNUSABLE, SCRATCH]), False, {"warn"}),
    ],
)
def test_what_is_seen_on_a_node_is_judged(seen, hosting, status):
    """Only what would stop an evaluation fails; a lower rung is a warning; what could not be told is never ok."""
    found = list(findings.judge_node(seen, slurm(), hosting=hosting))
    assert {f.status for f in found} == status
    assert all(f.todo for f in found if f.status != "ok")


def test_a_sandbox_that_does_not_hold_is_named_with_its_reason():
    """The reason why no better level holds is in the line."""
    reasons = {"namespaces": "no user namespaces", "landlock": "kernel 5.4", "rlimits": ""}
    levels = [{"level": name, "holds": not reason, "reason": reason} for name, reason in reasons.items()]
    found = findings.judge_sandbox(levels, "on c1", allow_unsafe=False)
    assert found.status == "warn"
    assert all(reason in found.found for reason in reasons.values())


NAMES = ["MaxJobs jobs", "GrpTRES cpu", "GrpTRES mem", "GrpTRES gres/gpu", "MaxTRESPerUser node"]


@given(name=st.sampled_from(NAMES), most=st.integers(0, 200), hosting=st.booleans())
def test_settings_that_a_finding_names_end_its_warning(name, most, hosting):
    """Typed in as they stand, they leave a limit that is enough; `init` writes the same."""
    kind, what = name.split()
    limit = Limit(name=kind, what=what, most=most * 1000 if what == "mem" else most, holder="QOS normal")
    settings = {"stage": {"host_trials": hosting}}

    def found():
        facts = site(settings)
        (only,) = judge_limit(case_of(facts, limit, list(facts.jobs)))
        return only

    words = found().todo.replace(",", "").replace(":", "").split()
    signs = [i for i, word in enumerate(words) if word == "="]
    named = [(words[i - 2].strip("[]"), words[i - 1], int(words[i + 1])) for i in signs]
    written = found().settings
    assert written == tuple((f"{table}.{key}", value) for table, key, value in named) or (
        found().status == "ok" and dict(written) == {"stage.prefetch": 0}
    )
    for table, key, value in named:
        settings[table] = settings.get(table, {}) | {key: value}
    assert not signs or found().status == "ok", (settings, found())


def test_one_cause_is_one_line():
    """A site that demands an account refuses all kinds of jobs by the same words: the accounts are named once."""
    kinds = dict.fromkeys(("build", "trial", "metric"), ("fail", "refused: name your account", True))
    found = findings.judge_site(site(accounting=accounting(), job_kinds=kinds))
    (line,) = [f for f in found if f.found.startswith("refused")]
    assert line.what == "build jobs, trial jobs, metric jobs"
    assert line.todo == "[cluster] account is not set; your accounts: lab"


def test_the_table_names_a_node_whole(capsys):
    """Names of 60 characters that differ at their end."""
    names = [f"gpu-node-of-the-very-long-named-cluster-in-building-12-n{i:04d}" for i in (1, 2)]
    found = tuple(Finding(what=f"{name} (gpu) memory", status="ok", found="shared by jobs") for name in names)
    show_findings(Checkup(cluster="slurm", findings=found), Path("work"))
    told = capsys.readouterr().out
    cells = "".join(told.replace("shared by jobs", "").split())
    assert all(name in cells for name in names), told
