"""One machine as a cluster: subprocesses on N slots. A slot is a GPU where there are GPUs, else a share of the CPU.

Rule: how far a job got is in files written once (local_files), so a coordinator that was killed at any moment finds its
jobs again: those that wait, those that run, those that ended meanwhile (of these last the exit code is not known:
"EXITED"). GPU jobs start in the order of their submission, and none overtakes. Nothing here waits: jobs move when the
coordinator looks.
It does not know: what the jobs do. A state folder belongs to one coordinator at a time, on one machine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from coordinator import processes
from coordinator.cluster import ClusterError, Job, JobState, NodeState, RefusedError
from coordinator.cluster import local_process as process
from coordinator.cluster.local_files import Entry, LocalFiles, Member, Stop
from coordinator.cluster.script import INDEX, log_file
from coordinator.processes import Process

log = logging.getLogger(__name__)

NODE = "local"
KILL_SECONDS = 15.0  # between SIGTERM and SIGKILL
SIDE_JOBS_A_CPU = (
    4  # jobs without GPUs wait for one another mostly; the bound is there for arrays of hundreds
)
LEAST_SIDE_JOBS = 16


def gpu_names() -> list[str]:
    """This machine's NVIDIA GPUs as "index, name", by `nvidia-smi`; none where there is no such command.

    Of those, only the ones that CUDA_VISIBLE_DEVICES leaves us.
    """
    return list(_gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES")))


@functools.cache
def _gpu_names(visible: str | None) -> tuple[str, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(done.stdout, visible) if done.returncode == 0 else ()


def parse_gpus(text: str, visible: str | None) -> tuple[str, ...]:
    """Of each line "index, uuid, name" that `visible` (CUDA_VISIBLE_DEVICES; None: all) names: "index, name"."""
    rows = [line.split(", ", 2) for line in text.splitlines() if line.count(", ") >= 2]
    allowed = None if visible is None else {word.strip() for word in visible.split(",")}
    return tuple(
        f"{index}, {name}" for index, uuid, name in rows if allowed is None or {index, uuid} & allowed
    )


class LocalCluster:
    """The Cluster protocol on this machine. `state_dir` belongs to one work folder.

    `slots`: jobs with one GPU that run at once. `gpus`: as `gpu_names` gives them; [] for CPU slots.
    `kill_seconds`: between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        slots: int | None = None,
        gpus: Sequence[str] | None = None,
        kill_seconds: float = KILL_SECONDS,
    ) -> None:
        self.gpus = list(gpu_names() if gpus is None else gpus)
        self.cpus = len(os.sched_getaffinity(0))
        self.slots = slots or len(self.gpus) or self.cpus
        if self.gpus and self.slots > len(self.gpus):
            raise RefusedError(f"{self.slots} slots are more than this machine's {len(self.gpus)} GPUs")
        self.kill_seconds = kill_seconds
        self._files = LocalFiles(state_dir.absolute())
        self._lock = threading.RLock()
        self._in_charge = False
        self._entries: dict[str, Entry] = {}
        self._live: dict[tuple[str, int], tuple[Entry, Member]] = {}  # in the order of submission
        with self._disk():
            self._files.folder.mkdir(parents=True, exist_ok=True)
            self._learn()

    # --- the protocol ------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> str:
        self.check(job)
        with self._lock:
            self._take_charge()
            with self._disk():
                entry = self._files.create(job, after=max((int(i) for i in self._entries), default=0))
            self._know(entry)
            self._advance()
            return entry.job_id

    def jobs(self) -> list[JobState]:
        with self._lock:
            self._take_charge()
            self._advance()
            return [_state(entry, member) for entry in self._entries.values() for member in entry.members]

    def nodes(self) -> list[NodeState]:
        """Whoever asks nothing else may not be in charge: a command beside the daemon moves no job."""
        with self._lock:
            if self._in_charge:
                self._advance()
            memory = _memory_mb()
            busy = sum(entry.job.cpus for entry, member in self._live.values() if member.phase == "running")
            return [
                NodeState(
                    name=NODE,
                    usable=True,
                    state="UP",
                    gpus=self.slots,
                    gpus_free=len(self._free_slots()),
                    cpus=self.cpus,
                    cpus_free=max(0, self.cpus - busy),
                    memory_mb=memory["MemTotal"],
                    memory_free_mb=memory["MemAvailable"],
                    gpu_type=self.gpus[0].partition(", ")[2] if self.gpus else "cpu-slot",
                    counts_memory=False,
                )
            ]

    def cancel(self, job_ids: Sequence[str]) -> None:
        """SIGTERM now; SIGKILL when the coordinator looks again after `kill_seconds`."""
        with self._lock:
            self._take_charge()
            for target in job_ids:
                job_id, _, index = target.partition("_")
                for entry, member in list(self._live.values()):
                    if entry.job_id == job_id and index in ("", str(member.index)):
                        with self._disk():
                            self._tell(entry, member, "CANCELLED")
            self._advance()

    def check(self, job: Job) -> None:
        if job.gpus > self.slots:
            raise RefusedError(
                f"a job of {job.gpus} slots does not fit this machine's {self.slots}: lower gpus_per_trial"
            )
        if job.node not in (None, NODE):
            raise RefusedError(f"the local cluster has one node, {NODE!r}, and none named {job.node!r}")

    # --- who moves the jobs ------------------------------------------------------------------------------------------

    def _take_charge(self) -> None:
        """What whoever was in charge until now has submitted since we first looked (`daemon --wait`) is on record, too."""
        if not self._in_charge:
            with self._disk():
                self._learn()
            self._in_charge = True

    def _learn(self) -> None:
        for entry in self._files.load():
            if entry.job_id not in self._entries:
                self._know(entry)

    def _know(self, entry: Entry) -> None:
        self._entries[entry.job_id] = entry
        for member in entry.members:
            if member.phase != "ended":
                self._live[entry.job_id, member.index] = (entry, member)

    # --- what moves the jobs -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        for entry, member in list(self._live.values()):
            if member.phase == "running":
                self._look_after(entry, member)
        self._start_waiting()

    def _start_waiting(self) -> None:
        side = sum(not entry.job.gpus for entry, m in self._live.values() if m.phase == "running")
        overtaking = False
        for entry, member in list(self._live.values()):
            if member.phase != "pending" or self._files.adopt(entry, member):
                continue
            if member.stop is not None:
                self._end(entry, member, None)
            elif entry.job.gpus:
                free = self._free_slots()
                overtaking = overtaking or len(free) < entry.job.gpus
                if not overtaking:
                    self._start(entry, member, free[: entry.job.gpus])
            elif side < max(LEAST_SIDE_JOBS, SIDE_JOBS_A_CPU * self.cpus):
                side += 1
                self._start(entry, member, [])

    def _free_slots(self) -> list[int]:
        taken = {s for _, member in self._live.values() if member.phase == "running" for s in member.slots}
        return [s for s in range(self.slots) if s not in taken]

    def _start(self, entry: Entry, member: Member, slots: Sequence[int]) -> None:
        try:
            member.child = process.start(
                entry.job.argv,
                claim=self._files.path(entry, member, "run"),
                note=",".join(map(str, slots)),
                log=Path(log_file(entry.job, member.index)),
                env=self._environment(entry, member, slots),
            )
        except (OSError, ValueError) as error:
            member.reason = f"cannot start yet: {error}"
            log.warning("job %s (%s) %s", entry.job_id, entry.job.name, member.reason)
            return
        member.phase, member.state, member.reason = "running", "RUNNING", ""
        member.slots, member.started_at = tuple(slots), time.time()

    def _environment(self, entry: Entry, member: Member, slots: Sequence[int]) -> dict[str, str]:
        own = {INDEX: str(member.index), process.MARK: self._files.mark(entry, member)}
        if self.gpus:  # a job without a slot shall find no GPU
            own["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi's order
            own["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[s].partition(",")[0] for s in slots)
        return {**os.environ, **entry.job.env, **own}

    def _look_after(self, entry: Entry, member: Member) -> None:
        """Has it ended? Is its time up? Was it told to end, long ago?"""
        child = member.child
        # Looked at before the claim: of a child that gave way, the claim that it met is there by then.
        over = child is not None and process.has_exited(child)
        if member.process is None:
            self._files.adopt(entry, member)
        leader = member.process
        if child is not None and leader is not None and leader.pid != child.pid:
            # Another start of this member was first and ours gave way: it is reaped, the other is the job.
            if child.poll() is not None:
                member.child = None
            return
        mark = self._files.mark(entry, member)
        if child is not None and over:
            process.kill_all(mark, session=child.pid)
            self._end(entry, member, child.wait())
        elif child is None and leader is not None and not processes.alive(leader):
            process.kill_all(mark)
            self._end(entry, member, None)
        elif leader is not None:
            self._insist(entry, member, leader)

    def _insist(self, entry: Entry, member: Member, leader: Process) -> None:
        if member.stop is None and leader.age_seconds > entry.job.time_limit_seconds:
            with contextlib.suppress(OSError):  # a full disk: the next look tries again
                self._tell(entry, member, "TIMEOUT")
        stop = member.stop
        if stop is not None and processes.uptime() - stop.at > self.kill_seconds:
            process.kill_all(self._files.mark(entry, member), session=leader.pid)

    def _tell(self, entry: Entry, member: Member, why: str) -> None:
        """Put on record that it shall end, then end it: at once where it waits, by SIGTERM where it runs.

        OSError where it cannot be put on record.
        """
        if member.stop is not None:
            return
        stop = Stop(why=why, boot=processes.boot_id(), at=processes.uptime())
        self._files.write_stop(entry, member, stop)
        member.stop = stop
        # Who claims after this look sees the order to stop; who claimed before is seen here.
        claimed = member.process is not None or self._files.adopt(entry, member)
        if member.phase == "pending" and not claimed:
            self._end(entry, member, None)
            return
        # Where our start was not the first, the child and the process that claimed are two.
        if member.process is not None and processes.alive(member.process):
            process.tell(member.process.pid)
        if member.child is not None and not process.has_exited(member.child):
            process.tell(member.child.pid)

    def _end(self, entry: Entry, member: Member, code: int | None) -> None:
        """`code`: of the process where we are its parent; negative for a signal."""
        if member.stop is not None:
            member.state = member.stop.why
        elif code is not None:
            member.state = "COMPLETED" if code == 0 else "FAILED"
        elif member.process is not None and member.process.boot != processes.boot_id():
            member.state, member.reason = "NODE_FAIL", "the machine was restarted"
        else:
            member.state = "EXITED"
        if code:
            member.reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        member.phase, member.child, member.ended_at = "ended", None, time.time()
        self._live.pop((entry.job_id, member.index), None)
        try:
            self._files.write_end(entry, member)
        except OSError as error:  # a successor finds its process gone instead
            log.warning("the end of job %s cannot be put on record: %s", entry.job_id, error)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ClusterError(f"{self._files.folder} cannot be read or written: {error}") from error


def _state(entry: Entry, member: Member) -> JobState:
    return JobState(
        job_id=entry.job_id,
        name=entry.job.name,
        index=member.index,
        phase=member.phase,
        state=member.state,
        node=NODE if member.started_at is not None else None,
        reason=member.reason,
        submitted_at=entry.submitted_at,
        started_at=member.started_at,
    )


def _memory_mb() -> dict[str, int]:
    """MemTotal and MemAvailable of this machine in MiB."""
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            values[name] = int(rest.split()[0]) // 1024
    return values
