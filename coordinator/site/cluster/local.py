"""One machine as a cluster: subprocesses on N slots. A slot is a GPU, or a share of the CPU without GPUs.

Rule: jobs end with their coordinator. Each runs under a guardian (local_guardian.py), which ends all processes of its job, by
SIGTERM and then SIGKILL, on cancellation or when the coordinator is gone. `jobs.jsonl` records submitted names: the next
coordinator lists these jobs as ended, and starts none before the last guardian is gone. GPU jobs start in order of
submission. No call blocks: jobs start and end when the coordinator lists them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from coordinator.base.run_command import CommandError, run_command
from coordinator.base.signals import SIGNAL_EXIT_BASE
from coordinator.site.cluster import (
    COORDINATOR_ENDED,
    CPU_SLOT,
    ClusterError,
    Job,
    JobPhase,
    JobState,
    NodeState,
    RefusedError,
    local_guardian,
)
from coordinator.site.cluster.job_environment import INDEX_VARIABLE, variables_passed_on
from coordinator.site.cluster.sbatch_text import log_file
from evaljobs.contract.storage import LOCK_MODE, make_file, make_folder, try_lock, write_atomic
from evaljobs.staging.capacity import memory_available

log = logging.getLogger(__name__)

NODE = "local"
MIB = 1 << 20
KILL_SECONDS = 15.0  # between SIGTERM and SIGKILL
KEEP_SECONDS = 86_400.0  # how long jobs of an earlier coordinator are listed after their submission
ENDED_SECONDS = 600.0  # how long a job is listed after its end; Slurm's MinJobAge is 300
SIDE_JOBS_A_CPU = 4  # jobs without GPUs mostly wait for one another; this bounds arrays of hundreds
LEAST_SIDE_JOBS = 16


def gpu_names() -> list[str]:
    """Return this machine's NVIDIA GPUs as "index, name", from `nvidia-smi`; empty if that is not installed.

    A GPU partitioned into slices (MIG) is listed by slice: "MIG-uuid, name". If CUDA_VISIBLE_DEVICES is set, only those that
    it names.
    """
    return list(parse_gpus(_listing(), os.environ.get("CUDA_VISIBLE_DEVICES")))


@functools.cache
def _listing() -> str:
    try:
        return run_command(["nvidia-smi", "-L"], seconds=20)
    except CommandError:
        return ""


def parse_gpus(text: str, visible: str | None) -> tuple[str, ...]:
    """Return GPUs, or their slices, from `nvidia-smi -L`. `visible`: CUDA_VISIBLE_DEVICES, or None."""
    allowed = None if visible is None else {word.strip() for word in visible.split(",")}
    found: list[tuple[str, str, list[str]]] = []  # per GPU: its identifiers, its model, its slices
    for line in text.splitlines():
        if gpu := re.match(r"GPU (\d+): (.+) \(UUID: (\S+)\)", line):
            whole = allowed is None or bool({gpu[1], gpu[3]} & allowed)
            found.append((gpu[1] if whole else "", gpu[2], []))
        elif (part := re.match(r"\s+(MIG \S+)\s+Device\s+\d+: \(UUID: (\S+)\)", line)) and found:
            index, name, slices = found[-1]
            if index or part[2] in (allowed or ()):
                slices.append(f"{part[2]}, {name} {part[1]}")
    return tuple(
        device
        for index, name, slices in found
        for device in (slices or ([f"{index}, {name}"] if index else []))
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    """One process of a submitted job. `since`, `ended`: its start and end in monotonic seconds."""

    job: Job | None  # None: submitted by an earlier coordinator
    shown: JobState
    guardian: subprocess.Popen[bytes] | None = None
    since: float = 0.0
    slots: tuple[int, ...] = ()
    stop: str = ""  # the state that it will end with, once SIGTERM was sent
    ended: float | None = None


class LocalCluster:
    """The Cluster protocol on this machine. One coordinator at a time uses `state_dir`.

    `slots`: concurrent jobs with one GPU. `gpus`: as from `gpu_names`; [] for CPU slots. `kill_seconds`: between SIGTERM and
    SIGKILL. `export`: from the settings. `secrets`: as in `SlurmOptions`.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        slots: int | None = None,
        gpus: Sequence[str] | None = None,
        kill_seconds: float = KILL_SECONDS,
        export: Sequence[str] = (),
        secrets: Sequence[str] = (),
    ) -> None:
        self.gpus = list(gpu_names() if gpus is None else gpus)
        self.cpus = len(os.sched_getaffinity(0))
        self.slots = slots or len(self.gpus) or self.cpus
        if self.gpus and self.slots > len(self.gpus):
            raise RefusedError(f"{self.slots} slots are more than this machine's {len(self.gpus)} GPUs")
        self.kill_seconds = kill_seconds
        self.export, self.secrets = tuple(export), tuple(secrets)
        self._folder = state_dir.absolute()
        self._lock = threading.RLock()
        self._last_id = 0
        self._shortened_at = 0.0  # when jobs.jsonl was last shortened, in monotonic seconds
        self._members: list[_Member] = []
        self._live: list[_Member] = []  # not ended, in order of submission
        self._alive: int | None = None  # read end of the guardians' pipe, once in charge
        self._alone = False  # no guardian of an earlier coordinator is left

    # --- the protocol ------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> str:
        self.check(job)
        with self._lock, self._disk():
            self._take_charge()
            if time.monotonic() > self._shortened_at + KEEP_SECONDS:
                self._kept_rows()
            named = {"job_id": str(self._last_id + 1), "name": job.name, "count": job.count}
            row = {**named, "submitted_at": time.time()}
            with os.fdopen(make_file(self._folder / "jobs.jsonl"), "a") as file:
                file.write(json.dumps(row) + "\n")
            self._add(row, job)
            self._advance()
            return str(self._last_id)

    def jobs(self) -> list[JobState]:
        with self._lock, self._disk():
            self._take_charge()
            self._advance()
            oldest = time.monotonic() - ENDED_SECONDS
            self._members = [m for m in self._members if m.ended is None or m.ended > oldest]
            return [member.shown for member in self._members]

    def nodes(self) -> list[NodeState]:
        """Return the one node. Commands beside the daemon may call this too, since it starts and ends no job."""
        with self._lock:
            if self._alive is not None:
                self._advance()
            running = self._running()
            return [
                NodeState(
                    name=NODE,
                    usable=True,
                    state="UP",
                    gpus=self.slots,
                    gpus_free=len(self._free_slots()),
                    cpus=self.cpus,
                    cpus_free=max(0, self.cpus - sum(job.cpus for job in running)),
                    memory_mb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB,
                    memory_free_mb=(memory_available() or 0) // MIB,
                    gpu_type=self.gpus[0].partition(", ")[2] if self.gpus else CPU_SLOT,
                    counts_memory=False,
                )
            ]

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Send SIGTERM now; the guardian sends SIGKILL after `kill_seconds`."""
        with self._lock, self._disk():
            self._take_charge()
            for target in job_ids:
                job_id, _, index = target.partition("_")
                for member in list(self._live):
                    if member.shown.job_id == job_id and index in ("", str(member.shown.index)):
                        self._stop(member, "CANCELLED")
            self._advance()

    def check(self, job: Job) -> None:
        if job.gpus > self.slots:
            raise RefusedError(
                f"a job of {job.gpus} slots does not fit this machine's {self.slots}: lower gpus_per_trial"
            )
        if job.node not in (None, NODE):
            raise RefusedError(f"the local cluster has one node, {NODE!r}, and none named {job.node!r}")

    def close(self) -> None:
        """End all jobs as the end of this process would: their guardians do it, within 10 s."""
        with self._lock:
            if self._alive is not None:
                for end in (self._alive, self._alive_end):
                    os.close(end)
            self._alive = None

    # --- earlier coordinators ----------------------------------------------------------------------------------------

    def _take_charge(self) -> None:
        """List jobs of earlier coordinators; from now on guardians end with this process."""
        if self._alive is not None:
            return
        make_folder(self._folder)
        for row in self._kept_rows():
            self._add(row)
        self._alive, self._alive_end = os.pipe()

    def _kept_rows(self) -> list[dict[str, Any]]:
        """Return rows of jobs.jsonl younger than KEEP_SECONDS; remove the others, except the last id, from the file."""
        file, rows = self._folder / "jobs.jsonl", list[dict[str, Any]]()
        with contextlib.suppress(FileNotFoundError):
            for text in file.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a torn line: its job never ran
                    rows.append(json.loads(text))
        self._last_id = max([self._last_id, *(int(row["job_id"]) for row in rows)])
        young = [row for row in rows if row["submitted_at"] > time.time() - KEEP_SECONDS]
        if left := young or rows[-1:]:
            write_atomic(file, "".join(f"{json.dumps(row)}\n" for row in left).encode())
        self._shortened_at = time.monotonic()
        return young

    def _add(self, row: Mapping[str, Any], job: Job | None = None) -> None:
        """Add a job from its row of jobs.jsonl. `job` None: an earlier coordinator's, which ended with it."""
        known = {key: row[key] for key in ("job_id", "name", "submitted_at")}
        phase: JobPhase = "running" if job is None else "pending"
        shown = (JobState(index=i, phase=phase, state=phase.upper(), **known) for i in range(row["count"]))
        stop = COORDINATOR_ENDED if job is None else ""
        found = [_Member(job=job, shown=each, stop=stop) for each in shown]
        self._last_id = max(self._last_id, int(row["job_id"]))
        self._members += found
        self._live += found

    def _earlier_are_gone(self) -> bool:
        """Return whether the last guardian of an earlier coordinator has ended. Living guardians hold a lock on one file."""
        if not self._alone:
            with self._lock_file() as file:
                if not try_lock(file):
                    return False
            self._alone = True
            for member in [m for m in self._live if m.job is None]:
                self._end(member, None)
        return True

    def _lock_file(self) -> IO[bytes]:
        return os.fdopen(make_file(self._folder / "guardians.lock", mode=LOCK_MODE), "ab")

    # --- starting and ending jobs ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        if not self._earlier_are_gone():
            return
        for member in list(self._live):
            if member.guardian is None or member.job is None:
                continue
            code = member.guardian.poll()
            if code is not None:
                self._end(member, code)
            elif time.monotonic() - member.since > member.job.time_limit_seconds:
                self._stop(member, "TIMEOUT")
        self._start_waiting()

    def _running(self) -> list[Job]:
        return [m.job for m in self._live if m.shown.phase == "running" and m.job is not None]

    def _start_waiting(self) -> None:
        side = sum(not job.gpus for job in self._running())
        overtaking = False
        for member in self._live:
            job = member.job
            if member.shown.phase != "pending" or job is None:
                continue
            if job.gpus:
                free = self._free_slots()
                overtaking = overtaking or len(free) < job.gpus
                if not overtaking:
                    self._start(job, member, free[: job.gpus])
            elif side < max(LEAST_SIDE_JOBS, SIDE_JOBS_A_CPU * self.cpus):
                side += 1
                self._start(job, member, [])

    def _free_slots(self) -> list[int]:
        taken = {slot for member in self._live for slot in member.slots}
        return [s for s in range(self.slots) if s not in taken]

    def _start(self, job: Job, member: _Member, slots: Sequence[int]) -> None:
        guardian = (sys.executable, "-I", "-S", local_guardian.__file__, str(self.kill_seconds))
        try:
            path = Path(log_file(job, member.shown.index))
            make_folder(path.parent)
            with os.fdopen(make_file(path), "ab") as out, self._lock_file() as lock:
                try_lock(lock, shared=True, wait=math.inf)
                member.guardian = subprocess.Popen(
                    [*guardian, *job.argv],
                    stdin=self._alive,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=self._environment(job, member, slots),
                    start_new_session=True,
                    pass_fds=(lock.fileno(),),
                )
        except (OSError, ValueError) as error:
            member.shown = replace(member.shown, reason=f"cannot start yet: {error}")
            log.warning("job %s (%s) %s", member.shown.job_id, job.name, member.shown.reason)
            return
        member.slots, member.since = tuple(slots), time.monotonic()
        member.shown = replace(
            member.shown,
            phase="running",
            state="RUNNING",
            reason="",
            node=NODE,
            started_at=time.time(),
        )

    def _environment(self, job: Job, member: _Member, slots: Sequence[int]) -> dict[str, str]:
        own = {INDEX_VARIABLE: str(member.shown.index)}
        if self.gpus:  # a job without a slot must not see a GPU
            own["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi
            own["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[s].partition(",")[0] for s in slots)
        passed = variables_passed_on(os.environ, export=self.export, secrets=self.secrets, given=job.secrets)
        return {**passed, **job.env, **own}

    def _stop(self, member: _Member, why: str) -> None:
        """End a member: at once if pending, by SIGTERM if running."""
        if member.stop:
            return
        member.stop = why
        if member.guardian is None:
            self._end(member, None)
        else:
            member.guardian.terminate()

    def _end(self, member: _Member, code: int | None) -> None:
        """Record a member's end. `code`: the guardian's; None: this coordinator started none."""
        state, reason = member.stop or ("COMPLETED" if code == 0 else "FAILED"), member.shown.reason
        if code:
            number = code - SIGNAL_EXIT_BASE if code > SIGNAL_EXIT_BASE else -code
            reason = f"signal {number}" if number > 0 else f"exit code {code}"
        member.shown = replace(member.shown, phase="ended", state=state, reason=reason)
        member.guardian, member.ended = None, time.monotonic()
        self._live.remove(member)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ClusterError(f"{self._folder} cannot be read or written: {error}") from error
