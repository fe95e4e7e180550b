"""Small jobs on nodes, and what they answer: the shell behind `evalspan doctor`.

Rule: a node gets one job that measures and leaves a nonce in its memory, then a second one that looks for the nonce: only
that proves that jobs on the node share the memory. A job that does not start in time is cancelled and said to be
waiting; no job outlives the survey.
It does not know: what the answers mean (doctor).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.cluster import Cluster, ClusterError, Job, RefusedError
from coordinator.evaluation.job_specs import Site

FILE_SECONDS = 0.2  # between two looks for answers
LISTING_SECONDS = 5.0  # between two looks at the cluster's jobs
GRACE_SECONDS = 5.0  # an answer may reach us later than the word of the job's end (NFS)
PROBE_MEMORY_MB = 1024
TIME_LIMIT_SECONDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A node to ask, and where its jobs go. `gpus`: what a job there must ask for to be taken at all."""

    node: str
    cluster: Cluster
    partition: str = ""
    gpus: int = 0
    stages: bool = True  # weights are staged there (it has GPUs)
    sandbox: bool = True  # metric workers run there


@dataclass(slots=True, kw_only=True)
class Answer:
    """What was learnt of a node; `trouble` says why nothing was."""

    target: Target
    record: Mapping[str, Any] = field(default_factory=dict)
    shared: bool | None = None  # whether a second job saw what the first one left on the first root
    trouble: str = ""
    refused: bool = False  # the trouble is a fault, not a busy node


@dataclass(slots=True, kw_only=True)
class _Asked:
    target: Target
    job: Job
    out: Path
    job_id: str = ""
    trouble: str = ""
    refused: bool = False
    record: dict[str, Any] | None = None
    ended_at: float | None = None
    said: str = "it was not seen to start"

    @property
    def open(self) -> bool:
        return self.record is None and not self.trouble


def survey(
    targets: Sequence[Target],
    *,
    site: Site,
    folder: Path,
    redis_file: Path | None,
    wait_seconds: float,
    sample_mb: int,
) -> list[Answer]:
    """Ask all targets, side by side. `folder`: below the work folder; answers and logs lie there. Takes up to 2 waits."""
    nonces = {target.node: secrets.token_hex(8) for target in targets}
    roots = [word for root in site.stage_roots for word in ("--root", root)]
    first = [
        _job(
            target,
            site,
            folder,
            "measure",
            *roots,
            "--sample-mb",
            str(sample_mb),
            "--leave",
            nonces[target.node],
            *(["--redis-file", str(redis_file)] if redis_file is not None else []),
            *(["--sandbox"] if target.sandbox else []),
        )
        for target in targets
    ]
    ask(first, wait_seconds)
    answers = [
        Answer(target=a.target, record=a.record or {}, trouble=a.trouble, refused=a.refused) for a in first
    ]
    second = [
        _job(a.target, site, folder, "look", *roots, "--look", nonces[a.target.node])
        for a in first
        if a.record is not None and a.record.get("nonce_left")
    ]
    ask(second, wait_seconds)
    seen = {a.target.node: a.record.get("nonce_seen") for a in second if a.record is not None}
    for answer in answers:
        answer.shared = seen.get(answer.target.node)
    return answers


def _job(target: Target, site: Site, folder: Path, what: str, *arguments: str) -> _Asked:
    name = f"es-doctor-{folder.name}-{target.node}-{what}"
    out = folder / f"{target.node}.{what}.json"
    return _Asked(
        target=target,
        out=out,
        job=Job(
            name=name,
            argv=(*site.trial_command, "-m", "evaljobs.trial.probe", "--out", str(out), *arguments),
            log=str(folder / f"{target.node}.{what}.log"),
            node=target.node,
            gpus=target.gpus,
            memory_mb=PROBE_MEMORY_MB,
            time_limit_seconds=TIME_LIMIT_SECONDS,
            comment="doctor",
            env=site.trial_env,
            purpose="probe",
        ),
    )


def ask(asked: Sequence[_Asked], wait_seconds: float) -> None:
    """Submit, wait for the answers, cancel what did not answer. Fills `record` or `trouble` of each."""
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
                _look_at_jobs(asked)
            for one in asked:
                _look_for_answer(one)
            time.sleep(FILE_SECONDS)
    finally:
        for one in asked:
            if one.open:
                one.trouble = f"no answer within {wait_seconds:.0f} s: {one.said}"
                if one.job_id:
                    with contextlib.suppress(ClusterError):
                        one.target.cluster.cancel([one.job_id])


def _look_at_jobs(asked: Sequence[_Asked]) -> None:
    """One listing: all targets' clusters are one cluster, whatever their partitions."""
    waiting = [one for one in asked if one.open]
    try:
        states = {job.name: job for job in waiting[0].target.cluster.jobs()} if waiting else {}
    except ClusterError:
        return
    for one in waiting:
        state = states.get(one.job.name)
        if state is None:
            continue
        one.said = (
            f"its job is {state.state}{f' ({state.reason})' if state.reason not in ('', 'None') else ''}"
        )
        if state.phase == "ended" and one.ended_at is None:
            one.ended_at = time.monotonic()


def _look_for_answer(one: _Asked) -> None:
    if not one.open:
        return
    try:
        one.record = json.loads(one.out.read_bytes())
    except FileNotFoundError:
        if one.ended_at is not None and time.monotonic() - one.ended_at > GRACE_SECONDS:
            one.refused = True
            one.trouble = f"{one.said} and left no answer: {_last_words(Path(one.job.log))}"


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "it left no log either; is the work folder shared with the nodes, and python there?"
    return lines[-1] if lines else "its log is empty"
