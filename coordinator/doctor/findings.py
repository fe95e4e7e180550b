"""The checks of `evalspan doctor`: does this site let an evaluation run, and how well? Pure.

    ok: as it should be   warn: it runs, on a lower rung or slower   fail: an evaluation would stop here

Rule: a finding is a pure function of `Facts`; a fact that could not be read is a warning or a failure, never "ok". The
order of HERE, SLURM, LOCAL and NODES is the order of the printed table.
Called by `collect`, which reads the facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from coordinator.base.words import first_of
from coordinator.config.schema import Config, TrialConfig
from coordinator.doctor import slurm_findings
from coordinator.doctor.facts import Check, Facts, Finding, fail, gigabytes, ok, ok_unless, warn
from coordinator.doctor.node_jobs import Answer
from coordinator.errors import OperatorError
from coordinator.intake.admission import loaded_suites, missing_places, no_place
from evaljobs.staging.capacity import MEMORY_FS

SHARED_FS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "pvfs2", "orangefs", "afs", "cifs", "fuse", "9p")  # fmt: skip
# of the work folder: below it one evaluation's request sets and responses may not fit
LEAST_FREE_BYTES = 1 << 30
LOW_FREE_BYTES = 10 << 30
SLOW_RATE = 1e9  # bytes/s into node memory; tmpfs on any server of the last ten years does several
LEAST_TRANSFORMERS = 5  # major version


def judge(facts: Facts) -> tuple[Finding, ...]:
    """All findings, in the order of the table; those of one cause are one line."""
    checks = HERE
    if facts.cluster_error:
        checks += (_no_cluster,)
    elif not facts.locks_error:
        checks += (SLURM if facts.slurm else LOCAL) + NODES
    return _merged(finding for check in checks for finding in check(facts))


def _merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Warnings and failures that say the same stand where the first of them does, with all their subjects."""
    found: dict[object, list[Finding]] = {}
    for one in findings:
        found.setdefault(one if one.status == "ok" else (one.found, one.todo, one.status), []).append(one)
    return tuple(
        same[0].model_copy(update={"what": first_of([one.what for one in same])}) for same in found.values()
    )


# --- this machine ----------------------------------------------------------------------------------------------------


def _python(facts: Facts) -> Iterator[Finding]:
    yield ok("python", f"{facts.python}, evalspan's own")


def _interpreter(facts: Facts) -> Iterator[Finding]:
    if facts.interpreter_error:
        todo = "see [trial] python, prologue and container"
        yield fail("trial interpreter", facts.interpreter_error, todo)
    else:
        on_gpus = facts.slurm or bool(facts.gpus)
        yield judge_versions(
            facts.versions, facts.config.trial, on_gpus=on_gpus, trouble=facts.engine_trouble
        )


def judge_versions(
    found: Mapping[str, str | None],
    trial: TrialConfig,
    *,
    on_gpus: bool,
    where: str = "trial interpreter",
    trouble: str = "",
) -> Finding:
    """lm-eval and what the engine needs. `on_gpus`: trials get GPUs, unless their device is the CPU.

    `trouble`: why the engine cannot be imported there; empty where it can.
    """
    engine = trial.engine
    needed = ["lm_eval", "redis", *({"hf": ["torch", "transformers"]}.get(engine, [engine]))]
    missing = [name for name in needed if found.get(name) is None]
    text = ", ".join(f"{name} {found.get(name) or 'missing'}" for name in needed)
    if engine == "sglang":
        text += "; evalspan was not tried with SGLang"
    if missing:
        todo = f"install {' and '.join(missing)} there, or name another interpreter in [trial] python"
        return fail(where, text, todo)
    if trouble:
        packages = "sglang" if engine == "sglang" else f"'evalspan[{engine}]'"
        todo = f"`pip install {packages}` there brings what it lacks"
        return fail(where, f"{text}: {trouble}", todo)
    if on_gpus and not (trial.device or "").startswith("cpu") and (found.get("torch") or "").endswith("+cpu"):
        todo = 'a torch with CUDA or ROCm in [trial] python; without GPUs set [trial] device = "cpu"'
        return fail(where, f"{text}: this torch uses no GPU, so trials would end at once", todo)
    old = engine == "hf" and int((found.get("transformers") or "0").split(".")[0]) < LEAST_TRANSFORMERS
    todo = "transformers 5 is what evalspan is tested with: `pip install evalspan[hf]` there"
    return ok_unless(todo if old else "", where, text)


def _work_folder(facts: Facts) -> Iterator[Finding]:
    """Room, and whether nodes see it: their answers lie there."""
    what, fs = "work folder", facts.work_fs
    found = f"{facts.config.work_dir} ({fs}, {gigabytes(facts.work_free)} free)"
    if facts.locks_error:
        yield fail(what, found, facts.locks_error)
    elif facts.work_free < LEAST_FREE_BYTES:
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


def _watch(facts: Facts) -> Iterator[Finding]:
    if why := no_place(facts.config):
        yield warn("[watch]", why, "set [watch] roots to the folder that training writes its checkpoints to")
    for why in missing_places(facts.config.watch):
        yield warn("[watch]", why, "name the folder that training writes its checkpoints to, or make it")
    try:
        loaded_suites(facts.config.watch)
    except OperatorError as error:
        yield fail("[watch]", str(error), "the daemon does not start before")


# --- Redis and nodes -------------------------------------------------------------------------------------------------


def _redis(facts: Facts) -> Iterator[Finding]:
    if facts.redis_error:
        todo = "see [redis]: bind for evalspan's own server, url for the site's"
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
        interpreter = judge_versions(
            record["versions"],
            config.trial,
            on_gpus=config.cluster.kind == "slurm",
            where=f"{name} interpreter",
        )
        if interpreter.status != "ok":  # else the finding above has said it
            yield interpreter
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
        todo = "tasks that run generated programs will fail here: ask for user namespaces or Landlock (kernel 6.2)"
        if allow_unsafe and best == "rlimits":
            todo = "[metric] allow_unsafe is set: generated programs run almost unguarded"
    return ok_unless(todo, what, f"{best} ({'; '.join(better)})" if better else best)


HERE: tuple[Check, ...] = (_python, _interpreter, _work_folder)
SLURM: tuple[Check, ...] = (*slurm_findings.CHECKS, _watch)
LOCAL: tuple[Check, ...] = (_gpus,)
NODES: tuple[Check, ...] = (_redis, _nodes)
