"""Lines below the table of evaluations in `status` and `watch`: checkpoints, nodes, the daemon. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding

from coordinator.base.words import clock_time, format_seconds
from coordinator.intake.pending import PendingCheckpoints
from coordinator.results.report.tables import Parts
from coordinator.runtime.work_lock import DAEMON, is_daemon
from coordinator.site.cluster import JobState
from coordinator.site.cluster.slurm_limits import limit_in_words

MOST_CHECKPOINTS = 5  # paths shown per reason
DAEMON_LOG = Path("evalspan-daemon.log")  # of scripts/evalspan-daemon.sbatch, in the folder of submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """State of a work folder. `holder`: the command that holds it, "" for none; `trouble`: what keeps it from progressing, ""
    for nothing; `since`: unix seconds; `cordoned`: node -> seconds.
    """

    holder: str = ""
    trouble: str = ""
    since: float | None = None
    checkpoints: PendingCheckpoints = field(default_factory=PendingCheckpoints)
    cordoned: Mapping[str, float] = field(default_factory=dict)
    daemon_command: str = "evalspan daemon"  # with the options of this call
    queued: Sequence[JobState] = ()  # pending jobs of the daemon's wrapper, if none holds the folder
    wrapped: str = ""  # command that submits the wrapper; "" without Slurm

    @property
    def daemon(self) -> bool:
        return is_daemon(self.holder)

    def as_json(self) -> dict[str, Any]:
        """Return what `status --json` has besides evaluations."""
        return {
            "daemon": self.daemon,
            "holder": self.holder or None,
            "holder_since": self.since,
            "trouble": self.trouble or None,
            "kept_back_seconds": self.cordoned,
            "waiting": [one.model_dump(mode="json") for one in self.checkpoints.waiting],
            "refused": [one.model_dump(mode="json", exclude={"command"}) for one in self.checkpoints.refused],
        }

    def lines(self, now: float) -> Iterator[RenderableType]:
        yield from show_pending(self.checkpoints, now)
        for node, left in self.cordoned.items():
            again = f"`evalspan release {node} --minutes 0` lifts it"
            said = f"{node} is cordoned for {format_seconds(left)} more ({again})"
            yield Parts(said, style="yellow")
        if self.trouble:
            yield Parts(f"! {self.trouble}", style="yellow")
        yield self.daemon_line(now)

    def daemon_line(self, now: float) -> Parts:
        began = "" if self.since is None else f" since {clock_time(self.since, now)}"
        if self.daemon:
            return Parts(f"daemon: running{began}{self.holder.removeprefix(DAEMON)}", style="green")
        said = f"daemon: not running; {self.holder}, has the work folder{began} and takes no submissions"
        if not self.holder and self.queued:
            said = f"daemon: not running; {'; '.join(_queued(job, now) for job in self.queued)}"
        elif not self.holder:
            how = " or ".join(f"`{line}`" for line in filter(None, (self.wrapped, self.daemon_command)))
            said = f"daemon: not running; to start it: {how}"
            if self.wrapped and DAEMON_LOG.exists():
                said += f"; {DAEMON_LOG} says how its last job ended"
        return Parts(said, style="yellow")


def show_pending(checkpoints: PendingCheckpoints, now: float) -> Iterator[RenderableType]:
    """Yield pending and refused checkpoints, by reason. `now`: unix seconds."""
    waiting: dict[str, list[str]] = {}
    for one in checkpoints.waiting:
        named = f"  {one.evaluation_id}" if one.evaluation_id else ""
        said = f"{one.checkpoint}  suite {_suite(one.suite)}  for {format_seconds(now - one.since)}{named}"
        waiting.setdefault(one.why, []).append(said)
    refused: dict[str, list[str]] = {}
    for bad in reversed(checkpoints.refused):
        said = f"{bad.checkpoint}  suite {_suite(bad.suite)}  at {clock_time(bad.at, now)}"
        refused.setdefault(bad.why, []).append(said)
    yield from _by_reason("waits", "wait", waiting, "yellow")
    yield from _by_reason("was refused", "were refused", refused, "red")


def _by_reason(
    one: str, many: str, found: Mapping[str, Sequence[str]], style: str
) -> Iterator[RenderableType]:
    for why, places in found.items():
        head = f"a checkpoint {one}" if len(places) == 1 else f"{len(places)} checkpoints {many}"
        yield Parts(f"{head}: {why}", style=style)
        for place in places[:MOST_CHECKPOINTS]:
            yield Padding(Parts(place), (0, 0, 0, 4), expand=False)
        if len(places) > MOST_CHECKPOINTS:
            left = len(places) - MOST_CHECKPOINTS
            yield Parts(f"    and {left} more: `evalspan status --json` has all")


def _suite(named: str) -> str:
    """Return a suite's name, or that of its file."""
    return Path(named).stem if "/" in named else named


def _queued(job: JobState, now: float) -> str:
    queued = f"the daemon's job {job.job_id} is queued"
    if job.reason == "PartitionTimeLimit":  # this reason's text is about jobs that evalspan submits
        return (
            f"{queued} (the partition allows less time: {job.reason}); it never starts: `scancel {job.job_id}`, "
            "then `sbatch -t TIME ...` with the time that `sinfo -o '%P %l'` allows"
        )
    starts = "" if job.started_at is None else f"starts {clock_time(job.started_at, now)}"
    why = "; ".join(filter(None, [starts, limit_in_words(job.reason)]))
    return f"{queued}{f' ({why})' if why else ''}"


def show_left_out(count: int, shown: int, typed: str) -> Iterator[Parts]:
    """Yield how many evaluations are not shown, and how to show them. `typed`: `evalspan status` with this call's options."""
    if count:
        said = f"{count} more {'are' if count > 1 else 'is'} not shown: `{typed} --last {shown + count}`"
        yield Parts(said, style="dim")
