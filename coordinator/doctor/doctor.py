"""`evalspan doctor`: does this site let an evaluation run, and how well? Findings, each with what to do about it. Pure.

    ok: as it should be   warn: it runs, on a lower rung or slower   fail: an evaluation would stop here

Rule: a finding is a pure function of what was read or measured; a fact that could not be told is a warning, never "ok".
It does not know: how anything was asked (checkup, survey, site_rules).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from coordinator.cluster.slurm_rules import PRIVATE, SiteRules
from coordinator.config.schema import Config
from coordinator.doctor.survey import Answer
from evaljobs.contract.specs import Record

Status = Literal["ok", "warn", "fail"]
SHARED_FS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "pvfs2", "orangefs", "afs", "cifs", "fuse", "9p")  # fmt: skip
MEMORY_FS = ("tmpfs", "ramfs")
LEAST_FREE_BYTES = (
    1 << 30
)  # of the work folder: below it request sets and responses of one evaluation may not fit
LOW_FREE_BYTES = 10 << 30
LOOKS_LOCAL = "this looks like a local disk; the nodes below say whether they see it"
SLOW_RATE = 1e9  # bytes/s into node memory; tmpfs on any server of the last ten years does several
LEAST_TRANSFORMERS = 5


class Finding(Record):
    """One line of the table. `todo`: what to do; empty where nothing is."""

    what: str
    status: Status
    found: str
    todo: str = ""


class Checkup(Record):
    """All findings, and the answers of nodes as they came."""

    schema_version: int = 1
    cluster: str
    findings: tuple[Finding, ...]
    nodes: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(f.status == "fail" for f in self.findings)


def ok(what: str, found: str) -> Finding:
    return Finding(what=what, status="ok", found=found)


def warn(what: str, found: str, todo: str) -> Finding:
    return Finding(what=what, status="warn", found=found, todo=todo)


def fail(what: str, found: str, todo: str) -> Finding:
    return Finding(what=what, status="fail", found=found, todo=todo)


def gigabytes(count: float | None) -> str:
    return "?" if count is None else f"{count / 1e9:.1f} GB"


# --- here ------------------------------------------------------------------------------------------------------------


def judge_versions(
    found: Mapping[str, str | None], engine: str, *, where: str = "trial interpreter", trouble: str = ""
) -> Finding:
    """lm-eval and what the engine needs. `trouble`: why the engine cannot be imported there; empty where it can."""
    needed = ["lm_eval", "redis", *({"hf": ["torch", "transformers"]}.get(engine, [engine]))]
    missing = [name for name in needed if found.get(name) is None]
    text = ", ".join(f"{name} {found.get(name) or 'missing'}" for name in needed)
    if missing:
        return fail(
            where,
            text,
            f"install {' and '.join(missing)} there, or name another interpreter in [trial] python",
        )
    if trouble:
        return fail(
            where, f"{text}: {trouble}", f"`pip install 'evalspan[{engine}]'` there brings what it lacks"
        )
    transformers = found.get("transformers")
    if engine == "hf" and transformers is not None and int(transformers.split(".")[0]) < LEAST_TRANSFORMERS:
        return warn(
            where, text, "transformers 5 is what evalspan is tested with: `pip install evalspan[hf]` there"
        )
    return ok(where, text)


def judge_work_folder(path: str, fs: str, free: int, *, slurm: bool) -> Finding:
    """Room, and whether nodes can see it (proved only by their answers)."""
    found = f"{path} ({fs}, {gigabytes(free)} free)"
    if free < LEAST_FREE_BYTES:
        return fail("work folder", found, "make room there, or give --work-dir another folder")
    if slurm and fs in MEMORY_FS:
        return fail(
            "work folder", found, "this is memory of one machine: give --work-dir a folder on shared storage"
        )
    if free < LOW_FREE_BYTES:
        return warn(
            "work folder", found, "little room: request sets and responses of many evaluations may not fit"
        )
    if slurm and not fs.startswith(SHARED_FS):
        return warn("work folder", found, LOOKS_LOCAL)
    return ok("work folder", found)


def proved_shared(finding: Finding, answers: Iterable[Answer]) -> Finding:
    """The work folder's finding, once nodes wrote their answers there: whatever its file system, they see it."""
    answers = list(answers)
    if finding.todo != LOOKS_LOCAL or not answers or any(a.trouble for a in answers):
        return finding
    return ok(finding.what, f"{finding.found}, seen by all nodes that were asked")


def judge_sandbox(levels: Sequence[Mapping[str, Any]] | None, where: str, *, allow_unsafe: bool) -> Finding:
    """The best level that holds, and why no better one does."""
    what = f"sandbox {where}".strip()
    if not levels:
        return warn(what, "not tried", "run `python -m evaljobs sandbox` there")
    holding = [row for row in levels if row["holds"]]
    best = holding[0]["level"] if holding else "none"
    better = []
    for row in levels:
        if row["holds"]:
            break
        better.append(f"no {row['level']}: {row['reason']}")
    found = f"{best}{' (' + '; '.join(better) + ')' if better else ''}"
    if best in ("rlimits", "none"):
        if allow_unsafe:
            return warn(what, found, "[metric] allow_unsafe is set: generated programs run almost unguarded")
        todo = "tasks that run generated programs will fail here: ask for user namespaces or Landlock (kernel 5.13)"
        return warn(what, found, todo)
    return ok(what, found)


# --- the cluster's rules ---------------------------------------------------------------------------------------------


def judge_partitions(rules: SiteRules, config: Config) -> list[Finding]:
    """The partitions we would use: there, up, long enough."""
    findings = []
    roles = {"GPU partition": config.cluster.partition}
    if config.cluster.cpu_partition is not None:
        roles["CPU partition"] = config.cluster.cpu_partition
    if config.borrow.best_effort is not None:
        roles["preemptible partition"] = config.borrow.best_effort
    known = ", ".join(p.name for p in rules.partitions) or "none"
    for role, names in roles.items():
        chosen = rules.chosen(names)
        if not chosen:
            asked = names if names is not None else "no default one"
            findings.append(fail(role, f"{asked} (there are: {known})", "name one in [cluster] partition"))
            continue
        for partition in chosen:
            limit = partition.max_seconds
            text = f"{partition.name}, nodes {partition.nodes or '?'}"
            text += "" if limit is None else f", at most {limit / 3600:g} h"
            wanted = config.trial.time_limit_seconds
            if not partition.up:
                findings.append(fail(role, f"{text}, not up", "choose another, or wait for it"))
            elif limit is not None and limit < wanted:
                todo = f"[trial] time_limit of {wanted / 3600:g} h is longer: jobs ask for {limit / 3600:g} h there"
                findings.append(warn(role, text, todo))
            elif partition.max_memory_per_cpu_mb:
                text += f", at most {partition.max_memory_per_cpu_mb} MB a CPU"
                todo = "a precursor of a large model is given several CPUs: where its trials need them, one job hosts them (rung 2)"
                findings.append(warn(role, text, todo))
            else:
                findings.append(ok(role, text))
    return findings


def judge_host(reason: str, setting: bool | str) -> Finding:
    """Which rung staging starts on."""
    if setting is True:
        return ok("staging", "hosts its trials in one job a node, as [stage] host_trials says (rung 2)")
    if reason and setting == "auto":
        todo = "nothing: it is done so by itself. GPUs wait while weights are staged; a precursor would spare them that"
        return warn("staging", f"one job a node hosts the trials (rung 2): {reason}", todo)
    if reason.startswith(PRIVATE):  # the first trials notice it, and their nodes turn to rung 2
        return warn(
            "staging", reason, 'set [stage] host_trials = "auto": else a trial a node is started for nothing'
        )
    if reason:
        return fail("staging", reason, 'set [stage] host_trials = "auto"')
    return ok("staging", "a precursor per node, beside the trials (rung 1)")


def judge_limits(rules: SiteRules, associations: str | None, lanes: int) -> list[Finding]:
    """How many jobs we may have. `associations`: `sacctmgr -nP` rows of MaxSubmitJobs and MaxJobs; `lanes`: trials a node."""
    array = rules.number("MaxArraySize")
    text = f"MaxArraySize {array if array is not None else '?'}, MaxJobCount {rules.number('MaxJobCount') or '?'}"
    findings = []
    if array is not None and array <= lanes:
        findings.append(
            fail("job arrays", text, f"an array of {lanes} trials does not fit: raise gpus_per_trial")
        )
    else:
        findings.append(ok("job arrays", text))
    if associations is None:
        findings.append(ok("submit limits", "no accounting: none are kept"))
        return findings
    submit = [int(row.split("|")[0]) for row in associations.splitlines() if row.split("|")[0].isdigit()]
    if submit and min(submit) < 16:
        todo = "an evaluation submits up to two jobs a node and a few more: set [borrow] max_nodes to a quarter of it"
        findings.append(warn("submit limits", f"MaxSubmitJobs {min(submit)}", todo))
    else:
        findings.append(ok("submit limits", f"MaxSubmitJobs {min(submit) if submit else 'unlimited'}"))
    return findings


def judge_scripts(rules: SiteRules) -> list[Finding]:
    """Site scripts that run around jobs and may empty node memory."""
    names = [k for k in ("Prolog", "Epilog") if rules.config.get(k, "(null)") not in ("(null)", "")]
    if not names:
        return []
    found = ", ".join(f"{k}={rules.config[k]}" for k in names)
    todo = "if they empty /dev/shm after each job, weights vanish under running trials: ask, or use [stage] roots"
    return [warn("site scripts", found, todo)]


# --- nodes -----------------------------------------------------------------------------------------------------------


def judge_node(answer: Answer, config: Config, *, hosting: bool) -> list[Finding]:
    """What a node's answer means. `hosting`: its trials would be hosted by one job (rung 2)."""
    name = (
        f"{answer.target.node} ({answer.target.partition})" if answer.target.partition else answer.target.node
    )
    if answer.trouble:
        todo = "look at the node and its partition; the other nodes are used without it"
        return [warn(name, answer.trouble, todo)]
    record = answer.record
    findings = []
    if answer.target.stages:
        findings.append(_judge_memory(name, answer, config, hosting=hosting))
        interpreter = judge_versions(record["versions"], config.trial.engine, where=f"{name} interpreter")
        if interpreter.status != "ok":  # else it is the one that was seen above
            findings.append(interpreter)
        if record.get("remove_ipc"):
            todo = "logind may wipe /dev/shm when your last session there ends: ask for RemoveIPC=no in logind.conf"
            findings.append(warn(f"{name} RemoveIPC", "yes", todo))
    else:
        findings.append(
            ok(name, f"{record['cpus']} CPUs, {gigabytes(record['memory_available'])} memory available")
        )
    if record.get("redis_trouble"):
        todo = "set [redis] bind to an address of this host that nodes reach, [redis] port to an open one, or [redis] url"
        findings.append(fail(f"{name} Redis", record["redis_trouble"], todo))
    if answer.target.sandbox:
        levels = record.get("sandbox")
        findings.append(judge_sandbox(levels, f"on {name}", allow_unsafe=config.metric.allow_unsafe))
    return findings


def _judge_memory(name: str, answer: Answer, config: Config, *, hosting: bool) -> Finding:
    roots: Sequence[Mapping[str, Any]] = answer.record.get("roots") or ()
    what = f"{name} memory"
    if not config.stage.enabled:
        return ok(what, "staging is off: trials read storage")
    usable = [root for root in roots if root["usable"]]
    refused = "; ".join(f"{root['root']}: {root['why']}" for root in roots if not root["usable"])
    if not usable:
        return warn(
            what,
            refused or "no root",
            "trials there read storage (rung 4): give [stage] roots a folder on a local disk",
        )
    found = "; ".join(filter(None, [_told(usable[0], answer), refused]))
    if not hosting and answer.shared is not True and usable[0]["root"] == roots[0]["root"]:
        if answer.shared is None:
            return warn(what, found, "whether jobs share it was not told: try again when the node is free")
        todo = "each job has memory of its own there: set [stage] host_trials = true, else a trial is started for nothing"
        return warn(what, found, todo)
    todo = "a lower rung is used there" if refused else ""
    rate = usable[0].get("write_rate")
    if rate is not None and rate < SLOW_RATE and usable[0]["rung"] == "shm":
        todo = todo or "slow for memory: is the node busy, or swapping?"
    return warn(what, found, todo) if todo else ok(what, found)


def _told(root: Mapping[str, Any], answer: Answer) -> str:
    shared = {True: "shared by jobs", False: "private to each job", None: "shared?"}[answer.shared]
    limit = answer.record.get("memory_cgroup_limit")
    parts = [
        f"{root['root']} ({root['fs']}) {gigabytes(root['free'])} free of {gigabytes(root['size'])}, {shared}",
        "no memory cgroup" if limit is None else f"jobs' memory is limited (this one: {gigabytes(limit)})",
    ]
    if root.get("write_rate"):
        parts.append(f"write {gigabytes(root['write_rate'])}/s, read {gigabytes(root['read_rate'])}/s")
    return ", ".join(parts)


def judge_survey(
    answers: Iterable[Answer], config: Config, *, hosting: bool, left_out: int = 0
) -> list[Finding]:
    """All nodes; none that answered at all is a failure: no job of ours would run."""
    answers = list(answers)
    findings = [f for a in answers for f in judge_node(a, config, hosting=hosting)]
    staging = [a for a in answers if a.target.stages]
    if staging and all(a.trouble and a.refused for a in staging):
        todo = "no node takes our jobs, or none sees the work folder: see their reasons above"
        findings.append(fail("GPU nodes", "not one answered", todo))
    if left_out:
        findings.append(ok("other nodes", f"{left_out} alike were not asked (--nodes 0 asks all)"))
    return findings
