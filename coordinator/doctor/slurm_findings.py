"""The checks of Slurm's rules, limits and nodes, for `evalspan doctor`. Pure.

Rule: the order of CHECKS is the order of the printed table. Called by `findings`.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.cluster.slurm_reasons import none_left, unusable
from coordinator.cluster.slurm_rules import PRIVATE, SiteRules
from coordinator.config.schema import Config
from coordinator.doctor.facts import Check, Facts, Finding, fail, ok, ok_unless, warn

JOBS_BESIDE = 8  # builds, and after them metric workers, that one evaluation has at once
ENOUGH_NODES = 4  # at once, below which a limit on jobs is named


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


CHECKS: tuple[Check, ...] = (_api, _rules, _gpu_nodes, _job_kinds, _staging)
