"""The checks of accounting limits for `evalspan doctor`: how many nodes' jobs the user's account and QOS leave. Pure.

Rule: a limit is compared with what an evaluation's jobs ask for. Enough for several nodes is ok. Less is a warning with the
settings that fit into it. A job that alone asks for more can never start: that fails. TRES other than CPUs, memory, nodes
and GPUs (such as billing) are not compared. Called by `slurm_findings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from coordinator.cluster import Job, Purpose
from coordinator.cluster.daemon_job import DAEMON_SECONDS, daemon_job, own_options
from coordinator.cluster.sbatch_text import ROLES
from coordinator.cluster.slurm_accounts import Accounting, Limit
from coordinator.cluster.slurm_rules import SiteRules
from coordinator.doctor.facts import Facts, Finding, fail, ok, ok_unless, warn

WORKERS = (
    8  # builds, and after them metric workers, that one evaluation has at once, unless [metric] workers says
)
LEAST_DAEMON_SECONDS = 600  # time limit of the coordinator's own job, below which it is a warning
ENOUGH_NODES = 4  # at once, below which a limit is a warning
ENFORCED = {"limits", "safe", "all"}  # words of AccountingStorageEnforce with which Slurm applies limits
UNITS = {"cpu": "CPUs", "mem": "MB", "gres/gpu": "GPUs", "node": "nodes", "jobs": "jobs"}
SETTINGS = {
    ("cpu", "build"): "[trial] cpus",
    ("cpu", "trial"): "[trial] cpus",
    ("cpu", "metric"): "[metric] cpus",
    ("mem", "build"): "[trial] memory_mb",
    ("mem", "trial"): "[trial] memory_mb",
    ("mem", "metric"): "[metric] memory_mb",
    ("gres/gpu", "trial"): "[trial] gpus_per_trial",
}
"""(TRES, role of a job) -> the setting of how much of it the job asks for."""


def hours(seconds: int) -> str:
    return f"{seconds / 3600:g} h" if seconds % 360 == 0 else f"{seconds / 60:g} min"


def judge_accounting(facts: Facts, rules: SiteRules) -> Iterator[Finding]:
    """Each limit of the accounts and QOS that the jobs get, and the time that they leave to jobs."""
    what = "limits"
    if facts.accounting_error:
        todo = "ask the site for MaxJobs, MaxSubmitJobs, MaxTRES and GrpTRES of your account and QOS"
        yield warn(what, f"sacctmgr did not say: {facts.accounting_error}", todo)
        return
    if facts.accounting is None:
        yield ok(what, "no accounting: none are kept")
        return
    yield from _not_allowed(facts, facts.accounting, rules)
    enforced = rules.config.get("AccountingStorageEnforce", "none")
    if ENFORCED.isdisjoint(enforced.lower().split(",")):
        yield ok(what, f"Slurm does not apply those of accounting (AccountingStorageEnforce={enforced})")
        return
    limits = limits_of_jobs(facts, facts.accounting, rules)
    for limit, kinds in limits.items():
        yield from judge_limit(limit, Demand.of(facts, limit, kinds), facts)
    rows = [facts.accounting.association(facts.options.account_of(job), ()) for job in facts.jobs.values()]
    hidden = sorted({row["account"] for row in rows if row} - facts.accounting.accounts.keys())
    if hidden:  # PrivateData
        todo = "ask the site for GrpTRES, GrpJobs and GrpSubmit of it"
        yield warn(what, f"the site does not show those of account {', '.join(hidden)}", todo)
    elif not limits and all(rows):
        yield ok(what, "none on the jobs, CPUs, memory or GPUs of your accounts and QOS")
    yield from _judge_time(facts, rules)


def _not_allowed(facts: Facts, accounting: Accounting, rules: SiteRules) -> Iterator[Finding]:
    """Jobs that wait for ever, since none of their partitions is for their account and QOS: `sbatch` takes them."""
    refused: dict[str, list[Purpose]] = {}
    for kind, job in facts.jobs.items():
        chosen = rules.chosen(facts.options.partition_of(job))
        row = accounting.association(facts.options.account_of(job), [p.name for p in chosen])
        if row is None:
            continue
        named = {"account": row["account"], "QOS": facts.options.qos_of(job) or row["defaultqos"]}
        why = [p.refuses(named["account"], named["QOS"]) for p in chosen]
        if why and all(why):
            refused.setdefault("; ".join(why), []).append(kind)
    for found, kinds in refused.items():
        settings = [setting_of_role(facts, kinds[0], field) for field in ("account", "qos", "partition")]
        todo = f"set another {settings[0]}, {settings[1]} or {settings[2]}"
        yield fail("partition access", f"{found}: {', '.join(kinds)} jobs would wait for ever", todo)


def limits_of_jobs(facts: Facts, accounting: Accounting, rules: SiteRules) -> dict[Limit, list[Purpose]]:
    """The limits that hold, and the kinds of jobs that each counts."""
    found: dict[Limit, list[Purpose]] = {}
    options = facts.options
    for kind, job in facts.jobs.items():
        chosen = rules.chosen(options.partition_of(job))
        partitions = [p.name for p in chosen]
        own = [p.qos for p in chosen if p.qos]
        for limit in accounting.limits(options.account_of(job), options.qos_of(job), partitions, own):
            found.setdefault(limit, []).append(kind)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How much an evaluation's jobs ask for of what a limit counts."""

    jobs: Mapping[Purpose, int]  # kind -> of one job
    lanes: int  # trials of one node
    hosting: bool  # one job a node hosts its trials
    workers: int  # metric workers at once; builds come before, and wait for each other where they must
    nodes: int  # that are enough
    daemon: int = 0  # of the coordinator's own job

    @classmethod
    def of(cls, facts: Facts, limit: Limit, kinds: Sequence[Purpose]) -> Demand:
        borrow, gpus = facts.config.borrow, facts.config.trial.gpus_per_trial
        most_trials = None if borrow.max_gpus is None else max(1, borrow.max_gpus // gpus)
        lanes = max(1, min(facts.lanes, most_trials or facts.lanes))
        nodes = [ENOUGH_NODES, max(1, sum(not n.excluded for n in facts.gpu_nodes))]
        nodes += [borrow.max_nodes] if borrow.max_nodes else []
        nodes += [ceil(most_trials / lanes)] if most_trials else []
        types = {name.lower() for n in facts.gpu_nodes for name in n.gpu_type.split("+")}
        amounts = {kind: amount(facts.jobs[kind], limit.what, types) for kind in kinds}
        return cls(
            jobs={kind: count for kind, count in amounts.items() if count is not None},
            lanes=lanes,
            hosting=facts.hosting,
            workers=facts.config.metric.workers or WORKERS,
            nodes=min(nodes),
            daemon=_of_daemon(facts, limit, kinds),
        )

    def node(self, what: str, lanes: int) -> int:
        """Of the jobs of one node with so many trials."""
        stage, trial = self.jobs.get("stage", 0), self.jobs.get("trial", 0)
        if what == "node":
            return 1
        if self.hosting:
            return {"jobs": trial, "cpu": trial * lanes}.get(what, trial * lanes + stage)
        return stage + trial * lanes

    @property
    def kinds(self) -> list[Purpose]:
        """Those that ask for any of it."""
        return [kind for kind, count in self.jobs.items() if count]

    @property
    def worker(self) -> int:
        return self.jobs.get("metric", 0)


def _of_daemon(facts: Facts, limit: Limit, kinds: Sequence[Purpose]) -> int:
    """How much of a limit on all jobs the coordinator's own job takes: where jobs of its account, QOS and partition count."""
    options, own = facts.options, own_options(facts.options)
    job = daemon_job(own)
    alike = [k for k in kinds if options.account_of(facts.jobs[k]) == own.account_of(job)]
    alike = [k for k in alike if options.qos_of(facts.jobs[k]) == own.qos_of(job)]
    if limit.of_partition:
        alike = [k for k in alike if options.partition_of(facts.jobs[k]) == own.partition_of(job)]
    counts = bool(alike) and not limit.of_a_job and limit.what != "node"
    return amount(job, limit.what, set()) or 0 if counts else 0


def amount(job: Job, what: str, types: set[str]) -> int | None:
    """How much the job asks for; None where the limit is on something else. `types`: of the nodes' GPUs."""
    if what.startswith("gres/gpu:"):
        return job.gpus if what.partition(":")[2].lower() in types else None
    return {"cpu": job.cpus, "mem": job.memory_mb, "gres/gpu": job.gpus, "node": 1, "jobs": 1}.get(what)


def judge_limit(limit: Limit, demand: Demand, facts: Facts) -> Iterator[Finding]:
    """One limit. Nothing is said of one that no job touches."""
    if not demand.kinds and limit.name != "MinTRES":
        return
    what, unit = f"{limit.name} {limit.what}".removesuffix(" jobs"), UNITS[limit.what.partition(":")[0]]
    unit = unit.removesuffix("s") if limit.most == 1 else unit
    least = limit.name == "MinTRES"
    beyond = [k for k, n in demand.jobs.items() if (n < limit.most if least else n > limit.most)]
    if demand.hosting and "stage" in beyond:
        beyond.remove("stage")  # no such job is submitted
    others = ", other users' included" if limit.shared else ""
    span = " in each job" if limit.of_a_job else f" at once{others}"
    text = f"{limit.holder} {'demands' if least else 'allows'} {limit.most} {unit}{span}"
    if beyond:
        asks = ", ".join(f"a {kind} job asks for {demand.jobs[kind]}" for kind in beyond)
        todo = f"{'these' if len(beyond) > 1 else 'it'} can never start: {_instead(limit, beyond, facts, least=least)}"
        yield fail(what, f"{text}: {asks}", todo)
    elif limit.of_a_job:
        yield _judge_one_job(what, text, limit, demand, facts)
    else:
        yield _judge_together(what, text, limit, demand, facts)


def _judge_one_job(what: str, text: str, limit: Limit, demand: Demand, facts: Facts) -> Finding:
    """A limit that each job keeps alone; one that hosts all trials of a node may not."""
    hosted = demand.node(limit.what, demand.lanes) if demand.hosting else 0
    if hosted <= limit.most or limit.name == "MinTRES":
        return ok(what, f"{text}: no job asks for {'less' if limit.name == 'MinTRES' else 'more'}")
    lanes = max(n for n in range(1, demand.lanes + 1) if n == 1 or demand.node(limit.what, n) <= limit.most)
    gpus = lanes * facts.config.trial.gpus_per_trial
    todo = f"set [borrow] max_gpus = {gpus}, or another {_carrier(limit, demand.kinds, facts)}"
    return warn(what, f"{text}: a job that hosts a node's {demand.lanes} trials asks for {hosted}", todo)


def _judge_together(what: str, text: str, limit: Limit, demand: Demand, facts: Facts) -> Finding:
    """A limit on all jobs together. Slurm counts each member of an array, precursors and workers, too."""
    most, worker = limit.most - demand.daemon, demand.worker
    node = demand.node(limit.what, demand.lanes) if demand.jobs.keys() & {"stage", "trial"} else 0
    beside = 0 if limit.what == "node" else worker * demand.workers
    another = f"another {_carrier(limit, demand.kinds, facts)}"
    text = f"{text}: {_asks(demand, limit.what, node, beside)}"
    if not node:
        few = worker and most // worker < demand.workers
        return ok_unless(f"set [metric] workers = {most // worker}, or {another}" if few else "", what, text)
    nodes = (most - beside) // node
    if nodes >= 1:
        todo = f"set [borrow] max_nodes = {nodes}: jobs beyond the limit wait, and hold their node's memory meanwhile"
        found = f"{text}: enough for {nodes} {'nodes' if nodes > 1 else 'node'} at once"
        return ok_unless("" if nodes >= demand.nodes else todo, what, found)
    if worker and node + worker <= most:
        workers = (most - node) // worker
        todo = f"set [borrow] max_nodes = 1 and [metric] workers = {workers}, or {another}"
        return warn(what, f"{text}: enough for one node with {workers} of these", todo)
    fit = [n for n in range(1, demand.lanes) if demand.node(limit.what, n) + worker <= most]
    if fit:
        gpus = max(fit) * facts.config.trial.gpus_per_trial
        workers_too = " and [metric] workers = 1" if worker else ""
        todo = f"set [borrow] max_gpus = {gpus}{workers_too}, or {another}"
        return warn(what, f"{text}: enough for {max(fit)} of {demand.lanes} trials of a node", todo)
    todo = f"jobs wait for each other, so an evaluation takes longer: set {another}"
    return warn(what, f"{text}: not enough for a precursor, a trial and a worker at once", todo)


def _asks(demand: Demand, what: str, node: int, beside: int) -> str:
    trials = f"{demand.lanes} trials" if demand.lanes > 1 else "a trial"
    stage = "a precursor without its weights" if what == "mem" else "a precursor"
    jobs = [stage] if demand.jobs.get("stage") else []
    jobs += [trials] if demand.jobs.get("trial") else []
    if demand.hosting:
        jobs = [f"one job with {trials}"]
    parts = [f"a node takes {node} ({' and '.join(jobs)})"] if node else []
    workers = "a metric worker takes" if demand.workers == 1 else f"{demand.workers} metric workers take"
    parts += [f"{workers} {beside}"] if beside else []
    parts += [f"the coordinator's own job {demand.daemon}"] if demand.daemon else []
    return ", ".join(parts) or "builds take turns"


def _instead(limit: Limit, kinds: Sequence[Purpose], facts: Facts, *, least: bool) -> str:
    """What lets jobs of these kinds start."""
    tres = limit.what.partition(":")[0]
    amounts = dict.fromkeys(SETTINGS.get((tres, ROLES[kind]), "") for kind in kinds)
    lower = "" if least else " and ".join(filter(None, amounts))
    if least:  # a QOS for GPU jobs alone: the others have one of their own
        tables = dict.fromkeys(f"[slurm.{ROLES[kind]}] qos" for kind in kinds)
        host = ", or set [stage] host_trials = true" if list(kinds) == ["stage"] else ""
        return f"set another QOS in {' and '.join(tables)}{host}"
    return f"{f'lower {lower}, or ' if lower else ''}set another {_carrier(limit, kinds, facts)}"


def _carrier(limit: Limit, kinds: Sequence[Purpose], facts: Facts) -> str:
    """The settings that put jobs of these kinds under the limit."""
    field = "partition" if limit.of_partition else "qos" if limit.holder.startswith("QOS") else "account"
    return " and ".join(dict.fromkeys(setting_of_role(facts, kind, field) for kind in kinds))


def setting_of_role(facts: Facts, kind: Purpose, field: str) -> str:
    """Where the settings name the account, QOS or partition of such a job."""
    role = ROLES[kind]
    if getattr(getattr(facts.config.slurm, role), field) is not None:
        return f"[slurm.{role}] {field}"
    on_cpus = field == "partition" and role in ("build", "metric") and facts.config.cluster.cpu_partition
    return "[cluster] cpu_partition" if on_cpus else f"[cluster] {field}"


def _judge_time(facts: Facts, rules: SiteRules) -> Iterator[Finding]:
    """MaxWall: jobs ask for no more than their account and QOS allow; the partitions' MaxTime has findings of its own."""
    if 0 < facts.daemon_seconds < DAEMON_SECONDS:
        text = f"runs for at most {hours(facts.daemon_seconds)}, then a successor goes on"
        todo = "it ends 3 minutes before its limit: run `evalspan daemon` on a login node, or set another [cluster] qos"
        yield ok_unless(
            todo if facts.daemon_seconds < LEAST_DAEMON_SECONDS else "", "coordinator's job", text
        )
    cut: dict[int, list[Purpose]] = {}
    for kind, allowed in facts.allowed_seconds.items():
        chosen = rules.chosen(facts.options.partition_of(facts.jobs[kind]))
        limits = [p.max_seconds for p in chosen if p.max_seconds is not None]
        if allowed < min([facts.jobs[kind].time_limit_seconds, *limits]):
            cut.setdefault(allowed, []).append(kind)
    for allowed, kinds in cut.items():
        trial = facts.config.trial.time_limit_seconds
        text = f"account or QOS allows {hours(allowed)}: {', '.join(kinds)} jobs ask for that"
        if "trial" in kinds:
            text += f" and not for [trial] time_limit ({hours(trial)})"
        setting = setting_of_role(facts, "trial" if "trial" in kinds else kinds[0], "qos")
        todo = f"where a job takes longer, set another {setting} or account"
        yield warn("MaxWall", text, todo)
