"""Small jobs on nodes, and their answers, for `evalspan doctor`.

Rule: the first job on a node measures and leaves a nonce in the node's memory; a second job looks for it, which proves that
the node's jobs share memory. A job that does not start in time is cancelled and reported as pending; no job outlives the
survey. Called by `collect`; `findings` judges the answers.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.decide.evaluation.job_specs import Site
from coordinator.site.cluster import Cluster, ClusterError, Job, JobPhase, RefusedError

FILE_SECONDS = 0.2  # between two looks for answers
LISTING_SECONDS = 5.0  # between two listings of the cluster's jobs
GRACE_SECONDS = 5.0  # how long an answer may take to arrive after a job's end (NFS)
PROBE_MEMORY_MB = 1024
TIME_LIMIT_SECONDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A node to probe, and where its jobs go. `gpus`: that a job must request to be accepted there at all."""

    node: str
    cluster: Cluster
    partition: str = ""
    gpus: int = 0
    stages: bool = True  # weights are staged there (it has GPUs)
    sandbox: bool = True  # metric workers run there


@dataclass(slots=True, kw_only=True)
class NodeJob:
    """A job on a node, and its answer. `out`: where the answer appears; `answers`: number of processes."""

    target: Target
    job: Job
    out: Path
    answers: int = 1
    record: Mapping[str, Any] = field(default_factory=dict)
    shared: bool | None = None  # whether a second job saw what the first one had left on the first root
    trouble: str = ""  # why there is no record
    refused: bool = False  # the trouble is a fault, not a busy node
    job_id: str = ""
    ended_at: float | None = None  # monotonic seconds
    phase: JobPhase = "pending"
    state: str = "it was not seen to start"

    @property
    def open(self) -> bool:
        return not (self.record or self.trouble)


def survey_nodes(
    targets: Sequence[Target],
    *,
    site: Site,
    folder: Path,
    redis_file: Path | None,
    wait_seconds: float,
    sample_mb: int,
) -> Sequence[NodeJob]:
    """Probe all targets concurrently, for up to two times `wait_seconds`. `folder`: for answers and logs, visible on nodes,
    with a new name of letters and digits.
    """
    roots = [word for root in site.stage.roots for word in ("--root", root)]
    first, second = [], []
    for number, target in enumerate(targets):
        words = [*roots, "--sample-mb", str(sample_mb), "--leave", f"{folder.name}{number}"]
        words += ["--redis-file", str(redis_file)] if redis_file is not None else []
        words += ["--sandbox"] if target.sandbox else []
        first.append(_node_job(target, site, folder, "measure", words))
    ask_nodes(first, wait_seconds)
    for number, target in enumerate(targets):
        if first[number].record.get("nonce_left"):
            words = [*roots, "--look", f"{folder.name}{number}"]
            second.append(_node_job(target, site, folder, "look", words))
    ask_nodes(second, wait_seconds)
    seen = {asked.target.node: asked.record.get("nonce_seen") for asked in second}
    for asked in first:
        asked.shared = seen.get(asked.target.node)
    return first


def _node_job(target: Target, site: Site, folder: Path, what: str, words: Sequence[str]) -> NodeJob:
    out = folder / f"{target.node}.{what}.json"
    job = Job(
        name=f"es-doctor-{folder.name}-{target.node}-{what}",
        argv=(*site.trial_command, "-m", "evaljobs", "probe", "--out", str(out), *words),
        log=str(out.with_suffix(".log")),
        node=target.node,
        gpus=target.gpus,
        memory_mb=PROBE_MEMORY_MB,
        time_limit_seconds=TIME_LIMIT_SECONDS,
        comment="doctor",
        env=site.trial_env,
        purpose="probe",
    )
    return NodeJob(target=target, job=job, out=out)


def ask_nodes(
    asked: Sequence[NodeJob], wait_seconds: float, look: Callable[[NodeJob], None] | None = None
) -> None:
    """Submit, wait for the answers, and cancel the jobs without one. `look`: reads a job's answer, if it exists."""
    look = look or look_for_answer
    for one in asked:
        try:
            one.job_id = one.target.cluster.submit(one.job)
        except RefusedError as error:
            one.trouble, one.refused = f"the cluster refuses a job there: {error}", True
        except ClusterError as error:
            one.trouble = f"no job could be submitted: {error}"
    try:
        deadline = time.monotonic() + wait_seconds
        listed = float("-inf")
        while any(one.open for one in asked) and time.monotonic() < deadline:
            if time.monotonic() - listed > LISTING_SECONDS:
                listed = time.monotonic()
                _look_at_jobs([one for one in asked if one.open])
            for one in asked:
                look(one)
            time.sleep(FILE_SECONDS)
    finally:
        for one in asked:
            if one.open:
                one.trouble = f"no answer within {wait_seconds:.0f} s: {one.state}"
                if one.job_id:
                    with contextlib.suppress(ClusterError):
                        one.target.cluster.cancel([one.job_id])


def _look_at_jobs(waiting: Sequence[NodeJob]) -> None:
    """Update all jobs from one listing: the targets' partitions are in one cluster."""
    try:
        states = {job.name: job for job in waiting[0].target.cluster.jobs()}
    except ClusterError:
        return
    for one in waiting:
        state = states.get(one.job.name)
        if state is None:
            continue
        one.state, one.phase = f"its job is {state.state}", state.phase
        one.state += f" ({state.reason})" if state.reason not in ("", "None") else ""
        if state.phase == "ended" and one.ended_at is None:
            one.ended_at = time.monotonic()


def look_for_answer(one: NodeJob) -> None:
    if not one.open:
        return
    try:
        one.record = json.loads(one.out.read_bytes())
    except FileNotFoundError:
        if one.ended_at is not None and time.monotonic() - one.ended_at > GRACE_SECONDS:
            one.refused = True
            one.trouble = f"{one.state} and left no answer: {_last_words(Path(one.job.log))}"


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "it left no log either; is the work folder shared with the nodes, and python there?"
    return lines[-1] if lines else "its log is empty"
