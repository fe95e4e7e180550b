"""Checks of accounting limits for `evalspan doctor`: how many nodes' jobs the user's account and QOS allow. Pure.

Rule: a limit is compared with the requests of an evaluation's jobs. Enough for several nodes is ok. Less is a warning with
the settings that fit. A single job that requests more can never start, which is a failure. TRES other than CPUs, memory,
nodes and GPUs (such as billing) are not compared. Called by `findings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from coordinator.operations.doctor.facts import Facts, Finding, make_finding
from coordinator.site.cluster import Job, Purpose
from coordinator.site.cluster.daemon_job import DAEMON_SECONDS, daemon_job, own_options
from coordinator.site.cluster.sbatch_text import ROLES
from coordinator.site.cluster.slurm_accounts import Accounting
from coordinator.site.cluster.slurm_limits import RESOURCES, Limit
from coordinator.site.cluster.slurm_rules import SiteRules, limits_on, within_limits

# concurrent builds, and after them metric workers, of one evaluation, unless set by [metric] workers
DEFAULT_WORKERS = 8
LEAST_DAEMON_SECONDS = 600  # time limit of the coordinator's own job below which there is a warning
ENOUGH_NODES = 4  # concurrent nodes below which a limit is a warning
ENFORCING_WORDS = {
    "limits",
    "safe",
    "all",
}  # values of AccountingStorageEnforce with which Slurm applies limits


def format_hours(seconds: int) -> str:
    return f"{seconds / 3600:g} h" if seconds % 360 == 0 else f"{seconds / 60:g} min"


def judge_accounting(facts: Facts, rules: SiteRules) -> Iterator[Finding]:
    """Yield each limit of the accounts and QOS of the jobs, and the time limits that they allow."""
    what, accounting = "limits", facts.accounting
    if facts.accounting_error:
        todo = "ask the site for MaxJobs, MaxSubmitJobs, MaxTRES and GrpTRES of your account and QOS"
        yield make_finding(what, f"sacctmgr did not say: {facts.accounting_error}", warn=todo)
        return
    if accounting is None:
        yield make_finding(what, "no accounting: none are kept")
        return
    yield from _not_allowed(facts, accounting, rules)
    enforced = rules.config.get("AccountingStorageEnforce", "none")
    if ENFORCING_WORDS.isdisjoint(enforced.lower().split(",")):
        yield make_finding(
            what, f"Slurm does not apply those of accounting (AccountingStorageEnforce={enforced})"
        )
        return
    cases = cases_of(facts, accounting, rules)
    for case in cases:
        yield from judge_limit(case)
    rows = [accounting.association(facts.options.account_of(job), ()) for job in facts.jobs.values()]
    hidden = sorted({row["account"] for row in rows if row} - accounting.accounts.keys())
    if hidden:  # PrivateData
        todo = "ask the site for GrpTRES, GrpJobs and GrpSubmit of it"
        yield make_finding(what, f"the site does not show those of account {', '.join(hidden)}", warn=todo)
    elif not cases and all(rows):
        yield make_finding(what, "none on the jobs, CPUs, memory or GPUs of your accounts and QOS")
    yield from _judge_time(facts, rules, accounting)


def _not_allowed(facts: Facts, accounting: Accounting, rules: SiteRules) -> Iterator[Finding]:
    """Yield jobs that would pend for ever since no partition accepts their account and QOS, although `sbatch` accepts them."""
    refused: dict[str, list[Purpose]] = {}
    for kind, job in facts.jobs.items():
        chosen = rules.chosen(facts.options.partition_of(job))
        row = accounting.association(facts.options.account_of(job), [p.name for p in chosen])
        if row is None:
            continue
        why = [p.refuses(row["account"], facts.options.qos_of(job) or row["defaultqos"]) for p in chosen]
        if why and all(why):
            refused.setdefault("; ".join(why), []).append(kind)
    for found, kinds in refused.items():
        account, qos, partition = (
            setting_of_role(facts, kinds[0], f) for f in ("account", "qos", "partition")
        )
        text = f"{found}: {', '.join(kinds)} jobs would wait for ever"
        yield make_finding("partition access", text, fail=f"set another {account}, {qos} or {partition}")


@dataclass(frozen=True, slots=True)
class Case:
    """A limit, and the requests of an evaluation's jobs for what it counts."""

    limit: Limit
    facts: Facts
    jobs: Mapping[Purpose, int]  # kind of job under it -> its request
    daemon: int = 0  # request of the coordinator's own job

    @property
    def most_trials(self) -> int | None:
        most = self.facts.config.borrow.max_gpus
        return None if most is None else max(1, most // self.facts.config.trial.gpus_per_trial)

    @property
    def lanes(self) -> int:
        return max(1, min(self.facts.lanes, self.most_trials or self.facts.lanes))

    @property
    def enough(self) -> int:
        """Number of concurrent nodes that needs no warning."""
        there = max(1, sum(not n.excluded for n in self.facts.gpu_nodes))
        of_settings = (self.facts.config.borrow.max_nodes, ceil((self.most_trials or 0) / self.lanes))
        return min(ENOUGH_NODES, there, *filter(None, of_settings))

    @property
    def workers(self) -> int:
        """Number of concurrent metric workers; builds run before and wait for each other if necessary."""
        return self.facts.config.metric.workers or DEFAULT_WORKERS

    @property
    def beside(self) -> int:
        """Use by the metric workers beside all nodes."""
        return 0 if self.limit.what == "node" else self.jobs.get("metric", 0) * self.workers

    def settings_that_fit(self) -> dict[str, int]:
        """Return the settings that keep evaluations within a limit on all jobs; empty if no size fits, or none is needed."""
        most, worker = self.limit.most - self.daemon, self.jobs.get("metric", 0)
        node = self.node(self.lanes)
        if not node:
            few = worker and 0 < most // worker < self.workers
            return {"metric.workers": most // worker} if few else {}
        lanes = [n for n in range(1, self.lanes) if self.node(n) + worker <= most]
        if (nodes := (most - self.beside) // node) >= 1:
            found, nodes = {"borrow.max_nodes": nodes}, min(nodes, max(1, len(self.facts.gpu_nodes)))
            left = most - self.beside - nodes * node
        elif worker and node + worker <= most:
            found = {"borrow.max_nodes": 1, "metric.workers": (most - node) // worker}
            nodes, left = 1, (most - node) % worker
        elif lanes:
            gpus = lanes[-1] * self.facts.config.trial.gpus_per_trial
            found = {"borrow.max_gpus": gpus} | ({"metric.workers": 1} if worker else {})
            nodes, left = 1, most - self.node(lanes[-1]) - worker
        else:
            return {}
        # a prefetch is a second precursor on a node and would take the place of a trial or a worker
        ahead = nodes * self.jobs.get("stage", 0) * (self.limit.what != "node" and not self.facts.hosting)
        return found | ({"stage.prefetch": 0} if ahead > left and self.facts.config.stage.prefetch else {})

    def node(self, lanes: int) -> int:
        """Return the use by the jobs of one node with this many trials."""
        stage, trial, what = self.jobs.get("stage", 0), self.jobs.get("trial", 0), self.limit.what
        if not self.jobs.keys() & {"stage", "trial"}:
            return 0
        if what == "node":
            return 1
        if self.facts.hosting and what in ("jobs", "cpu"):  # a host requests no CPU of its own
            return trial if what == "jobs" else trial * lanes
        return stage + trial * lanes

    def another(self, kinds: Sequence[Purpose] = ()) -> str:
        """Return the settings that put jobs of these kinds, or of all that count, under the limit."""
        kinds = kinds or [kind for kind, count in self.jobs.items() if count]
        carriers = dict.fromkeys(setting_of_role(self.facts, kind, self.limit.carrier) for kind in kinds)
        return f"another {' and '.join(carriers)}"


def cases_of(facts: Facts, accounting: Accounting, rules: SiteRules) -> list[Case]:
    found: dict[Limit, list[Purpose]] = {}
    for kind, job in facts.jobs.items():
        for limit in limits_on(job, facts.options, rules, accounting):
            if limit.what != "wall":
                found.setdefault(limit, []).append(kind)
    own = own_options(facts.options)
    daemons = limits_on(daemon_job(own), own, rules, accounting)
    return [case_of(facts, limit, kinds, daemon=limit in daemons) for limit, kinds in found.items()]


def case_of(facts: Facts, limit: Limit, kinds: Sequence[Purpose], *, daemon: bool = False) -> Case:
    """Return the case of a limit. `kinds`: of the jobs under the limit. `daemon`: include the coordinator's own job."""
    types = {name.lower() for n in facts.gpu_nodes for name in n.gpu_type.split("+")}
    amounts = {kind: requested_amount(facts.jobs[kind], limit.what, types) for kind in kinds}
    jobs = {kind: count for kind, count in amounts.items() if count is not None}
    counts = daemon and not limit.of_a_job and limit.what != "node"
    own = requested_amount(daemon_job(facts.options), limit.what, set()) if counts else None
    return Case(limit, facts, jobs, own or 0)


def requested_amount(job: Job, what: str, types: set[str]) -> int | None:
    """Return the job's request; None if the limit is on something else. `types`: of the nodes' GPUs."""
    if what.startswith("gres/gpu:"):
        return job.gpus if what.partition(":")[2].lower() in types else None
    return {"cpu": job.cpus, "mem": job.memory_mb, "gres/gpu": job.gpus, "node": 1, "jobs": 1}.get(what)


def judge_limit(case: Case) -> Iterator[Finding]:
    """Judge one limit. Limits that no job touches are skipped."""
    limit, hosting = case.limit, case.facts.hosting
    if not case.jobs or (not any(case.jobs.values()) and not limit.least):
        return
    what = f"{limit.name} {limit.what}".removesuffix(" jobs")
    unit = RESOURCES[limit.what.partition(":")[0]].unit
    unit = unit.removesuffix("s") if limit.most == 1 else unit
    beyond = [k for k, n in case.jobs.items() if (n < limit.most if limit.least else n > limit.most)]
    if hosting and "stage" in beyond:
        beyond.remove("stage")  # no such job is submitted
    others = ", other users' included" * limit.shared
    span = " in each job" if limit.of_a_job else f" at once{others}"
    text = f"{limit.holder} {'demands' if limit.least else 'allows'} {limit.most} {unit}{span}"
    hosted = case.node(case.lanes) if hosting and not limit.least else 0
    if beyond:
        asks = ", ".join(f"a {kind} job asks for {case.jobs[kind]}" for kind in beyond)
        todo = f"{'these' if len(beyond) > 1 else 'it'} can never start: {_instead(case, beyond)}"
        yield make_finding(what, f"{text}: {asks}", fail=todo)
    elif not limit.of_a_job:
        yield _judge_together(what, text, case)
    elif hosted <= limit.most:
        yield make_finding(what, f"{text}: no job asks for {'less' if limit.least else 'more'}")
    else:
        lanes = max((n for n in range(2, case.lanes + 1) if case.node(n) <= limit.most), default=1)
        text = f"{text}: a job that hosts a node's {case.lanes} trials asks for {hosted}"
        settings = {"borrow.max_gpus": lanes * case.facts.config.trial.gpus_per_trial}
        yield make_finding(what, text, warn=f", or {case.another()}", settings=settings)


def _judge_together(what: str, text: str, case: Case) -> Finding:
    """Judge a limit on all jobs together. Slurm counts each member of an array, including precursors and workers."""
    settings, node = case.settings_that_fit(), case.node(case.lanes)
    text = f"{text}: {_asks(case, node, case.beside)}"
    workers, nodes = settings.get("metric.workers"), settings.get("borrow.max_nodes", 0)
    another = f", or {case.another()}"
    if not settings and node:
        todo = f"jobs wait for each other, so an evaluation takes longer: set {case.another()}"
        return make_finding(
            what, f"{text}: not enough for a precursor, a trial and a worker at once", warn=todo
        )
    if gpus := settings.get("borrow.max_gpus"):
        trials = gpus // case.facts.config.trial.gpus_per_trial
        text += f": enough for {trials} of {case.lanes} trials of a node"
    elif workers and node:
        text += f": enough for one node with {workers} of these"
    elif node:
        text += f": enough for {nodes} {'nodes' if nodes > 1 else 'node'} at once"
        another = ": jobs beyond the limit wait, and hold their node's memory meanwhile"
    if not settings or (not workers and nodes >= case.enough):
        another, settings = "", {k: n for k, n in settings.items() if k == "stage.prefetch"}
    return make_finding(what, text, warn=another, settings=settings)


def _asks(case: Case, node: int, beside: int) -> str:
    trials = f"{case.lanes} trials" if case.lanes > 1 else "a trial"
    stage = "a precursor without its weights" if case.limit.what == "mem" else "a precursor"
    named: dict[Purpose, str] = {"stage": stage, "trial": trials}
    jobs = [name for kind, name in named.items() if case.jobs.get(kind)]
    if case.facts.hosting:
        jobs = [f"one job with {trials}"]
    workers = "a metric worker takes" if case.workers == 1 else f"{case.workers} metric workers take"
    parts = (
        f"a node takes {node} ({' and '.join(jobs)})" if node else "",
        f"{workers} {beside}" if beside else "",
        f"the coordinator's own job {case.daemon}" if case.daemon else "",
    )
    return ", ".join(filter(None, parts)) or "builds take turns"


def _instead(case: Case, kinds: Sequence[Purpose]) -> str:
    """Return what would let jobs of these kinds start."""
    if case.limit.least:  # a QOS for GPU jobs only: the others have one of their own
        tables = dict.fromkeys(f"[slurm.{ROLES[kind]}] qos" for kind in kinds)
        host = ", or set [stage] host_trials = true" if list(kinds) == ["stage"] else ""
        return f"set another QOS in {' and '.join(tables)}{host}"
    resource = RESOURCES[case.limit.what.partition(":")[0]]
    lower = " and ".join(filter(None, dict.fromkeys(resource.setting(ROLES[kind]) for kind in kinds)))
    return f"{f'lower {lower}, or ' if lower else ''}set {case.another(kinds)}"


def setting_of_role(facts: Facts, kind: Purpose, field: str) -> str:
    """Return the setting for the account, QOS or partition of such a job."""
    role = ROLES[kind]
    if getattr(getattr(facts.config.slurm, role), field) is not None:
        return f"[slurm.{role}] {field}"
    on_cpus = field == "partition" and role in ("build", "metric") and facts.config.cluster.cpu_partition
    return "[cluster] cpu_partition" if on_cpus else f"[cluster] {field}"


def _judge_time(facts: Facts, rules: SiteRules, accounting: Accounting) -> Iterator[Finding]:
    """Judge MaxWall: jobs request at most what their account and QOS allow; the partitions' MaxTime has its own findings."""
    options = facts.options
    daemon = within_limits(daemon_job(options), own_options(options), rules, accounting).time_limit_seconds
    if daemon < DAEMON_SECONDS:
        text = f"runs for at most {format_hours(daemon)}, then a successor goes on"
        todo = "it ends 3 minutes before its limit: run `evalspan daemon` on a login node, or set another [cluster] qos"
        yield make_finding("coordinator's job", text, warn=todo if daemon < LEAST_DAEMON_SECONDS else "")
    cut: dict[int, list[Purpose]] = {}
    for kind, job in facts.jobs.items():
        allowed = within_limits(job, options, rules, accounting).time_limit_seconds
        if allowed < within_limits(job, options, rules, Accounting()).time_limit_seconds:
            cut.setdefault(allowed, []).append(kind)
    for allowed, kinds in cut.items():
        trial = facts.config.trial.time_limit_seconds
        text = f"account or QOS allows {format_hours(allowed)}: {', '.join(kinds)} jobs ask for that"
        if "trial" in kinds:
            text += f" and not for [trial] time_limit ({format_hours(trial)})"
        setting = setting_of_role(facts, "trial" if "trial" in kinds else kinds[0], "qos")
        yield make_finding(
            "MaxWall", text, warn=f"where a job takes longer, set another {setting} or account"
        )
