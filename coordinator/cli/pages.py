"""Writes pages and traces: `report --html | --trace`, `report --series --html`, `compare --html`. Reads folders; changes none."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.base.version import version_text
from coordinator.cli.app import say
from coordinator.errors import OperatorError
from coordinator.page import evaluation, html, samples, training
from coordinator.page.trace import trace
from evaljobs.contract.paths import EvaluationPaths, slug
from evaljobs.contract.storage import write_atomic

if TYPE_CHECKING:
    from coordinator.config.schema import Config
    from coordinator.report.learning_curves import Point

MOST_LOGS = 12  # logs of failed jobs whose last lines a page holds
LAST_LINES = 30
LAST_BYTES = 20_000  # of a log, that are read


def of_evaluation(settings: Config, name: str, file: Path) -> None:
    """One evaluation's page, also while it runs."""
    data, paths, results = _evaluation(settings, name)
    files = dict(_sample_files(paths, results))
    data["logs"] = _logs(paths, data["notes"])
    index, blocks = samples.blocks_of({task: _lines(file) for task, file in files.items()})
    _write(file, data["about"]["id"], {**data, "samples": index}, blocks)


def trace_of(settings: Config, name: str, file: Path) -> None:
    """One evaluation's spans in Chrome's trace format."""
    _save(file, json.dumps(trace(_evaluation(settings, name)[0]), allow_nan=False))
    say(f"wrote {file}: open it in https://ui.perfetto.dev or chrome://tracing", err=True)


def of_trainings(points: Sequence[Point], price: float | None, file: Path) -> None:
    data = training.training_data(points, price)
    _write(file, ", ".join(dict.fromkeys(t["name"] for t in data["trainings"])), data)


def of_comparison(
    evaluations: Sequence[EvaluationPaths],
    heads: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    file: Path,
) -> None:
    """Scores of all evaluations; samples of the first and the last."""
    pair = (evaluations[0], evaluations[-1])
    found = [dict(_sample_files(paths, json.loads(paths.results.read_bytes()))) for paths in pair]
    share = samples.MOST_BYTES // 2
    packed = [samples.blocks_of({t: _lines(f) for t, f in files.items()}, share) for files in found]
    indexes = [{row["task"]: row for row in index} for index, _ in packed]
    both = [task for task in indexes[0] if task in indexes[1]]
    data = {
        **training.comparison_data(heads, [paths.root.name for paths in evaluations], rows),
        "samples": [
            {
                **indexes[1][task],
                "blocks": [
                    f"{side}-{index[task]['block']}" for side, index in zip("ab", indexes, strict=True)
                ],
            }
            for task in both
        ],
    }
    blocks = {
        f"{side}-{name}": content
        for side, (_, each) in zip("ab", packed, strict=True)
        for name, content in each.items()
    }
    _write(file, " and ".join(heads), data, blocks)


def _evaluation(settings: Config, name: str) -> tuple[dict[str, Any], EvaluationPaths, dict[str, Any]]:
    from coordinator.runtime.finalize import results_of
    from coordinator.runtime.replay import find_evaluation

    state, paths, events = find_evaluation(settings, name)
    # at its end the times were written down: the responses that they came from may be gone since
    found = results_of(state, paths, events if state.ended_at is None else None)
    return (
        evaluation.evaluation_data(found.report, events, found.raw, settings.gpu_hour_price),
        paths,
        found.raw,
    )


def _sample_files(paths: EvaluationPaths, results: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    for task in results.get("n-samples", {}):
        for file in sorted(paths.samples.glob(f"samples_{slug(task)}_[0-9][0-9][0-9].jsonl"))[:1]:
            yield task, file


def _lines(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        yield from lines


def _logs(paths: EvaluationPaths, notes: Sequence[Sequence[Any]]) -> list[list[str]]:
    """(job, the last lines of its log) of jobs that ended badly."""
    found: list[list[str]] = []
    for job in dict.fromkeys(about for _, about, _, bad in notes if bad):
        for name in (job, job.removesuffix(".0")):
            file = paths.log(name)
            if file.exists() and len(found) < MOST_LOGS:
                text = file.read_bytes()[-LAST_BYTES:].decode(errors="replace")
                found.append([name, "\n".join(text.splitlines()[-LAST_LINES:])])
                break
    return found


def _write(
    file: Path, title: str, data: Mapping[str, Any], blocks: Mapping[str, bytes] | None = None
) -> None:
    made = {**data, "made_at": time.time(), "version": version_text().removeprefix("evalspan ")}
    text = html.page(title, made, blocks)
    _save(file, text)
    say(f"wrote {file} ({len(text) / 1e6:.1f} MB): open it in a browser", err=True)


def _save(file: Path, text: str) -> None:
    if not file.parent.is_dir():
        raise OperatorError(f"{file}: the folder {file.parent} does not exist")
    try:
        write_atomic(file, text.encode("utf-8", "replace"))
    except OSError as error:
        raise OperatorError(f"{file} cannot be written: {error.strerror or error}") from error
