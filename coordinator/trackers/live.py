"""Evaluations that have ended, into the trackers that the settings name, by a process of its own.

Rule: what is left to export is read from the work folder: an evaluation with results, and with no note in
`trackers.json` that a tracker has these very results. So an export that was killed, or failed, or was never begun, is
made up for by the next one. The note is written before the tracker is touched, as a failure, and again when it is done:
a tracker that takes its process down is told of as well. A whole run (a training and a suite) is written each time; the
adapters double nothing.
It does not know: the daemon's loop, and that is the point: nothing that a tracker's package does can reach it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.report.learning_curves import Point, make_series
from coordinator.report.load_series import point_of, records
from coordinator.trackers import TRACKERS, export_points, runs_of
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import write_atomic

log = logging.getLogger(__name__)

FOLDER = "trackers"  # below the work folder: the exports' log and lock, W&B's offline runs
NOTE = "trackers.json"  # in an evaluation's folder
LIMIT_SECONDS = (
    600  # an export that takes longer is ended; a server that does not answer can hold one for ever
)
CUT_SHORT = "the export ended before it was done"


class Target(Record):
    """One tracker that the settings name."""

    tracker: str  # a key of TRACKERS
    out: str
    project: str
    env: dict[str, str] = Field(default_factory=dict)


class Job(Record):
    """What the process is told, on its standard input: an address may hold a password."""

    work_dir: str
    targets: tuple[Target, ...]
    gpu_hour_price: float | None = None


class Told(Record):
    """What a tracker has of an evaluation: the results of this age (ns of their mtime), or why not."""

    results: int
    error: str | None = None


class Note(Record):
    """`trackers.json`: by tracker."""

    schema_version: int = 1
    trackers: dict[str, Told] = Field(default_factory=dict)


def job_of(config: Config) -> Job:
    """What the settings ask for; no targets where they name no tracker."""
    section, below = config.trackers, config.work_dir / FOLDER
    targets = []
    if section.tensorboard_dir is not None:
        targets.append(Target(tracker="tensorboard", out=str(section.tensorboard_dir), project=""))
    if section.wandb_project is not None:
        env: dict[str, str] = {"WANDB_MODE": section.wandb_mode}
        targets.append(Target(tracker="wandb", out=str(below), project=section.wandb_project, env=env))
    if section.mlflow_uri is not None:
        env = {"MLFLOW_TRACKING_URI": section.mlflow_uri}
        targets.append(Target(tracker="mlflow", out=str(below), project=section.mlflow_experiment, env=env))
    return Job(work_dir=str(config.work_dir), targets=tuple(targets), gpu_hour_price=config.gpu_hour_price)


def read_note(paths: EvaluationPaths) -> Note:
    """What is noted of an evaluation; nothing where there is no note or a damaged one."""
    try:
        return Note.model_validate_json((paths.root / NOTE).read_bytes())
    except (OSError, ValidationError):
        return Note()


def failures(paths: EvaluationPaths) -> dict[str, str]:
    """Trackers that do not have this evaluation, with the reason."""
    return {name: told.error for name, told in read_note(paths).trackers.items() if told.error is not None}


def export_left(job: Job) -> list[str]:
    """Write what is left to each target; a line for each run that could not be written."""
    work = Path(job.work_dir)
    folder = work / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a daemon that was killed may still be at it
        ages = {
            f.parent.name: _age(f) for f in work.glob("*/results.json")
        }  # before what they are the age of
        points = [p for p in _points(work, job.gpu_hour_price) if p.evaluation_id in ages]
        return [error for target in job.targets for error in _export(work, target, points, ages)]


def _points(work: Path, price: float | None) -> Sequence[Point]:
    found = []
    for paths, record in records(work, "*", None):
        try:
            found.append(point_of(paths, record))
        except OperatorError as error:
            log.warning("%s", error)
    return make_series(found, price).points


def _export(work: Path, target: Target, points: Iterable[Point], ages: Mapping[str, int]) -> list[str]:
    errors = []
    os.environ.update(target.env)
    for run, group in runs_of(points).items():
        names = [p.evaluation_id for p in group]
        left = [i for i in names if not _has(work, i, target.tracker, ages[i])]
        if not left:
            continue
        for evaluation_id in left:
            _write_note(
                work, evaluation_id, target.tracker, Told(results=ages[evaluation_id], error=CUT_SHORT)
            )
        error = _try(target, group)
        for evaluation_id in left:
            _write_note(work, evaluation_id, target.tracker, Told(results=ages[evaluation_id], error=error))
        if error is not None:
            errors.append(f"{target.tracker}: {run}: {error}")
    return errors


def _try(target: Target, group: Sequence[Point]) -> str | None:
    """None, or what the tracker said. Its packages raise what they like, SystemExit included."""
    try:
        Path(target.out).mkdir(parents=True, exist_ok=True)
        export_points(TRACKERS[target.tracker], group, Path(target.out), project=target.project)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}" if not isinstance(error, OperatorError) else lines[0]
    return None


def _age(results: Path) -> int:
    """Of the results and the report beside them, which is written once more when the last job has gone."""
    report = EvaluationPaths(results.parent).report
    return max(f.stat().st_mtime_ns for f in (results, report) if f.exists())


def _has(work: Path, evaluation_id: str, tracker: str, age: int) -> bool:
    told = read_note(EvaluationPaths(work / evaluation_id)).trackers.get(tracker)
    return told is not None and told.error is None and told.results == age


def _write_note(work: Path, evaluation_id: str, tracker: str, told: Told) -> None:
    paths = EvaluationPaths(work / evaluation_id)
    note = Note(trackers={**read_note(paths).trackers, tracker: told})
    write_atomic(paths.root / NOTE, note.model_dump_json(indent=1).encode())


class Exporter:
    """The daemon's side: one process at a time, begun when something has ended, never waited for."""

    def __init__(self, config: Config) -> None:
        self.job = job_of(config)
        self._folder = config.work_dir / FOLDER
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = bool(self.job.targets)  # at the start: what an earlier daemon left undone

    def ask(self) -> None:
        """An evaluation has ended."""
        self._asked = bool(self.job.targets)

    @property
    def busy(self) -> bool:
        return self._asked or self._process is not None

    def finish(self, seconds: float) -> None:
        """For a command that is about to end: begin, and wait so long at most. The process goes on if need be."""
        self.tick()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            self.tick()

    def tick(self) -> None:
        """Look after the process; begin another where there is something new. Never raises."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            if code != 0:
                log.warning("not everything is in the trackers: `evalspan status`, %s", self._log)
        if self._asked:
            self._asked = False
            try:
                self._begin()
            except OSError as error:  # no memory, no process, a full disk
                log.warning("trackers: %s; tried again when the next evaluation ends", error)

    @property
    def _log(self) -> Path:
        return self._folder / "export.log"

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "coordinator.trackers.live"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C at the daemon is not meant for it
            )
        if self._process.stdin is not None:
            with self._process.stdin as pipe:
                pipe.write(self.job.model_dump_json().encode())


def main() -> int:
    """The process: 0 where every tracker has everything, 1 where one does not."""
    signal.alarm(LIMIT_SECONDS)
    logging.basicConfig(level=logging.WARNING)
    errors = export_left(Job.model_validate_json(sys.stdin.buffer.read()))
    for error in errors:
        print(time.strftime("%Y-%m-%dT%H:%M:%S"), error, flush=True)  # noqa: T201 (its output is the log)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
