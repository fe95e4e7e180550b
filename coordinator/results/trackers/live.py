"""Exports ended evaluations to the trackers of the settings, in a process separate from the daemon's loop.

Rule: an evaluation needs an export unless `trackers.json` records these very results. So the next export makes up for one
that was killed, failed or never began. The record is written as a failure before the export and corrected after it, so a
tracker that kills its process shows as a failure. Each export writes the whole run (a training and a suite); the adapters
skip existing points. A tracker package cannot harm the daemon's loop. Called by the daemon, `eval` and `export --left`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from coordinator.base.side_process import SideProcess
from coordinator.errors import OperatorError
from coordinator.results.report.learning_curves import make_series
from coordinator.results.report.load_series import find_series
from coordinator.results.report.scores import Evaluation
from coordinator.results.trackers import TRACKERS, export_points, run_of
from coordinator.site.config.schema import Config
from evaljobs import log_lines
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import find_record, hold_lock, write_atomic
from evaljobs.secret_values import scrub_text

log = logging.getLogger(__name__)

# File WORK_DIR/trackers/export.log: output of exports | the coordinator | stays
# File WORK_DIR/trackers/wandb/…: offline runs of W&B | the coordinator | by hand, once they are sent
FOLDER = "trackers"  # below the work folder: the exports' log and lock, W&B's offline runs
# File WORK_DIR/ID/trackers.json: which trackers have the scores, or why not | the coordinator | kept
NOTE_FILE = "trackers.json"  # in an evaluation's folder
LIMIT_SECONDS = 600  # seconds after which an export is killed, in case a server never answers
SETTINGS = {"work_dir", "trackers", "gpu_hour_price"}  # needed by the process
CUT_SHORT = "the export ended before it was done"


class Target(NamedTuple):
    """One tracker that the settings name. `tracker`: a key of TRACKERS."""

    tracker: str
    out: Path
    project: str
    env: Mapping[str, str]


class Exported(Record):
    """What a tracker has of an evaluation: results of this age (mtime in ns), or why it has none."""

    results: int
    error: str | None = None


class Note(Record):
    """Contents of `trackers.json`: tracker -> its export."""

    schema_version: int = 1
    trackers: dict[str, Exported] = Field(default_factory=dict)


def targets_of(config: Config) -> list[Target]:
    """Return the trackers that the settings name."""
    section, below = config.trackers, config.work_dir / FOLDER
    targets = []
    if section.tensorboard_dir is not None:
        targets.append(Target("tensorboard", section.tensorboard_dir, "", {}))
    if section.wandb_project is not None:
        targets.append(Target("wandb", below, section.wandb_project, {"WANDB_MODE": section.wandb_mode}))
    if section.mlflow_uri is not None:
        env = {"MLFLOW_TRACKING_URI": section.mlflow_uri}
        targets.append(Target("mlflow", below, section.mlflow_experiment, env))
    return targets


def read_note(paths: EvaluationPaths) -> Note:
    """Read the record of an evaluation; empty if the file is missing or damaged."""
    return find_record(paths.root / NOTE_FILE, Note) or Note()


def tracker_failures(paths: EvaluationPaths) -> dict[str, str]:
    """Return tracker -> why it does not have this evaluation."""
    return {
        name: export.error for name, export in read_note(paths).trackers.items() if export.error is not None
    }


def export_left(config: Config) -> list[str]:
    """Export to each target what it lacks, and return an error line for each failed run."""
    work = config.work_dir
    with hold_lock(work / FOLDER / "lock"):  # the export of a killed daemon may still be running
        # read before the results themselves
        ages = {file.parent.name: _age(file) for file in work.glob("*/results.json")}
        every = find_series(work, "*", mixed=True) if ages else []
        found = [p for p in every if p.evaluation_id in ages and p.status != "unreadable"]
        ended = make_series(found, config.gpu_hour_price).points
        runs: dict[str, list[Evaluation]] = {}
        for point in ended:
            runs.setdefault(run_of(point), []).append(point)
        errors = [
            _export(work, target, run, group, ages)
            for target in targets_of(config)
            for run, group in runs.items()
        ]
        return [error for error in errors if error]


def _export(
    work: Path, target: Target, run: str, group: Sequence[Evaluation], ages: Mapping[str, int]
) -> str:
    """Write a run if the tracker lacks one of its evaluations, and return its error, or ""."""
    folders = [EvaluationPaths(work / point.evaluation_id) for point in group]
    left = [
        (paths, ages[paths.root.name])
        for paths in folders
        if read_note(paths).trackers.get(target.tracker) != Exported(results=ages[paths.root.name])
    ]
    if not left:
        return ""
    _write_notes(left, target, CUT_SHORT)
    error = _try(target, group)
    _write_notes(left, target, error)
    return f"{target.tracker}: {run}: {error}" if error else ""


def _try(target: Target, group: Sequence[Evaluation]) -> str | None:
    """Export a group and return None, or the error. A tracker's package may raise anything, even SystemExit."""
    os.environ.update(target.env)
    try:
        target.out.mkdir(parents=True, exist_ok=True)
        export_points(TRACKERS[target.tracker], group, target.out, project=target.project)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        lines = scrub_text(str(error), os.environ).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}" if not isinstance(error, OperatorError) else lines[0]
    return None


def _age(results: Path) -> int:
    """Return the later mtime, in ns, of results and report, which is rewritten after the last job's end."""
    report = EvaluationPaths(results.parent).report
    return max(f.stat().st_mtime_ns for f in (results, report) if f.exists())


def _write_notes(left: Iterable[tuple[EvaluationPaths, int]], target: Target, error: str | None) -> None:
    for paths, age in left:
        export = Exported(results=age, error=error)
        note = Note(trackers={**read_note(paths).trackers, target.tracker: export})
        write_atomic(paths.root / NOTE_FILE, note.model_dump_json(indent=1).encode())


class Exporter:
    """Starts export processes for the daemon, one at a time, and does not wait for them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._wanted = bool(targets_of(config))
        self._process = SideProcess(
            "coordinator.results.trackers.live", config.work_dir / FOLDER / "export.log"
        )
        self._asked = self._wanted  # true at the start: an earlier daemon may have left exports

    def ask(self) -> None:
        """Request an export, since an evaluation has ended."""
        self._asked = self._wanted

    @property
    def busy(self) -> bool:
        return self._asked or self._process.running

    def finish(self, seconds: float) -> None:
        """Start an export and wait at most `seconds`; the process continues after that."""
        self.tick()
        if self._process.running:
            self._process.wait(seconds)
            self.tick()

    def tick(self) -> None:
        """Check the process; start another if an evaluation has ended since. Never raises."""
        if self._process.ended():
            log.warning(
                "some results are missing from the trackers: see `evalspan status` and %s", self._process.log
            )
        if self._asked and not self._process.running:
            self._asked = False
            try:
                # on standard input, since an address may contain a password
                self._process.begin(self._config.model_dump_json(include=SETTINGS).encode())
            except OSError as error:  # no memory, no process, a full disk
                log.warning("trackers: %s; retrying when the next evaluation ends", error)


def main() -> int:
    """Run the export process: 0 if every tracker has everything, otherwise 1."""
    signal.alarm(LIMIT_SECONDS)
    log_lines.begin_logging("%(levelname)s:%(name)s:%(message)s", level=logging.WARNING)
    errors = export_left(Config.model_validate_json(sys.stdin.buffer.read()))
    for error in errors:
        print(time.strftime("%Y-%m-%dT%H:%M:%S"), error, flush=True)  # noqa: T201 (its output is the log)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
