"""The local cluster's memory: one small file a fact, each written once and whole.

Rule: N.json is a job; N.i.run its member's process, written by that process itself; N.i.stop says that it was told to
end, before the signal is sent; N.i.end how it ended. Nothing is ever changed, so nothing is ever half changed. What
ended a day ago is forgotten at the next start.
It does not know: whether a process is alive, or what to do about it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator import processes
from coordinator.cluster import Job, JobPhase
from coordinator.cluster import local_process as process
from coordinator.processes import Process

KEEP_SECONDS = 86_400.0  # how long an ended job is remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """It was told to end: why, in the state's word, and when, in seconds of that boot's uptime."""

    why: str
    boot: str
    at: float


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of a job, to be, being or been. Times in unix seconds."""

    index: int
    phase: JobPhase = "pending"
    state: str = "PENDING"
    reason: str = ""
    process: Process | None = None
    child: subprocess.Popen[bytes] | None = None  # where we started it ourselves
    slots: tuple[int, ...] = ()
    stop: Stop | None = None
    started_at: float | None = None
    ended_at: float | None = None


@dataclass(slots=True, kw_only=True)
class Entry:
    """A submitted job and its members."""

    job: Job
    job_id: str
    submitted_at: float
    members: list[Member] = field(default_factory=list)


class LocalFiles:
    """All reading and writing of one state folder. Methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, entry: Entry, member: Member, what: str) -> Path:
        return self.folder / f"{entry.job_id}.{member.index}.{what}"

    def mark(self, entry: Entry, member: Member) -> str:
        """What the processes of this member are known by, on this machine."""
        return f"{self.folder}/{entry.job_id}.{member.index}"

    def create(self, job: Job, *, after: int) -> Entry:
        """Put a job on record under the first free number above `after`."""
        fields = {f.name: getattr(job, f.name) for f in dataclasses.fields(job)}
        now = time.time()
        data = {"job": {**fields, "env": dict(job.env)}, "submitted_at": now}
        number = after + 1
        while not _write_once(self.folder / f"{number}.json", data):
            number += 1
        members = [Member(index=i) for i in range(job.count)]
        entry = Entry(job=job, job_id=str(number), submitted_at=now, members=members)
        for member in members:  # of a job by this number that was half forgotten
            self.path(entry, member, "end").unlink(missing_ok=True)
        return entry

    def write_stop(self, entry: Entry, member: Member, stop: Stop) -> None:
        _write_once(self.path(entry, member, "stop"), dataclasses.asdict(stop))

    def write_end(self, entry: Entry, member: Member) -> None:
        end = {"state": member.state, "reason": member.reason, "at": member.ended_at}
        _write_once(self.path(entry, member, "end"), {**end, "started_at": member.started_at})

    def adopt(self, entry: Entry, member: Member) -> bool:
        """Has a process claimed this member? Then it runs, or ran, whoever started it."""
        claim = process.read_claim(self.path(entry, member, "run"))
        if claim is None:
            return False
        member.process, note = claim
        member.slots = tuple(int(s) for s in note.split(",") if s)
        member.phase, member.state, member.reason = "running", "RUNNING", ""
        if member.started_at is None:
            member.started_at = time.time() - member.process.age_seconds
        return True

    def load(self) -> list[Entry]:
        """All jobs on record, in the order of their submission."""
        numbers = sorted(int(p.stem) for p in self.folder.glob("*.json") if p.stem.isdigit())
        entries = []
        for number in numbers:
            data = _read(self.folder / f"{number}.json")
            if data is None:
                continue
            job = Job(**{**data["job"], "argv": tuple(data["job"]["argv"])})
            entry = Entry(job=job, job_id=str(number), submitted_at=data["submitted_at"])
            entry.members = [self._load_member(entry, index) for index in range(job.count)]
            ends = [member.ended_at for member in entry.members]
            if all(end is not None and end < time.time() - KEEP_SECONDS for end in ends):
                self._forget(entry)
            else:
                entries.append(entry)
        return entries

    def _load_member(self, entry: Entry, index: int) -> Member:
        member = Member(index=index)
        stop, end = (_read(self.path(entry, member, what)) for what in ("stop", "end"))
        if stop is not None:
            told = Stop(**stop)
            # The uptime of an earlier boot says nothing in this one.
            member.stop = told if told.boot == processes.boot_id() else dataclasses.replace(told, at=0.0)
        if end is not None:
            member.phase, member.state, member.reason = "ended", end["state"], end["reason"]
            member.started_at, member.ended_at = end["started_at"], end["at"]
        else:
            self.adopt(entry, member)
        return member

    def _forget(self, entry: Entry) -> None:
        """The job before its end: cut short in the other order, it would be one that has not run yet."""
        for member in entry.members:
            for what in ("run", "stop"):
                self.path(entry, member, what).unlink(missing_ok=True)
        (self.folder / f"{entry.job_id}.json").unlink(missing_ok=True)
        for member in entry.members:
            self.path(entry, member, "end").unlink(missing_ok=True)


def _write_once(path: Path, data: Mapping[str, Any]) -> bool:
    """Write a whole file where there is none; False where there is one already."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        return True
    finally:
        Path(temporary).unlink()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return data
