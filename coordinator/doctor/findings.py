"""The checks of `evalspan doctor`: does this site let an evaluation run, and how well? Pure.

    ok: as it should be   warn: it runs, on a lower rung or slower   fail: an evaluation would stop here

Rule: a finding is a pure function of `Facts`; a fact that could not be read is a warning or a failure, never "ok". The
order of HERE, SLURM, LOCAL and NODES is the order of the printed table.
Called by `collect`, which reads the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from pydantic import Field

from coordinator.cluster import NodeState
from coordinator.cluster.slurm_reasons import none_left, unusable
from coordinator.cluster.slurm_rules import PRIVATE, SiteRules
from coordinator.config.schema import Config
from coordinator.doctor.node_jobs import Answer
from coordinator.errors import OperatorError
from coordinator.intake.admission import loaded_suites, missing_places, no_place
from evaljobs.contract.specs import Record
from evaljobs.staging.capacity import MEMORY_FS

Status = Literal["ok", "warn", "fail"]
SHARED_FS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "pvfs2", "orangefs", "afs", "cifs", "fuse", "9p")  # fmt: skip
LEAST_FREE_BYTES = (
    1 << 30
)  # of the work folder: below it one evaluation's request sets and responses may not fit
LOW_FREE_BYTES = 10 << 30
SLOW_RATE = 1e9  # bytes/s into node memory; tmpfs on any server of the last ten years does several
LEAST_TRANSFORMERS = 5  # major version
JOBS_BESIDE = 8  # builds, and after them metric workers, that one evaluation has at once
ENOUGH_NODES = 4  # at once, below which a limit on jobs is named


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


@dataclass(slots=True, kw_only=True)
class Facts:
    """What `collect` has read and measured. A fact named `…_error` says why the facts beside it are missing."""

    config: Config
    python: str  # version of evalspan's own interpreter
    versions: Mapping[str, str | None] = field(default_factory=dict)  # package -> version, of the trials'
    engine_trouble: str = ""  # why the trials' interpreter cannot import its engine
    interpreter_error: str = ""
    work_fs: str
    work_free: int  # bytes
    cluster_error: str = ""
    gpus: Sequence[str] = ()  # this machine's, where jobs run here
    api: str = ""  # pyslurm's version, and what goes through Slurm's commands all the same
    rules: SiteRules | None = None
    rules_error: str = ""
    associations: str | None = (
        None  # `sacctmgr -nP` rows of MaxSubmitJobs and MaxJobs, of the user's associations and QOS; None: no accounting
    )
    lanes: int = 0  # trials of one node
    gpu_nodes: Sequence[NodeState] = ()  # as Slurm lists them
    job_kinds: Mapping[str, tuple[Status, str, bool]] = field(
        default_factory=dict
    )  # kind -> …, found, on GPUs
    host_reason: str = ""  # why one job a node must host its trials; "" where none must
    redis: str = ""  # where it answers, and whose it is
    redis_warnings: Sequence[str] = ()
    redis_error: str = ""
    answers: Sequence[Answer] = ()
    left_out: int = 0  # nodes that were not asked

    @property
    def slurm(self) -> bool:
        return self.config.cluster.kind == "slurm"

    @property
    def hosting(self) -> bool:
        """Whether one job a node hosts its trials (rung 2)."""
        setting = self.config.stage.host_trials
        return setting is True or bool(self.host_reason and setting == "auto")


def judge(facts: Facts) -> tuple[Finding, ...]:
    """All findings, in the order of the table."""
    checks = HERE
    if facts.cluster_error:
        checks += (_no_cluster,)
    else:
        checks += (SLURM if facts.slurm else LOCAL) + NODES
    return tuple(finding for check in checks for finding in check(facts))


def ok(what: str, found: str) -> Finding:
    return Finding(what=what, status="ok", found=found)


def warn(what: str, found: str, todo: str) -> Finding:
    return Finding(what=what, status="warn", found=found, todo=todo)


def fail(what: str, found: str, todo: str) -> Finding:
    return Finding(what=what, status="fail", found=found, todo=todo)


def ok_unless(todo: str, what: str, found: str) -> Finding:
    """A warning where there is something to do."""
    return warn(what, found, todo) if todo else ok(what, found)


def gigabytes(count: float | None) -> str:
    return "?" if count is None else f"{count / 1e9:.1f} GB"


# --- this machine ----------------------------------------------------------------------------------------------------


def _python(facts: Facts) -> Iterator[Finding]:
    yield ok("python", f"{facts.python}, evalspan's own")


def _interpreter(facts: Facts) -> Iterator[Finding]:
    if facts.interpreter_error:
        todo = "see [trial] python, prologue and container"
        yield fail("trial interpreter", facts.interpreter_error, todo)
    else:
        yield judge_versions(facts.versions, facts.config.trial.engine, trouble=facts.engine_trouble)


def judge_versions(
    found: Mapping[str, str | None], engine: str, *, where: str = "trial interpreter", trouble: str = ""
) -> Finding:
    """lm-eval and what the engine needs. `trouble`: why the engine cannot be imported there; empty where it can."""
    needed = ["lm_eval", "redis", *({"hf": ["torch", "transformers"]}.get(engine, [engine]))]
    missing = [name for name in needed if found.get(name) is None]
    text = ", ".join(f"{name} {found.get(name) or 'missing'}" for name in needed)
    if missing:
        todo = f"install {' and '.join(missing)} there, or name another interpreter in [trial] python"
        return fail(where, text, todo)
    if trouble:
        todo = f"`pip install 'evalspan[{engine}]'` there brings what it lacks"
        return fail(where, f"{text}: {trouble}", todo)
    old = engine == "hf" and int((found.get("transformers") or "0").split(".")[0]) < LEAST_TRANSFORMERS
    todo = "transformers 5 is what evalspan is tested with: `pip install evalspan[hf]` there"
    return ok_unless(todo if old else "", where, text)


def _work_folder(facts: Facts) -> Iterator[Finding]:
    """Room, and whether nodes see it: their answers lie there."""
    what, fs = "work folder", facts.work_fs
    found = f"{facts.config.work_dir} ({fs}, {gigabytes(facts.work_free)} free)"
    if facts.work_free < LEAST_FREE_BYTES:
        yield fail(what, found, "make room there, or give --work-dir another folder")
    elif facts.slurm and fs in MEMORY_FS:
        todo = "this is memory of one machine: give --work-dir a folder on shared storage"
        yield fail(what, found, todo)
    elif facts.work_free < LOW_FREE_BYTES:
        todo = "little room: request sets and responses of many evaluations may not fit"
        yield warn(what, found, todo)
    elif not facts.slurm or fs.startswith(SHARED_FS):
        yield ok(what, found)
    elif facts.answers and not any(a.trouble for a in facts.answers):
        yield ok(what, f"{found}, seen by all nodes that were asked")
    else:
        yield warn(what, found, "this looks like a local disk; the nodes below say whether they see it")


def _no_cluster(facts: Facts) -> Iterator[Finding]:
    yield fail("cluster", facts.cluster_error, "name one that is there: --cluster, [cluster] partition")


def _gpus(facts: Facts) -> Iterator[Finding]:
    yield ok("GPUs", ", ".join(facts.gpus) or "none: trials run on the CPU")


# --- Slurm's rules ---------------------------------------------------------------------------------------------------


def _api(facts: Facts) -> Iterator[Finding]:
    if facts.api:
        yield ok("pyslurm", facts.api)


def _rules(facts: Facts) -> Iterator[Finding]:
    if facts.rules is None:
        yield warn("Slurm's settings", facts.rules_error, "without them the site's rules are not noticed")
        return
    yield from judge_partitions(facts.rules, facts.config)
    yield from judge_limits(facts.rules, facts.associations, facts.lanes)
    names = [k for k in ("Prolog", "Epilog") if facts.rules.config.get(k, "(null)") not in ("(null)", "")]
    if names:
        todo = "if they empty /dev/shm after each job, weights vanish under running trials: ask, or use [stage] roots"
        yield warn("site scripts", ", ".join(f"{k}={facts.rules.config[k]}" for k in names), todo)


def _hours(seconds: int) -> str:
    return f"{seconds / 3600:g} h" if seconds % 360 == 0 else f"{seconds / 60:g} min"


def judge_partitions(rules: SiteRules, config: Config) -> Iterator[Finding]:
    """The configured partitions: there, up, long enough."""
    section, slurm = config.cluster, config.slurm
    site_default = "" if slurm.trial.partition is None else None
    asked = [
        ("GPU partition", "[cluster] partition", section.partition or site_default),
        ("CPU partition", "[cluster] cpu_partition", section.cpu_partition),
        ("preemptible partition", "[borrow] best_effort", config.borrow.best_effort),
        ("partition of trials", "[slurm.trial] partition", slurm.trial.partition),
        ("partition of precursors", "[slurm.precursor] partition", slurm.precursor.partition),
        ("partition of metric workers", "[slurm.metric] partition", slurm.metric.partition),
        ("partition of builds", "[slurm.build] partition", slurm.build.partition),
    ]
    known = ", ".join(p.name for p in rules.partitions) or "none"
    wanted = config.trial.time_limit_seconds
    for role, setting, names in asked:
        if names is None:
            continue
        chosen = rules.chosen(names or None)
        if not chosen:
            yield fail(role, f"{names or 'no default one'} (there are: {known})", f"name one in {setting}")
        for partition in chosen:
            limit = partition.max_seconds
            text = f"{partition.name}, nodes {partition.nodes or '?'}"
            text += "" if limit is None else f", at most {_hours(limit)}"
            todo = ""
            if limit is not None and limit < wanted:
                todo = f"[trial] time_limit of {_hours(wanted)} is longer: jobs ask for {_hours(limit)} there"
            elif partition.max_memory_per_cpu_mb:
                text += f", at most {partition.max_memory_per_cpu_mb} MB a CPU"
                todo = "a precursor of a large model is given several CPUs: where its trials need them, one job hosts them (rung 2)"
            if partition.up:
                yield ok_unless(todo, role, text)
            else:
                yield fail(role, f"{text}, not up", "choose another, or wait for it")


def judge_limits(rules: SiteRules, associations: str | None, lanes: int) -> Iterator[Finding]:
    """How many jobs the user may have. `associations`, `lanes`: as in Facts."""
    array = rules.number("MaxArraySize")
    text = f"MaxArraySize {array if array is not None else '?'}, MaxJobCount {rules.number('MaxJobCount') or '?'}"
    if array is not None and array < lanes:
        text += f": the {lanes} trials of a node come in jobs of {max(1, array)}"
    yield ok("job arrays", text)
    if associations is None:
        yield ok("submit limits", "no accounting: none are kept")
        return
    rows = [[*row.split("|"), ""] for row in associations.splitlines()]
    for what, column in (("MaxSubmitJobs", 0), ("MaxJobs", 1)):
        least = min((int(row[column]) for row in rows if row[column].isdigit()), default=None)
        yield _judge_limit(f"{what} {'unlimited' if least is None else least}", least, lanes)


def _judge_limit(text: str, most: int | None, lanes: int) -> Finding:
    """Whether so many jobs at once are enough. Slurm counts each member of an array, precursors and workers, too."""
    what, a_node = "submit limits", 1 + lanes
    if most is None:
        return ok(what, text)
    nodes = (most - JOBS_BESIDE) // a_node
    text += f": a precursor and {lanes} trials a node, and {JOBS_BESIDE} builds or metric workers"
    if nodes >= ENOUGH_NODES:
        return ok(what, f"{text}, on {nodes} nodes at once")
    if nodes >= 1:
        todo = f"set [borrow] max_nodes = {nodes}: jobs beyond the limit wait, and hold their node's memory meanwhile"
        return warn(what, f"{text}, on {nodes} nodes at once", todo)
    todo = "fewer trials run at once, and jobs wait for each other: set another [cluster] qos or account"
    return warn(what, f"{text} are more than that on one node", todo)


def _watch(facts: Facts) -> Iterator[Finding]:
    if why := no_place(facts.config.watch):
        yield warn("hook", why, "set [watch] roots to the folder that training writes its checkpoints to")
    for why in missing_places(facts.config.watch):
        yield warn("[watch]", why, "name the folder that training writes its checkpoints to, or make it")
    try:
        loaded_suites(facts.config.watch)
    except OperatorError as error:
        yield fail("[watch]", str(error), "the daemon does not start before")


def _gpu_nodes(facts: Facts) -> Iterator[Finding]:
    """How many of Slurm's nodes with GPUs take jobs now, and the states of the others."""
    nodes = [n for n in facts.gpu_nodes if not n.excluded]
    usable = sum(n.usable for n in nodes)
    found = f"{usable} of {len(nodes)} usable"
    if excluded := len(facts.gpu_nodes) - len(nodes):
        found += f", {excluded} more excluded by the settings"
    others = unusable(nodes)
    if why := none_left(facts.gpu_nodes):
        yield fail(
            "GPU nodes", why, "change that setting: `sinfo -N -O NodeList,Gres,Features_act` shows each node"
        )
    elif nodes and not usable:
        todo = "wait until the site returns them, or choose another [cluster] partition"
        yield fail("GPU nodes", f"{found}: {others}", todo)
    elif others:
        yield warn("GPU nodes", f"{found}: {others}", "the others are used without them")
    elif nodes:
        yield ok("GPU nodes", found)


def _job_kinds(facts: Facts) -> Iterator[Finding]:
    """Whether the cluster would take each kind of job, at its real limits."""
    for kind, (status, found, on_gpus) in facts.job_kinds.items():
        todo = {
            "ok": "",
            "warn": "ask again when the controller answers",
            "fail": "see [trial], [cluster] and [slurm]"
            if on_gpus
            else "see [metric], [trial], [cluster] cpu_partition and [slurm]",
        }[status]
        yield Finding(what=f"{kind} jobs", status=status, found=found, todo=todo)


def _staging(facts: Facts) -> Iterator[Finding]:
    """Which rung staging starts on."""
    setting, reason = facts.config.stage.host_trials, facts.host_reason
    if setting is True:
        yield ok("staging", "hosts its trials in one job a node, as [stage] host_trials says (rung 2)")
    elif reason and setting == "auto":
        todo = "nothing: it is done so by itself. GPUs wait while weights are staged; a precursor would spare them that"
        yield warn("staging", f"one job a node hosts the trials (rung 2): {reason}", todo)
    elif reason.startswith(PRIVATE):  # the first trials notice it, and their nodes turn to rung 2
        todo = 'set [stage] host_trials = "auto": else a trial a node is started for nothing'
        yield warn("staging", reason, todo)
    elif reason:
        yield fail("staging", reason, 'set [stage] host_trials = "auto"')
    else:
        yield ok("staging", "a precursor per node, beside the trials (rung 1)")


# --- Redis and nodes -------------------------------------------------------------------------------------------------


def _redis(facts: Facts) -> Iterator[Finding]:
    if facts.redis_error:
        todo = "see [redis]: bind for a server of our own, url for the site's"
        yield fail("Redis", facts.redis_error, todo)
    else:
        yield ok_unless("; ".join(facts.redis_warnings), "Redis", facts.redis)


def _nodes(facts: Facts) -> Iterator[Finding]:
    """All nodes. That no GPU node takes a job is a failure: an evaluation would have nowhere to run."""
    for answer in facts.answers:
        yield from judge_node(answer, facts.config, hosting=facts.hosting)
    staging = [a for a in facts.answers if a.target.stages]
    if staging and all(a.trouble and a.refused for a in staging):
        todo = "no node takes our jobs, or none sees the work folder: see their reasons above"
        yield fail("GPU nodes", "not one answered", todo)
    if facts.left_out:
        yield ok("other nodes", f"{facts.left_out} alike were not asked (--nodes 0 asks all)")


def judge_node(answer: Answer, config: Config, *, hosting: bool) -> Iterator[Finding]:
    """What a node's answer means. `hosting`: one job would host its trials (rung 2)."""
    target, record = answer.target, answer.record
    name = f"{target.node} ({target.partition})" if target.partition else target.node
    if answer.trouble:
        todo = "look at the node and its partition; the other nodes are used without it"
        yield warn(name, answer.trouble, todo)
        return
    if target.stages:
        yield _judge_memory(f"{name} memory", answer, config, hosting=hosting)
        interpreter = judge_versions(record["versions"], config.trial.engine, where=f"{name} interpreter")
        if interpreter.status != "ok":  # else the finding above has said it
            yield interpreter
        if record.get("remove_ipc"):
            todo = "logind may wipe /dev/shm when your last session there ends: ask for RemoveIPC=no in logind.conf"
            yield warn(f"{name} RemoveIPC", "yes", todo)
    else:
        yield ok(name, f"{record['cpus']} CPUs, {gigabytes(record['memory_available'])} memory available")
    if record.get("redis_trouble"):
        todo = "set [redis] bind to an address of this host that nodes reach, [redis] port to an open one, or [redis] url"
        yield fail(f"{name} Redis", record["redis_trouble"], todo)
    if target.sandbox:
        yield judge_sandbox(record.get("sandbox"), f"on {name}", allow_unsafe=config.metric.allow_unsafe)


def _judge_memory(what: str, answer: Answer, config: Config, *, hosting: bool) -> Finding:
    if not config.stage.enabled:
        return ok(what, "staging is off: trials read storage")
    roots: Sequence[Mapping[str, Any]] = answer.record.get("roots") or ()
    refused = "; ".join(f"{root['root']}: {root['why']}" for root in roots if not root["usable"])
    best = next((root for root in roots if root["usable"]), None)
    if best is None:
        todo = "trials there read storage (rung 4): give [stage] roots a folder on a local disk"
        return warn(what, refused or "no root", todo)
    slow = best["rung"] == "shm" and (best.get("write_rate") or SLOW_RATE) < SLOW_RATE
    todo = ""
    if not hosting and answer.shared is None and best is roots[0]:
        todo = "whether jobs share it was not told: try again when the node is free"
    elif not hosting and not answer.shared and best is roots[0]:
        todo = "each job has memory of its own there: set [stage] host_trials = true, else a trial is started for nothing"
    elif refused:
        todo = "a lower rung is used there"
    elif slow:
        todo = "slow for memory: is the node busy, or swapping?"
    return ok_unless(todo, what, "; ".join(filter(None, [_describe(best, answer), refused])))


def _describe(root: Mapping[str, Any], answer: Answer) -> str:
    shared = {True: "shared by jobs", False: "private to each job", None: "shared?"}[answer.shared]
    limit = answer.record.get("memory_cgroup_limit")
    parts = [
        f"{root['root']} ({root['fs']}) {gigabytes(root['free'])} free of {gigabytes(root['size'])}, {shared}",
        "no memory cgroup" if limit is None else f"jobs' memory is limited (this one: {gigabytes(limit)})",
    ]
    if root.get("write_rate"):
        parts.append(f"write {gigabytes(root['write_rate'])}/s, read {gigabytes(root['read_rate'])}/s")
    return ", ".join(parts)


def judge_sandbox(levels: Sequence[Mapping[str, Any]] | None, where: str, *, allow_unsafe: bool) -> Finding:
    """The best level that holds, and why no better one does. `levels`: best first."""
    what = f"sandbox {where}"
    if not levels:
        return warn(what, "not tried", "run `python -m evaljobs sandbox` there")
    best = next((row["level"] for row in levels if row["holds"]), "none")
    better = [
        f"no {row['level']}: {row['reason']}" for row in takewhile(lambda row: not row["holds"], levels)
    ]
    todo = ""
    if best in ("rlimits", "none"):
        todo = "tasks that run generated programs will fail here: ask for user namespaces or Landlock (kernel 5.13)"
        if allow_unsafe and best == "rlimits":
            todo = "[metric] allow_unsafe is set: generated programs run almost unguarded"
    return ok_unless(todo, what, f"{best} ({'; '.join(better)})" if better else best)


Check = Callable[[Facts], Iterator[Finding]]
HERE: tuple[Check, ...] = (_python, _interpreter, _work_folder)
SLURM: tuple[Check, ...] = (_api, _rules, _gpu_nodes, _job_kinds, _staging, _watch)
LOCAL: tuple[Check, ...] = (_gpus,)
NODES: tuple[Check, ...] = (_redis, _nodes)
