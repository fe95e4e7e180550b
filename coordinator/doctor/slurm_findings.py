"""The checks of Slurm's rules, reservations and nodes, for `evalspan doctor`. Pure.

Rule: the order of CHECKS is the order of the printed table. Called by `findings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coordinator.base.words import first_of
from coordinator.cluster import Purpose
from coordinator.cluster.node_choice import in_hostlist, none_left, unusable
from coordinator.cluster.sbatch_text import ROLES
from coordinator.cluster.slurm_limits import setting_of
from coordinator.cluster.slurm_parse import Reservation, local_time
from coordinator.cluster.slurm_rules import PRIVATE, SiteRules
from coordinator.config.schema import Config
from coordinator.doctor.facts import Check, Facts, Finding, fail, ok, ok_unless, warn
from coordinator.doctor.limit_findings import hours, judge_accounting, setting_of_role


def _api(facts: Facts) -> Iterator[Finding]:
    if facts.api:
        yield ok("pyslurm", facts.api)


def _rules(facts: Facts) -> Iterator[Finding]:
    if facts.rules is None:
        yield warn("Slurm's settings", facts.rules_error, "without them the site's rules are not noticed")
        return
    yield from judge_partitions(facts.rules, facts.config)
    yield judge_arrays(facts.rules, facts.lanes)
    yield from judge_accounting(facts, facts.rules)
    names = [k for k in ("Prolog", "Epilog") if facts.rules.config.get(k, "(null)") not in ("(null)", "")]
    if names:
        todo = "if they empty /dev/shm after each job, weights vanish under running trials: ask, or use [stage] roots"
        yield warn("site scripts", ", ".join(f"{k}={facts.rules.config[k]}" for k in names), todo)


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
            text += "" if limit is None else f", at most {hours(limit)}"
            todo = ""
            if limit is not None and limit < wanted:
                todo = f"[trial] time_limit of {hours(wanted)} is longer: jobs ask for {hours(limit)} there"
            elif partition.max_memory_per_cpu_mb:
                text += f", at most {partition.max_memory_per_cpu_mb} MB a CPU"
                todo = "a precursor of a large model is given several CPUs: where its trials need them, one job hosts them (rung 2)"
            if partition.up:
                yield ok_unless(todo, role, text)
            else:
                yield fail(role, f"{text}, not up", "choose another, or wait for it")


def judge_arrays(rules: SiteRules, lanes: int) -> Finding:
    """`lanes`: trials of one node."""
    array = rules.number("MaxArraySize")
    text = f"MaxArraySize {array if array is not None else '?'}, MaxJobCount {rules.number('MaxJobCount') or '?'}"
    if array is not None and array < lanes:
        text += f": the {lanes} trials of a node come in jobs of {max(1, array)}"
    return ok("job arrays", text)


def _reservations(facts: Facts) -> Iterator[Finding]:
    """Those that hold nodes which evaluations would use, or that the settings name."""
    if facts.rules is not None and facts.rules_error:
        yield warn("reservations", facts.rules_error, "ask again when the controller answers")
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
    """When it is, and for whom."""
    begin = "" if reservation.active else f"from {local_time(reservation.start)} "
    holders = [
        f"{kind} {', '.join(names)}".replace(" -", " all but ")
        for kind, names in (
            ("users", reservation.users),
            ("accounts", reservation.accounts),
            ("groups", reservation.groups),
        )
        if names
    ]
    return f"{begin}until {reservation.until}, for {' and '.join(holders) or 'unnamed users'}"


def open_to(reservation: Reservation, user: str, accounts: Sequence[str]) -> bool:
    """May jobs of this user run in it? Groups are not known here."""
    barred = {f"-{name}" for name in (user, *accounts)} & {*reservation.users, *reservation.accounts}
    return not barred and (user in reservation.users or not set(accounts).isdisjoint(reservation.accounts))


def _judge_reservation(
    reservation: Reservation, found: str, *, named: bool, mine: bool, every: bool
) -> Finding:
    """`named`: the settings ask for it; `mine`: this user's jobs get GPUs there; `every`: it holds all nodes with GPUs."""
    what = f"reservation {reservation.name}"
    if named and reservation.active:
        todo = "" if mine or reservation.groups else "it holds no GPUs for you: remove [cluster] reservation"
        return ok_unless(todo, what, found)
    if named:
        return warn(what, found, "jobs wait until it begins: remove [cluster] reservation to start before")
    if mine:
        when = "" if reservation.active else " once it has begun"
        return warn(what, found, f'set [cluster] reservation = "{reservation.name}"{when} to use these nodes')
    if not reservation.active:
        todo = "jobs whose time limit reaches into it wait until its end: lower [trial] time_limit, or evaluate before"
        return warn(what, found, todo)
    if every:
        return fail(what, found, "nothing runs before its end: set another [cluster] partition, or wait")
    return warn(what, found, "nothing: evaluations use the other nodes until then")


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
        if all("~" in n.state for n in nodes):
            todo = "set [nodes] wake = true: it lets evalspan's jobs boot them"
        yield fail("GPU nodes", f"{found}: {others}", todo)
    elif others:
        yield warn("GPU nodes", f"{found}: {others}", "the others are used without them")
    elif nodes:
        yield ok("GPU nodes", found)


def _small_nodes(facts: Facts) -> Iterator[Finding]:
    """Nodes with GPUs whose memory holds no trial beside its precursor: evaluations leave them alone."""
    nodes = [n for n in facts.gpu_nodes if not n.excluded and n.counts_memory]
    needed = sum(job.memory_mb for kind, job in facts.jobs.items() if kind in ("stage", "trial"))
    small = [f"{n.name} ({n.memory_mb} MB)" for n in nodes if n.memory_mb < needed]
    if small:
        found = f"{first_of(small)}: a trial and a precursor without its weights ask for {needed} MB"
        todo = "lower [trial] memory_mb, or the other nodes are used without them"
        finding = fail if len(small) == len(nodes) else warn
        yield finding("nodes with little memory", found, todo)


def _job_kinds(facts: Facts) -> Iterator[Finding]:
    """Whether the cluster would take each kind of job, at its real limits."""
    for kind, (status, found, on_gpus) in facts.job_kinds.items():
        general = "[trial], [cluster]" if on_gpus else "[metric], [trial], [cluster] cpu_partition"
        todo = {
            "ok": "",
            "warn": "ask again when the controller answers",
            "fail": _wrong_name(facts, kind, found) or f"see {general} and [slurm]",
        }[status]
        yield Finding(what=f"{kind} jobs", status=status, found=found, todo=todo)


def _wrong_name(facts: Facts, kind: Purpose, refusal: str) -> str:
    """The setting that a refusal is about, with what the user may name there; "" where it is about none."""
    job, options = facts.jobs.get(kind), facts.options
    account = options.account_of(job) if job is not None else None
    about = next((field for field in ("account", "qos") if f"invalid {field}" in refusal.lower()), None)
    if about is None and account is None and "account" in refusal.lower():
        about = "account"  # a rule of the site's own, in its own words, demands one
    if about is None or facts.accounting is None or job is None:
        return setting_of(refusal).replace("ROLE", ROLES[kind])
    value = account if about == "account" else options.qos_of(job)
    yours = facts.accounting.own_accounts if about == "account" else facts.accounting.qos_of(account)
    plural = "accounts" if about == "account" else "QOS"
    is_now = f"is {value!r}" if value else "is not set"
    return f"{setting_of_role(facts, kind, about)} {is_now}; your {plural}: {first_of(yours, 12) or 'none'}"


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


CHECKS: tuple[Check, ...] = (_api, _rules, _gpu_nodes, _small_nodes, _reservations, _job_kinds, _staging)
