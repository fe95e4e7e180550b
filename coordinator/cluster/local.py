"""One machine as a cluster: subprocesses on N slots. A slot is a GPU, or a share of the CPU without GPUs.

Rule: jobs end with their coordinator. Each runs below a guardian (local_guardian.py). The guardian
ends all of its job's processes, by SIGTERM and then SIGKILL, at a cancellation or when the
coordinator is gone. `jobs.jsonl` keeps submitted names: the next coordinator lists these jobs as
ended, and starts none before the last guardian is gone. GPU jobs start in the order of submission.
No call waits: jobs start and end when the coordinator lists them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from coordinator.base.run_command import CommandError, run_command
from coordinator.cluster import (
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
from coordinator.cluster.job_environment import INDEX, passed_on
from coordinator.cluster.sbatch_text import log_file
from evaljobs.contract.storage import make_file, make_folder
from evaljobs.staging.capacity import memory_available

log = logging.getLogger(__name__)

NODE = "local"
MIB = 1 << 20
KILL_SECONDS = 15.0  # between SIGTERM and SIGKILL
KEEP_SECONDS = 86_400.0  # jobs of an earlier coordinator are listed this long
SIDE_JOBS_A_CPU = 4  # jobs without GPUs mostly wait for one another; the bound is for arrays of hundreds
LEAST_SIDE_JOBS = 16
SIGNALLED = 128  # exit codes above it name a signal


def gpu_names() -> list[str]:
    """This machine's NVIDIA GPUs as "index, name", by `nvidia-smi`; none where there is no such command.

    A GPU that is cut into slices (MIG) is listed by those: "MIG-uuid, name". Only those that
    CUDA_VISIBLE_DEVICES names, where it is set.
    """
    return list(_gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES")))


@functools.cache
def _gpu_names(visible: str | None) -> tuple[str, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    try:
        return parse_gpus(run_command(["nvidia-smi", "-L"], seconds=20), visible)
    except CommandError:
        return ()


def parse_gpus(text: str, visible: str | None) -> tuple[str, ...]:
    """GPUs, or their slices, from `nvidia-smi -L`. `visible`: CUDA_VISIBLE_DEVICES, or None."""
    allowed = None if visible is None else {word.strip() for word in visible.split(",")}
    found: list[tuple[str, str, list[str]]] = []  # of each GPU: its names, what it is called, its slices
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


@dataclass(slots=True, kw_only=True)
class _Member:
    """One process of a job. Times in unix seconds, `since` in monotonic seconds."""

    index: int
    phase: JobPhase = "pending"
    state: str = "PENDING"
    reason: str = ""
    guardian: subprocess.Popen[bytes] | None = None
    since: float = 0.0
    slots: tuple[int, ...] = ()
    stop: str = ""  # the state it will end with, once SIGTERM was sent
    started_at: float | None = None


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A submitted job; `job` is None where an earlier coordinator submitted it."""

    job: Job | None
    name: str
    job_id: str
    submitted_at: float
    members: list[_Member] = field(default_factory=list)


class LocalCluster:
    """The Cluster protocol on this machine. One coordinator at a time uses `state_dir`.

    `slots`: jobs with one GPU that run at once. `gpus`: as `gpu_names` gives them; [] for CPU
    slots. `kill_seconds`: between SIGTERM and SIGKILL. `export`: of the settings. `secrets`: as of `SlurmOptions`.
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
        self._entries: dict[str, _Entry] = {}
        self._live: dict[tuple[str, int], tuple[_Entry, _Member]] = {}  # in the order of submission
        self._alive: int | None = None  # read end of the guardians' pipe, once in charge
        self._alone = False  # no guardian of an earlier coordinator is left

    # --- the protocol ------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> str:
        self.check(job)
        with self._lock, self._disk():
            self._take_charge()
            job_id = str(max((int(i) for i in self._entries), default=0) + 1)
            entry = _Entry(job=job, name=job.name, job_id=job_id, submitted_at=time.time())
            entry.members = [_Member(index=i) for i in range(job.count)]
            self._record(entry)
            self._entries[job_id] = entry
            self._live |= {(job_id, member.index): (entry, member) for member in entry.members}
            self._advance()
            return job_id

    def jobs(self) -> list[JobState]:
        with self._lock, self._disk():
            self._take_charge()
            self._advance()
            return [_state(entry, member) for entry in self._entries.values() for member in entry.members]

    def nodes(self) -> list[NodeState]:
        """The one node. A command beside the daemon may call this too: it starts and ends no job."""
        with self._lock:
            if self._alive is not None:
                self._advance()
            running = [entry.job for entry, member in self._live.values() if member.phase == "running"]
            return [
                NodeState(
                    name=NODE,
                    usable=True,
                    state="UP",
                    gpus=self.slots,
                    gpus_free=len(self._free_slots()),
                    cpus=self.cpus,
                    cpus_free=max(0, self.cpus - sum(job.cpus for job in running if job is not None)),
                    memory_mb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB,
                    memory_free_mb=(memory_available() or 0) // MIB,
                    gpu_type=self.gpus[0].partition(", ")[2] if self.gpus else CPU_SLOT,
                    counts_memory=False,
                )
            ]

    def cancel(self, job_ids: Sequence[str]) -> None:
        """SIGTERM now; the guardian sends SIGKILL after `kill_seconds`."""
        with self._lock, self._disk():
            self._take_charge()
            for target in job_ids:
                job_id, _, index = target.partition("_")
                for entry, member in list(self._live.values()):
                    if entry.job_id == job_id and index in ("", str(member.index)):
                        self._stop(entry, member, "CANCELLED")
            self._advance()

    def check(self, job: Job) -> None:
        if job.gpus > self.slots:
            raise RefusedError(
                f"a job of {job.gpus} slots does not fit this machine's {self.slots}: lower gpus_per_trial"
            )
        if job.node not in (None, NODE):
            raise RefusedError(f"the local cluster has one node, {NODE!r}, and none named {job.node!r}")

    def close(self) -> None:
        """End all jobs, as the end of this process would: their guardians do it, within 10 s."""
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
        for line in self._earlier():
            entry = _Entry(
                job=None, name=line["name"], job_id=line["job_id"], submitted_at=line["submitted_at"]
            )
            for index in range(line["count"]):
                member = _Member(index=index, phase="running", state="RUNNING", stop=COORDINATOR_ENDED)
                entry.members.append(member)
                self._live[entry.job_id, index] = (entry, member)
            self._entries[entry.job_id] = entry
        self._alive, self._alive_end = os.pipe()

    def _earlier(self) -> list[dict[str, Any]]:
        """Lines of `jobs.jsonl` of the last day, without a torn one, whose job never ran."""
        path = self._folder / "jobs.jsonl"
        found: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError):
            for text in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    found.append(json.loads(text))
        return [line for line in found if line["submitted_at"] > time.time() - KEEP_SECONDS]

    def _record(self, entry: _Entry) -> None:
        line = {"job_id": entry.job_id, "name": entry.name, "count": len(entry.members)}
        with os.fdopen(make_file(self._folder / "jobs.jsonl"), "a") as file:
            file.write(json.dumps({**line, "submitted_at": entry.submitted_at}) + "\n")

    def _earlier_are_gone(self) -> bool:
        """Has the last guardian of an earlier coordinator ended? Every guardian that lives has a lock on one file."""
        if not self._alone:
            with self._lock_file() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            self._alone = True
            for entry, member in list(self._live.values()):
                if entry.job is None:
                    self._end(entry, member, None)
        return True

    def _lock_file(self) -> IO[bytes]:
        return os.fdopen(make_file(self._folder / "guardians.lock"), "ab")

    # --- starting and ending jobs ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        if not self._earlier_are_gone():
            return
        for entry, member in list(self._live.values()):
            if member.guardian is None or entry.job is None:
                continue
            code = member.guardian.poll()
            if code is not None:
                self._end(entry, member, code)
            elif time.monotonic() - member.since > entry.job.time_limit_seconds:
                self._stop(entry, member, "TIMEOUT")
        self._start_waiting()

    def _start_waiting(self) -> None:
        running = [entry.job for entry, m in self._live.values() if m.phase == "running"]
        side = sum(job is not None and not job.gpus for job in running)
        overtaking = False
        for entry, member in list(self._live.values()):
            if member.phase != "pending" or entry.job is None:
                continue
            if entry.job.gpus:
                free = self._free_slots()
                overtaking = overtaking or len(free) < entry.job.gpus
                if not overtaking:
                    self._start(entry.job, entry, member, free[: entry.job.gpus])
            elif side < max(LEAST_SIDE_JOBS, SIDE_JOBS_A_CPU * self.cpus):
                side += 1
                self._start(entry.job, entry, member, [])

    def _free_slots(self) -> list[int]:
        taken = {s for _, member in self._live.values() if member.phase == "running" for s in member.slots}
        return [s for s in range(self.slots) if s not in taken]

    def _start(self, job: Job, entry: _Entry, member: _Member, slots: Sequence[int]) -> None:
        guardian = (sys.executable, "-I", "-S", local_guardian.__file__, str(self.kill_seconds))
        try:
            path = Path(log_file(job, member.index))
            make_folder(path.parent)
            with os.fdopen(make_file(path), "ab") as out, self._lock_file() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
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
            member.reason = f"cannot start yet: {error}"
            log.warning("job %s (%s) %s", entry.job_id, entry.name, member.reason)
            return
        member.phase, member.state, member.reason = "running", "RUNNING", ""
        member.slots, member.started_at, member.since = tuple(slots), time.time(), time.monotonic()

    def _environment(self, job: Job, member: _Member, slots: Sequence[int]) -> dict[str, str]:
        own = {INDEX: str(member.index)}
        if self.gpus:  # a job without a slot must see no GPU
            own["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi's order
            own["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[s].partition(",")[0] for s in slots)
        passed = passed_on(os.environ, export=self.export, secrets=self.secrets, given=job.secrets)
        return {**passed, **job.env, **own}

    def _stop(self, entry: _Entry, member: _Member, why: str) -> None:
        """End a member: at once where it waits, by SIGTERM where it runs."""
        if member.stop:
            return
        member.stop = why
        if member.guardian is None:
            self._end(entry, member, None)
        else:
            member.guardian.terminate()

    def _end(self, entry: _Entry, member: _Member, code: int | None) -> None:
        """Record a member's end. `code`: the guardian's; None: this coordinator started none."""
        member.state = member.stop or ("COMPLETED" if code == 0 else "FAILED")
        if code:
            number = code - SIGNALLED if code > SIGNALLED else -code
            member.reason = f"signal {number}" if number > 0 else f"exit code {code}"
        member.phase, member.guardian = "ended", None
        self._live.pop((entry.job_id, member.index), None)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ClusterError(f"{self._folder} cannot be read or written: {error}") from error


def _state(entry: _Entry, member: _Member) -> JobState:
    return JobState(
        job_id=entry.job_id,
        name=entry.name,
        index=member.index,
        phase=member.phase,
        state=member.state,
        node=NODE if member.started_at is not None else None,
        reason=member.reason,
        submitted_at=entry.submitted_at,
        started_at=member.started_at,
        ends_at=_ends_at(entry, member),
    )


def _ends_at(entry: _Entry, member: _Member) -> float | None:
    if entry.job is None or member.started_at is None or member.phase != "running":
        return None
    return member.started_at + entry.job.time_limit_seconds
