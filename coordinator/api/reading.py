"""Results of one evaluation, and scores of a training, as values and rows."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from coordinator.intake import work_folder
from coordinator.intake.suites import PathLike
from coordinator.results.report import load_series
from coordinator.results.report.learning_curves import make_series
from coordinator.runtime.finalize import Results, results_in_files, results_of, rows_of
from coordinator.runtime.known_evaluations import find_folder
from coordinator.runtime.replay import find_evaluation
from coordinator.runtime.summary import read_ended_summary
from coordinator.site.config.schema import Config


def results(
    evaluation: str,
    *,
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
) -> Results:
    """Return the results of an evaluation so far. `evaluation`: its id, the beginning of its id, or its digest.

    Raises OperatorError if the name matches none in the work folder, or several.
    """
    return results_now(work_folder.load_settings(config, work_dir, settings, makes=False), evaluation)


def series(
    folder: PathLike,
    suite: str | None = None,
    *,
    mixed: bool = False,
    dense: bool = False,
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[dict[str, Any]]:
    """Return scores of all checkpoints of a training, as flat rows for `pandas.DataFrame`, in training order.

    `folder`: the folder with the checkpoints, or a glob of them. `suite`: only this suite. A row has evaluation_id, suite,
    step, checkpoint, status, task, filter, metric, value, stderr, documents, n_shot, version, higher_is_better,
    makespan_seconds, paused_seconds, gpu_seconds, mode. An evaluation without a score has one row whose score is None.
    `mixed`: exact and fast evaluations together; `dense`: include rows of dense signals, with filter "dense". Raises
    OperatorError if there is no evaluation, or there are both modes.
    """
    known = work_folder.load_settings(config, work_dir, settings, makes=False)
    found = load_series.find_series(known.work_dir, str(folder), suite, mixed=mixed)
    points = make_series(found).shown(dense=dense).points
    return [row for point in points for row in rows_of(point)]


def dataframe(
    found: Results | Sequence[Mapping[str, Any]], library: Literal["pandas", "polars"] | None = None
) -> Any:
    """Return a dataframe with a row per score of `found`: results, or rows of `series`.

    `library`: by default pandas if it is installed, otherwise polars. ImportError says what to install.
    """
    rows = found.rows() if isinstance(found, Results) else list(found)
    for name in (library,) if library else ("pandas", "polars"):
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name).DataFrame(rows)
    raise ImportError(f"dataframes need {library or 'pandas or polars'}: pip install {library or 'pandas'}")


def results_now(settings: Config, evaluation: str) -> Results:
    """Return the results of an evaluation so far: from its files once it has ended, else from its journal."""
    paths = find_folder(settings, evaluation)
    if read_ended_summary(paths) is not None and (found := results_in_files(paths)) is not None:
        return found
    state, paths, events = find_evaluation(settings, paths.root.name)
    return results_of(state, paths, events)
