"""One machine as a cluster: subprocesses on N slots. A slot is a GPU where there are GPUs, else a share of the CPU.

Rule: what a job is and how far it got is on disk before and after every step, so a coordinator that was killed finds
its jobs again: a member writes its own pid before it becomes our process, and a pid counts only with its start time.
Jobs without GPUs run at once, beside the slots.
It does not know: what the jobs do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.cluster import ClusterError, Job, JobPhase, JobState, NodeState, RefusedError
from coordinator.cluster.script import INDEX
from evaljobs.files import write_atomic

NODE = "local"
KILL_SECONDS = 15.0  # between SIGTERM and SIGKILL
# the child writes its own pid before it becomes the job: no moment at which it runs unknown to us
LAUNCH = 'echo $$ > "$0.tmp" && mv "$0.tmp" "$0" && exec "$@"'


def gpu_names() -> list[str]:
    """This machine's NVIDIA GPUs by index, as `nvidia-smi` lists them; none where there is no such command."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


@dataclass(slots=True, kw_only=True)
class _Member:
    phase: JobPhase = "pending"
    state: str = "PENDING"
    pid: int | None = None
    birth: str = ""  # start time of the pid, in the kernel's ticks
    slots: list[int] = field(default_factory=list)
    started_at: float | None = None
    told_at: float | None = None  # SIGTERM sent


@dataclass(slots=True, kw_only=True)
class _Entry:
    job: Job
    job_id: str
    submitted_at: float
    members: list[_Member]


class LocalCluster:
    """The Cluster protocol on this machine. `state_dir` belongs to one work folder."""

    def __init__(
        self, state_dir: Path, *, slots: int | None = None, gpus: Sequence[str] | None = None
    ) -> None:
        self.state_dir = state_dir
        self.gpus = list(gpu_names() if gpus is None else gpus)
        self.slots = slots or len(self.gpus) or os.cpu_count() or 1
        if self.gpus and self.slots > len(self.gpus):
            raise RefusedError(f"{self.slots} slots are more than this machine's {len(self.gpus)} GPUs")
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._entries: dict[str, _Entry] = {}
        self._load()

    # --- the protocol ------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> str:
        self.check(job)
        job_id = str(max((int(i) for i in self._entries), default=0) + 1)
        entry = _Entry(
            job=job, job_id=job_id, submitted_at=time.time(), members=[_Member() for _ in range(job.count)]
        )
        self._entries[job_id] = entry
        try:
            self._save(entry)
        except OSError as error:
            del self._entries[job_id]
            raise ClusterError(f"{self.state_dir} cannot be written: {error}") from error
        self._advance()
        return job_id

    def jobs(self) -> list[JobState]:
        self._advance()
        return [
            JobState(
                job_id=entry.job_id,
                name=entry.job.name,
                index=index,
                phase=member.phase,
                state=member.state,
                node=NODE if member.started_at is not None else None,
                submitted_at=entry.submitted_at,
                started_at=member.started_at,
            )
            for entry in self._entries.values()
            for index, member in enumerate(entry.members)
        ]

    def nodes(self) -> list[NodeState]:
        self._advance()
        memory = _memory_mb()
        return [
            NodeState(
                name=NODE,
                usable=True,
                state="UP",
                gpus=self.slots,
                gpus_free=len(self._free_slots()),
                cpus=os.cpu_count() or 1,
                cpus_free=os.cpu_count() or 1,
                memory_mb=memory["MemTotal"],
                memory_free_mb=memory["MemAvailable"],
                gpu_type=self.gpus[0].partition(", ")[2] if self.gpus else "cpu-slot",
            )
        ]

    def cancel(self, job_ids: Sequence[str]) -> None:
        for target in job_ids:
            job_id, _, index = target.partition("_")
            entry = self._entries.get(job_id)
            if entry is None:
                continue
            for i, member in enumerate(entry.members):
                if not index or i == int(index):
                    self._end(member)
            self._save(entry)
        self._advance()

    def check(self, job: Job) -> None:
        if job.gpus > self.slots:
            raise RefusedError(
                f"a job of {job.gpus} slots does not fit this machine's {self.slots}: lower gpus_per_trial"
            )
        if job.node not in (None, NODE):
            raise RefusedError(f"the local cluster has one node, {NODE!r}, and none named {job.node!r}")

    # --- what moves the jobs -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        for entry in self._entries.values():
            before = [(m.phase, m.pid) for m in entry.members]
            for index, member in enumerate(entry.members):
                if member.phase == "running":
                    self._look_after(member)
                elif member.phase == "pending":
                    self._start_or_adopt(entry, index, member)
            if before != [(m.phase, m.pid) for m in entry.members]:
                self._save(entry)

    def _free_slots(self) -> list[int]:
        taken = {
            s for e in self._entries.values() for m in e.members if m.phase == "running" for s in m.slots
        }
        return [s for s in range(self.slots) if s not in taken]

    def _start_or_adopt(self, entry: _Entry, index: int, member: _Member) -> None:
        pid_file = self.state_dir / f"{entry.job_id}.{index}.pid"
        if pid_file.exists():  # an earlier coordinator started it and died before it said so
            member.pid = int(pid_file.read_text())
            member.birth = _birth(member.pid)
            member.phase, member.state, member.started_at = "running", "RUNNING", pid_file.stat().st_mtime
            return
        free = self._free_slots()
        if len(free) < entry.job.gpus:
            return
        member.slots = free[: entry.job.gpus]
        log = Path(entry.job.log.replace("%i", str(index)))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            child = subprocess.Popen(
                ["/bin/sh", "-c", LAUNCH, str(pid_file), *entry.job.argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment(entry.job, index, member.slots),
                start_new_session=True,
            )
        self._children[child.pid] = child
        member.pid, member.birth = child.pid, _birth(child.pid)
        member.phase, member.state, member.started_at = "running", "RUNNING", time.time()

    def _environment(self, job: Job, index: int, slots: Sequence[int]) -> dict[str, str]:
        env = {**os.environ, **job.env, INDEX: str(index)}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[s].partition(",")[0] for s in slots)
        return env

    def _look_after(self, member: _Member) -> None:
        """Has it ended? Was it told to, long ago?"""
        assert member.pid is not None
        child = self._children.get(member.pid)
        if child is not None:
            code = child.poll()
            if code is None:
                self._insist(member)
                return
            del self._children[member.pid]
            member.phase = "ended"
            told = member.told_at is not None
            member.state = "COMPLETED" if code == 0 else "CANCELLED" if told else "FAILED"
        elif _birth(member.pid) != member.birth or not member.birth:
            member.phase, member.state = "ended", "COMPLETED" if member.told_at is None else "CANCELLED"
        else:
            self._insist(member)
        if member.phase == "ended":
            _signal_group(member.pid, signal.SIGKILL)  # whatever it left in its session

    def _insist(self, member: _Member) -> None:
        if member.told_at is not None and time.time() - member.told_at > KILL_SECONDS and member.pid:
            _signal_group(member.pid, signal.SIGKILL)

    def _end(self, member: _Member) -> None:
        if member.phase == "pending":
            member.phase, member.state = "ended", "CANCELLED"
        elif member.phase == "running" and member.told_at is None and member.pid is not None:
            member.told_at = time.time()
            if _birth(member.pid) == member.birth:
                _signal_group(member.pid, signal.SIGTERM)

    # --- memory ------------------------------------------------------------------------------------------------------

    def _save(self, entry: _Entry) -> None:
        data = {
            "job": {f: _plain(getattr(entry.job, f)) for f in Job.__dataclass_fields__},
            "job_id": entry.job_id,
            "submitted_at": entry.submitted_at,
            "members": [{f: getattr(m, f) for f in _Member.__dataclass_fields__} for m in entry.members],
        }
        write_atomic(self.state_dir / f"{entry.job_id}.json", json.dumps(data).encode())

    def _load(self) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        for path in sorted(
            self.state_dir.glob("*.json"), key=lambda p: int(p.stem) if p.stem.isdigit() else 0
        ):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                data: dict[str, Any] = json.loads(path.read_text())
                job = Job(**{**data["job"], "argv": tuple(data["job"]["argv"])})
                members = [_Member(**m) for m in data["members"]]
                self._entries[data["job_id"]] = _Entry(
                    job=job, job_id=data["job_id"], submitted_at=data["submitted_at"], members=members
                )


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _birth(pid: int) -> str:
    """Start time of a process in clock ticks since boot, "" where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _memory_mb() -> dict[str, int]:
    """MemTotal and MemAvailable of this machine in MiB."""
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            values[name] = int(rest.split()[0]) // 1024
    return values
