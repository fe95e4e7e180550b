"""Exports ended evaluations to the trackers of the settings, in a process apart from the daemon's loop.

Rule: an evaluation is left to export where `trackers.json` does not note these very results. So the
next export makes up for one that was killed, failed or never began. The note is written as a
failure before the export and corrected after it, so a tracker that kills its process shows as a
failure. Each export writes the whole run (a training and a suite); the adapters skip points already
there. A tracker package cannot harm the daemon's loop. Called by the daemon, `eval` and `export
--left`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from coordinator.base.aside import Aside
from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.report.learning_curves import Point, make_series
from coordinator.report.load_series import point_of, records
from coordinator.trackers import TRACKERS, export_points, runs_of
from evaljobs import log_lines
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import make_file, make_folder, write_atomic
from evaljobs.secret_values import scrubbed

log = logging.getLogger(__name__)

# File WORK_DIR/trackers/export.log: output of exports | the coordinator | stays
# File WORK_DIR/trackers/wandb/…: offline runs of W&B | the coordinator | by hand, once they are sent
FOLDER = "trackers"  # below the work folder: the exports' log and lock, W&B's offline runs
# File WORK_DIR/ID/trackers.json: which trackers have the scores, or why not | the coordinator | kept
NOTE = "trackers.json"  # in an evaluation's folder
LIMIT_SECONDS = (
    600  # seconds after which an export is ended; a server that does not answer can hold one without end
)
CUT_SHORT = "the export ended before it was done"


class Target(Record):
    """One tracker that the settings name."""

    tracker: str  # a key of TRACKERS
    out: str
    project: str
    env: dict[str, str] = Field(default_factory=dict)


class Job(Record):
    """Input of the process, on its standard input since an address may hold a password."""

    work_dir: str
    targets: tuple[Target, ...]
    gpu_hour_price: float | None = None


class Exported(Record):
    """What a tracker has of an evaluation: results of this age (mtime in ns), or why it has none."""

    results: int
    error: str | None = None


class Note(Record):
    """`trackers.json`: tracker -> its export."""

    schema_version: int = 1
    trackers: dict[str, Exported] = Field(default_factory=dict)


def job_of(config: Config) -> Job:
    """The exports that the settings ask for; no targets where they name no tracker."""
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
    """The note of an evaluation; empty where the file is missing or damaged."""
    try:
        return Note.model_validate_json((paths.root / NOTE).read_bytes())
    except (OSError, ValidationError):
        return Note()


def failures(paths: EvaluationPaths) -> dict[str, str]:
    """Tracker -> why it does not have this evaluation."""
    return {
        name: export.error for name, export in read_note(paths).trackers.items() if export.error is not None
    }


def export_left(job: Job) -> list[str]:
    """Export to each target what it lacks; an error line for each run that failed."""
    work = Path(job.work_dir)
    folder = work / FOLDER
    make_folder(folder)
    with os.fdopen(make_file(folder / "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the export of a killed daemon may still run
        ages = {
            f.parent.name: _age(f) for f in work.glob("*/results.json")
        }  # read before the results themselves
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
            _write_note(work, target, evaluation_id, ages[evaluation_id], CUT_SHORT)
        error = _try(target, group)
        for evaluation_id in left:
            _write_note(work, target, evaluation_id, ages[evaluation_id], error)
        if error is not None:
            errors.append(f"{target.tracker}: {run}: {error}")
    return errors


def _try(target: Target, group: Sequence[Point]) -> str | None:
    """Export a group; None, or the error. A tracker's package may raise anything, also SystemExit."""
    try:
        Path(target.out).mkdir(parents=True, exist_ok=True)
        export_points(TRACKERS[target.tracker], group, Path(target.out), project=target.project)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        lines = scrubbed(str(error), os.environ).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}" if not isinstance(error, OperatorError) else lines[0]
    return None


def _age(results: Path) -> int:
    """Later mtime, in ns, of results and report, which is rewritten after the last job's end."""
    report = EvaluationPaths(results.parent).report
    return max(f.stat().st_mtime_ns for f in (results, report) if f.exists())


def _has(work: Path, evaluation_id: str, tracker: str, age: int) -> bool:
    export = read_note(EvaluationPaths(work / evaluation_id)).trackers.get(tracker)
    return export is not None and export.error is None and export.results == age


def _write_note(work: Path, target: Target, evaluation_id: str, age: int, error: str | None) -> None:
    paths = EvaluationPaths(work / evaluation_id)
    export = Exported(results=age, error=error)
    note = Note(trackers={**read_note(paths).trackers, target.tracker: export})
    write_atomic(paths.root / NOTE, note.model_dump_json(indent=1).encode())


class Exporter:
    """Starts export processes for the daemon, one at a time, and does not wait for them."""

    def __init__(self, config: Config) -> None:
        self.job = job_of(config)
        self._process = Aside("coordinator.trackers.live", config.work_dir / FOLDER / "export.log")
        self._asked = bool(self.job.targets)  # true at the start: an earlier daemon may have left exports

    def ask(self) -> None:
        """Request an export, since an evaluation has ended."""
        self._asked = bool(self.job.targets)

    @property
    def busy(self) -> bool:
        return self._asked or self._process.running

    def finish(self, seconds: float) -> None:
        """Start an export and wait at most `seconds`; the process goes on after that."""
        self.tick()
        if self._process.running:
            self._process.wait(seconds)
            self.tick()

    def tick(self) -> None:
        """Check the process; start another where an evaluation has ended since. Never raises."""
        if self._process.ended():
            log.warning("not everything is in the trackers: `evalspan status`, %s", self._process.log)
        if self._asked and not self._process.running:
            self._asked = False
            try:
                self._process.begin(self.job.model_dump_json().encode())
            except OSError as error:  # no memory, no process, a full disk
                log.warning("trackers: %s; tried again when the next evaluation ends", error)


def main() -> int:
    """The export process: 0 where every tracker has everything, else 1."""
    signal.alarm(LIMIT_SECONDS)
    log_lines.begin("%(levelname)s:%(name)s:%(message)s", level=logging.WARNING)
    errors = export_left(Job.model_validate_json(sys.stdin.buffer.read()))
    for error in errors:
        print(time.strftime("%Y-%m-%dT%H:%M:%S"), error, flush=True)  # noqa: T201 (its output is the log)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
