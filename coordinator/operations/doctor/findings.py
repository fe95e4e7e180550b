"""The table of `evalspan doctor`: whether an evaluation can run on this site, and how well. Pure.

    ok: as it should be   warn: it runs, on a lower rung or slower   fail: an evaluation would stop here

Rule: a finding is a pure function of `Facts`; a fact that could not be read is a warning or a failure, never "ok". The
order here is the order of the printed table. Accounting's limits are in `limit_findings`. Called by `collect`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from coordinator.base.words import first_of
from coordinator.errors import OperatorError
from coordinator.intake.admission import loaded_suites, missing_places, refusal_of_place
from coordinator.operations.doctor.facts import Facts, Finding, format_gigabytes, make_finding
from coordinator.operations.doctor.limit_findings import format_hours, judge_accounting, setting_of_role
from coordinator.operations.doctor.node_jobs import NodeJob
from coordinator.site.cluster import Purpose
from coordinator.site.cluster.node_choice import describe_unusable, in_hostlist, none_left
from coordinator.site.cluster.sbatch_text import ROLES
from coordinator.site.cluster.slurm_limits import setting_of
from coordinator.site.cluster.slurm_parse import Reservation, local_time
from coordinator.site.cluster.slurm_rules import PRIVATE_SHM_REASON, Partition, SiteRules
from coordinator.site.config.schema import Config, TrialConfig
from evaljobs.contract.engine_traits import ENDPOINT
from evaljobs.staging.capacity import MEMORY_FS

SHARED_FS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "pvfs2", "orangefs", "afs", "cifs", "fuse", "9p")  # fmt: skip
# of the work folder: with less, one evaluation's request sets and responses may not fit
LEAST_FREE_BYTES = 1 << 30
LOW_FREE_BYTES = 10 << 30
SLOW_RATE = 1e9  # bytes/s into node memory; tmpfs on any server of the last ten years is several times faster
LEAST_TRANSFORMERS = 5  # major version


def judge_site(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings. Equal warnings and failures are merged at the first, with all their subjects."""
    found: dict[object, list[Finding]] = {}
    for one in _findings(facts):
        found.setdefault(one if one.status == "ok" else (one.found, one.todo, one.status), []).append(one)
    return tuple(
        same[0].model_copy(update={"what": first_of([one.what for one in same])}) for same in found.values()
    )


def _findings(facts: Facts) -> Iterator[Finding]:
    yield make_finding("python", f"{facts.python}, evalspan's own")
    if facts.interpreter_error:
        todo = "see [trial] python, prologue and container"
        yield make_finding("trial interpreter", facts.interpreter_error, fail=todo)
    else:
        on_gpus, trouble = facts.slurm or bool(facts.gpus), facts.engine_trouble
        yield judge_versions(facts.versions, facts.config.trial, on_gpus=on_gpus, trouble=trouble)
    yield _work_folder(facts)
    if facts.cluster_error:
        todo = "name one that is there: --cluster, [cluster] partition"
        yield make_finding("cluster", facts.cluster_error, fail=todo)
    elif not facts.locks_error:
        if facts.slurm:
            for judged in (_site, _gpu_nodes, _small_nodes, _reservations, _job_kinds, _staging, _watch):
                yield from judged(facts)
        else:
            yield make_finding("GPUs", ", ".join(facts.gpus) or "none: trials run on the CPU")
        todo = facts.redis_error and "see [redis]: bind for evalspan's own server, url for the site's"
        yield make_finding(
            "Redis", facts.redis_error or facts.redis, fail=todo, warn="; ".join(facts.redis_warnings)
        )
        yield from _nodes(facts)


# --- this machine ----------------------------------------------------------------------------------------------------


def judge_versions(
    found: Mapping[str, str | None],
    trial: TrialConfig,
    *,
    on_gpus: bool,
    where: str = "trial interpreter",
    trouble: str = "",
) -> Finding:
    """Judge lm-eval and the packages of the engine. `on_gpus`: trials get GPUs, unless their device is the CPU.

    `trouble`: why the engine cannot be imported there; empty if it can.
    """
    engine = trial.engine
    of_engine = {"hf": ["torch", "transformers"], ENDPOINT: ["torch", "transformers"]}.get(engine, [engine])
    needed = ["lm_eval", "redis", *of_engine]
    missing = [name for name in needed if found.get(name) is None]
    text = ", ".join(f"{name} {found.get(name) or 'missing'}" for name in needed)
    text += "; evalspan was not tried with SGLang" * (engine == "sglang")
    if missing:
        todo = f"install {' and '.join(missing)} there, or name another interpreter in [trial] python"
        return make_finding(where, text, fail=todo)
    if trouble:
        extra = "endpoint" if engine == ENDPOINT else engine
        packages = "sglang" if engine == "sglang" else f"'evalspan[{extra}]'"
        return make_finding(
            where, f"{text}: {trouble}", fail=f"`pip install {packages}` there brings what it lacks"
        )
    on_gpus = on_gpus and engine != ENDPOINT and not (trial.device or "").startswith("cpu")
    if on_gpus and (found.get("torch") or "").endswith("+cpu"):
        todo = 'a torch with CUDA or ROCm in [trial] python; without GPUs set [trial] device = "cpu"'
        return make_finding(
            where, f"{text}: this torch cannot use GPUs, so trials would fail at once", fail=todo
        )
    old = engine == "hf" and int((found.get("transformers") or "0").split(".")[0]) < LEAST_TRANSFORMERS
    todo = "transformers 5 is what evalspan is tested with: `pip install evalspan[hf]` there"
    return make_finding(where, text, warn=todo if old else "")


def _work_folder(facts: Facts) -> Finding:
    """Judge free space, and whether nodes see the folder: their answers are in it."""
    fs, fail, warn = facts.work_fs, facts.locks_error, ""
    found = f"{facts.config.work_dir} ({fs}, {format_gigabytes(facts.work_free)} free)"
    if not fail and facts.work_free < LEAST_FREE_BYTES:
        fail = "free some space there, or pass another --work-dir"
    elif not fail and facts.slurm and fs in MEMORY_FS:
        fail = "this is memory of one machine: pass a --work-dir on shared storage"
    elif facts.work_free < LOW_FREE_BYTES:
        warn = "little space: request sets and responses of many evaluations may not fit"
    elif facts.slurm and not fs.startswith(SHARED_FS):
        if facts.answers and not any(a.trouble for a in facts.answers):
            found += ", seen by all nodes that were asked"
        else:
            warn = "this looks like a local disk; the nodes below say whether they see it"
    return make_finding("work folder", found, fail=fail, warn=warn)


def _watch(facts: Facts) -> Iterator[Finding]:
    if why := refusal_of_place(facts.config):
        todo = "set [watch] roots to the folder that training writes its checkpoints to"
        yield make_finding("[watch]", why, warn=todo)
    for why in missing_places(facts.config.watch):
        todo = "set the folder that training writes its checkpoints to, or create it"
        yield make_finding("[watch]", why, warn=todo)
    try:
        loaded_suites(facts.config.watch)
    except OperatorError as error:
        yield make_finding("[watch]", str(error), fail="the daemon does not start before")


# --- Slurm's rules and nodes -------------------------------------------------------------------------------------------


def _site(facts: Facts) -> Iterator[Finding]:
    if facts.api:
        yield make_finding("pyslurm", facts.api)
    if facts.rules is None:
        todo = "without them the site's rules are not noticed"
        yield make_finding("Slurm's settings", facts.rules_error, warn=todo)
        return
    yield from _partitions(facts.rules, facts.config)
    array, jobs = facts.rules.number("MaxArraySize"), facts.rules.number("MaxJobCount")
    text = f"MaxArraySize {'?' if array is None else array}, MaxJobCount {jobs or '?'}"
    if array is not None and array < facts.lanes:
        text += f": the {facts.lanes} trials of a node come in jobs of {max(1, array)}"
    yield make_finding("job arrays", text)
    yield from judge_accounting(facts, facts.rules)
    scripts = {k: facts.rules.config.get(k, "") for k in ("Prolog", "Epilog")}
    if found := ", ".join(f"{k}={file}" for k, file in scripts.items() if file not in ("(null)", "")):
        todo = "if they empty /dev/shm after each job, weights vanish under running trials: ask, or use [stage] roots"
        yield make_finding("site scripts", found, warn=todo)


def _partitions(rules: SiteRules, config: Config) -> Iterator[Finding]:
    """Check that the configured partitions exist, are up, and allow enough time."""
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
    for role, setting, names in asked:
        if names is None:
            continue
        chosen = rules.chosen(names or None)
        if not chosen:
            found = f"{names or 'no default one'} (there are: {known})"
            yield make_finding(role, found, fail=f"name one in {setting}")
        yield from (_partition(role, partition, config.trial.time_limit_seconds) for partition in chosen)


def _partition(role: str, partition: Partition, wanted: int) -> Finding:
    """Judge a partition. `wanted`: seconds of a trial's job."""
    limit, todo = partition.max_seconds, ""
    text = f"{partition.name}, nodes {partition.nodes or '?'}"
    text += "" if limit is None else f", at most {format_hours(limit)}"
    if limit is not None and limit < wanted:
        todo = f"[trial] time_limit of {format_hours(wanted)} is longer: jobs ask for {format_hours(limit)} there"
    elif partition.max_memory_per_cpu_mb:
        text += f", at most {partition.max_memory_per_cpu_mb} MB a CPU"
        todo = "a precursor of a large model is given several CPUs: where its trials need them, one job hosts them (rung 2)"
    if not partition.up:
        return make_finding(role, f"{text}, not up", fail="choose another, or wait for it")
    return make_finding(role, text, warn=todo)


def _reservations(facts: Facts) -> Iterator[Finding]:
    """Yield reservations of nodes that evaluations would use, or that the settings name."""
    if facts.rules is not None and facts.rules_error:
        yield make_finding("reservations", facts.rules_error, warn="ask again when the controller answers")
    own = facts.accounting.own_accounts if facts.accounting else []
    nodes = {
        "GPU": [n.name for n in facts.gpu_nodes if not n.excluded],
        "CPU": [n.name for n in facts.cpu_nodes],
    }
    for reservation in facts.reservations:
        taken = {k: [n for n in names if in_hostlist(n, reservation.nodes)] for k, names in nodes.items()}
        parts = [
            f"{len(names)} of {len(nodes[kind])} {kind} nodes ({first_of(names)})"
            for kind, names in taken.items()
            if names
        ]
        named = reservation.name in (facts.config.cluster.reservation or "").split(",")
        if parts or named:
            mine = bool(taken["GPU"]) and open_to(reservation, facts.user, own)
            every = len(taken["GPU"]) == len(nodes["GPU"]) > 0
            found = f"{' and '.join(parts) or 'no node of the partitions'}, {_span(reservation)}"
            yield _judge_reservation(reservation, found, named=named, mine=mine, every=every)


def _span(reservation: Reservation) -> str:
    """Describe its time, and its users."""
    begin = "" if reservation.active else f"from {local_time(reservation.start)} "
    holders = [
        f"{kind} {', '.join(names)}".replace(" -", " all but ")
        for kind in ("users", "accounts", "groups")
        if (names := getattr(reservation, kind))
    ]
    return f"{begin}until {reservation.until}, for {' and '.join(holders) or 'unnamed users'}"


def open_to(reservation: Reservation, user: str, accounts: Sequence[str]) -> bool:
    """Return whether jobs of this user may run in it. Groups are not considered."""
    barred = {f"-{name}" for name in (user, *accounts)} & {*reservation.users, *reservation.accounts}
    return not barred and (user in reservation.users or not set(accounts).isdisjoint(reservation.accounts))


def _judge_reservation(
    reservation: Reservation, found: str, *, named: bool, mine: bool, every: bool
) -> Finding:
    """Judge a reservation. `named`: set in the settings; `mine`: we get GPUs there; `every`: it has all nodes with GPUs."""
    what, warn, fail = f"reservation {reservation.name}", "", ""
    if named and reservation.active:
        useless = not (mine or reservation.groups)
        warn = "it has no GPUs for you: remove [cluster] reservation" if useless else ""
    elif named:
        warn = "jobs wait until it begins: remove [cluster] reservation to start before"
    elif mine:
        when = "" if reservation.active else " once it has begun"
        warn = f'set [cluster] reservation = "{reservation.name}"{when} to use these nodes'
    elif not reservation.active:
        warn = "jobs whose time limit reaches into it wait until its end: lower [trial] time_limit, or evaluate before"
    elif every:
        fail = "nothing runs before its end: set another [cluster] partition, or wait"
    else:
        warn = "nothing: evaluations use the other nodes until then"
    return make_finding(what, found, warn=warn, fail=fail)


def _gpu_nodes(facts: Facts) -> Iterator[Finding]:
    """Count the nodes with GPUs that accept jobs now, and describe the others."""
    nodes = [n for n in facts.gpu_nodes if not n.excluded]
    usable = sum(n.usable for n in nodes)
    found = f"{usable} of {len(nodes)} usable"
    if excluded := len(facts.gpu_nodes) - len(nodes):
        found += f", {excluded} more excluded by the settings"
    if why := none_left(facts.gpu_nodes):
        todo = "change that setting: `sinfo -N -O NodeList,Gres,Features_act` shows each node"
        yield make_finding("GPU nodes", why, fail=todo)
    elif others := describe_unusable(nodes):
        asleep = all("~" in n.state for n in nodes)
        fail = "" if usable else "wait until the site returns them, or choose another [cluster] partition"
        if asleep and not usable:
            fail = "set [nodes] wake = true: it lets evalspan's jobs boot them"
        yield make_finding(
            "GPU nodes", f"{found}: {others}", fail=fail, warn="the others are used without them"
        )
    elif nodes:
        yield make_finding("GPU nodes", found)


def _small_nodes(facts: Facts) -> Iterator[Finding]:
    """Yield nodes with GPUs whose memory is too small for a trial beside its precursor: evaluations avoid them."""
    nodes = [n for n in facts.gpu_nodes if not n.excluded and n.counts_memory]
    needed = sum(job.memory_mb for kind, job in facts.jobs.items() if kind in ("stage", "trial"))
    if small := [f"{n.name} ({n.memory_mb} MB)" for n in nodes if n.memory_mb < needed]:
        found = f"{first_of(small)}: a trial and a precursor without its weights ask for {needed} MB"
        todo = "lower [trial] memory_mb, or the other nodes are used without them"
        every = len(small) == len(nodes)
        yield make_finding("nodes with little memory", found, warn=todo, fail=todo if every else "")


def _job_kinds(facts: Facts) -> Iterator[Finding]:
    """Yield whether the cluster would accept each kind of job, with its real limits."""
    for kind, (status, found, on_gpus) in facts.job_kinds.items():
        general = "[trial], [cluster]" if on_gpus else "[metric], [trial], [cluster] cpu_partition"
        todo = {
            "ok": "",
            "warn": "ask again when the controller answers",
            "fail": _wrong_name(facts, kind, found) or f"see {general} and [slurm]",
        }[status]
        yield Finding(what=f"{kind} jobs", status=status, found=found, todo=todo)


def _wrong_name(facts: Facts, kind: Purpose, refusal: str) -> str:
    """Return the setting that a refusal is about, with valid values; "" if unknown."""
    job, options = facts.jobs.get(kind), facts.options
    account = options.account_of(job) if job is not None else None
    about = next((field for field in ("account", "qos") if f"invalid {field}" in refusal.lower()), None)
    if about is None and account is None and "account" in refusal.lower():
        about = "account"  # a rule of the site, in its own words, requires one
    if about is None or facts.accounting is None or job is None:
        return setting_of(refusal).replace("ROLE", ROLES[kind])
    value = account if about == "account" else options.qos_of(job)
    yours = facts.accounting.own_accounts if about == "account" else facts.accounting.qos_of(account)
    plural = "accounts" if about == "account" else "QOS"
    is_now = f"is {value!r}" if value else "is not set"
    return f"{setting_of_role(facts, kind, about)} {is_now}; your {plural}: {first_of(yours, 12) or 'none'}"


def _staging(facts: Facts) -> Iterator[Finding]:
    setting, reason = facts.config.stage.host_trials, facts.host_reason
    found, warn, fail = "a precursor per node, beside the trials (rung 1)", "", ""
    if setting is True:
        found = "hosts its trials in one job a node, as [stage] host_trials says (rung 2)"
    elif reason and setting == "auto":
        found = f"one job a node hosts the trials (rung 2): {reason}"
        warn = "nothing: this is automatic. GPUs idle while weights are staged, which a precursor would avoid"
    elif reason.startswith(
        PRIVATE_SHM_REASON
    ):  # the first trials notice it, and their nodes switch to rung 2
        found, warn = reason, 'set [stage] host_trials = "auto": otherwise one trial per node starts in vain'
    elif reason:
        found, fail = reason, 'set [stage] host_trials = "auto"'
    yield make_finding("staging", found, warn=warn, fail=fail)


# --- what nodes answered -----------------------------------------------------------------------------------------------


def _nodes(facts: Facts) -> Iterator[Finding]:
    """Judge all nodes. It is a failure if no GPU node accepts a job: an evaluation could not run anywhere."""
    for answer in facts.answers:
        yield from judge_node(answer, facts.config, hosting=facts.hosting)
    staging = [a for a in facts.answers if a.target.stages]
    if staging and all(a.trouble and a.refused for a in staging):
        todo = "no node accepts our jobs, or none sees the work folder: see the reasons above"
        yield make_finding("GPU nodes", "none answered", fail=todo)
    if facts.left_out:
        yield make_finding("other nodes", f"{facts.left_out} alike were not probed (--nodes 0 probes all)")


def judge_node(answer: NodeJob, config: Config, *, hosting: bool) -> Iterator[Finding]:
    """Judge a node's answer. `hosting`: one job would host its trials (rung 2)."""
    target, record = answer.target, answer.record
    name = f"{target.node} ({target.partition})" if target.partition else target.node
    if answer.trouble:
        todo = "look at the node and its partition; the other nodes are used without it"
        yield make_finding(name, answer.trouble, warn=todo)
        return
    if target.stages:
        yield _judge_memory(f"{name} memory", answer, config, hosting=hosting)
        where, on_gpus = f"{name} interpreter", config.cluster.kind == "slurm"
        interpreter = judge_versions(record["versions"], config.trial, on_gpus=on_gpus, where=where)
        if interpreter.status != "ok":  # otherwise the finding above says so
            yield interpreter
    else:
        found = f"{record['cpus']} CPUs, {format_gigabytes(record['memory_available'])} memory available"
        yield make_finding(name, found)
    if record.get("redis_trouble"):
        todo = "set [redis] bind to an address of this host that nodes reach, [redis] port to an open one, or [redis] url"
        yield make_finding(f"{name} Redis", record["redis_trouble"], fail=todo)
    if target.sandbox:
        yield judge_sandbox(record.get("sandbox"), f"on {name}", allow_unsafe=config.metric.allow_unsafe)


def _judge_memory(what: str, answer: NodeJob, config: Config, *, hosting: bool) -> Finding:
    if not config.stage.enabled:
        return make_finding(what, "staging is off: trials read storage")
    roots: Sequence[Mapping[str, Any]] = answer.record.get("roots") or ()
    refused = "; ".join(f"{root['root']}: {root['why']}" for root in roots if not root["usable"])
    best = next((root for root in roots if root["usable"]), None)
    if best is None:
        todo = "trials there read storage (rung 4): give [stage] roots a folder on a local disk"
        return make_finding(what, refused or "no root", warn=todo)
    slow = best["rung"] == "shm" and (best.get("write_rate") or SLOW_RATE) < SLOW_RATE
    todo = ""
    if not hosting and answer.shared is None and best is roots[0]:
        todo = "it is unknown whether jobs share it: try again when the node is free"
    elif not hosting and not answer.shared and best is roots[0]:
        todo = "each job has private memory there: set [stage] host_trials = true, otherwise a trial starts in vain"
    elif refused:
        todo = "a lower rung is used there"
    elif slow:
        todo = "slow for memory: is the node busy, or swapping?"
    return make_finding(what, "; ".join(filter(None, [_describe(best, answer), refused])), warn=todo)


def _describe(root: Mapping[str, Any], answer: NodeJob) -> str:
    shared = {True: "shared by jobs", False: "private to each job", None: "shared?"}[answer.shared]
    limit = answer.record.get("memory_cgroup_limit")
    parts = [
        f"{root['root']} ({root['fs']}) {format_gigabytes(root['free'])} free of {format_gigabytes(root['size'])}, {shared}",
        "no memory cgroup"
        if limit is None
        else f"jobs' memory is limited (this one: {format_gigabytes(limit)})",
    ]
    if root.get("write_rate"):
        parts.append(
            f"write {format_gigabytes(root['write_rate'])}/s, read {format_gigabytes(root['read_rate'])}/s"
        )
    return ", ".join(parts)


def judge_sandbox(levels: Sequence[Mapping[str, Any]] | None, where: str, *, allow_unsafe: bool) -> Finding:
    """Return the best working isolation level, and why better ones fail. `levels`: best first."""
    what = f"sandbox {where}"
    if not levels:
        return make_finding(what, "not tried", warn="run `python -m evaljobs sandbox` there")
    best = next((row["level"] for row in levels if row["holds"]), "none")
    failing = takewhile(lambda row: not row["holds"], levels)
    better = "; ".join(f"no {row['level']}: {row['reason']}" for row in failing)
    todo = ""
    if best in ("rlimits", "none"):
        todo = "tasks that run generated programs will fail here: ask for user namespaces or Landlock (kernel 6.2)"
        if allow_unsafe and best == "rlimits":
            todo = "[metric] allow_unsafe is set: generated programs run almost unguarded"
    return make_finding(what, f"{best} ({better})" if better else best, warn=todo)
