"""The picture of where-the-time-goes.md: an evaluation that has ended, from its journal and its report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

from coordinator.page import timeline
from coordinator.report.gpu_use import GpuUse
from coordinator.report.measurements import Report
from coordinator.runtime.journal import read_events
from evaljobs.contract.names import ShardId
from evaljobs.contract.paths import EvaluationPaths
from pictures.svg import EDGE, WIDTH, Picture

LEFT = 122.0  # of the bars
ROW, GAP = 24.0, 6.0
COLOURS = ("blue", "green", "purple", "teal")
CAUSES: Mapping[str, tuple[str, str]] = {
    "infer": ("inference", "blue"),
    "imports": ("imports", "orange"),
    "load": ("load", "orange"),
    "warm": ("first pass", "orange"),
    "dump": ("writing answers", "grey"),
    "wait": ("waiting for a shard", "grey"),
    "other": ("start and exit", "grey"),
}
"""Fields of `GpuUse` -> words and class."""


def seconds_by_cause(gpus: Iterable[GpuUse]) -> dict[str, float]:
    """GPU or slot seconds of all trials, by field of `GpuUse`."""
    return {cause: sum(getattr(gpu, cause) * max(1, gpu.gpus) for gpu in gpus) for cause in CAUSES}


def draw(evaluation: Path) -> str:
    """The picture as SVG text. `evaluation`: the folder of one that has ended."""
    paths = EvaluationPaths(evaluation)
    report = Report.model_validate_json((evaluation / "report.json").read_bytes())
    names = [entry.name for entry in report.entries]
    spans = timeline.spans(read_events(paths.journal), report.accepted_at, names)
    end = report.makespan_seconds or 0.0
    picture = Picture(
        f"One evaluation, {end:.1f} s from its acceptance to the last score",
        f"Suite {report.suite}, {len(names)} tasks, {len(report.gpus)} trials. Request sets are built and weights staged on the CPU; "
        "then the trials import, load and run shard after shard; a CPU worker scores each task as soon as its answers are there. "
        "Below: slot seconds by cause.",
    )
    picture.text(EDGE, 26, f"{report.suite}: {end:.1f} s from “accepted” to the last score", "h")
    shades = dict(zip(names, cycle(COLOURS), strict=False))
    short = {name: name.removeprefix(f"{report.suite}_") for name in names}
    picture.legend(
        EDGE, 48, [*((shades[name], short[name]) for name in names), ("orange", "weights, imports")]
    )
    rows = _Rows(picture, shades, (WIDTH - EDGE - LEFT) / (end * 1.02), 62)
    rows.work("stage weights", [span for span in spans if span.what == "stage"])
    rows.work("build requests", [span for span in spans if span.what == "build"])
    rows.trials(report)
    rows.work("CPU worker", [span for span in spans if span.what in ("execute", "score")])
    y, scale = rows.y, rows.scale
    step = 10 if end < 100 else 60
    for second in range(0, int(end) + 1, step):
        x = LEFT + second * scale
        picture.line(x, y, x, y + 5, "rim")
        picture.text(x, y + 19, f"{second} s", "s soft", anchor="middle")
    return picture.svg(_causes(picture, seconds_by_cause(report.gpus), y + 52))


class _Rows:
    """Rows of bars from the top down. `scale`: units a second; `y`: place of the next row."""

    def __init__(self, picture: Picture, shades: Mapping[str, str], scale: float, y: float) -> None:
        self.picture, self.shades, self.scale, self.y = picture, shades, scale, y

    def work(self, name: str, spans: Sequence[timeline.Span]) -> None:
        """Jobs without a GPU, in as many rows as ran at once."""
        self.picture.text(EDGE, self.y + 16, name, "b")
        first = min((span.row for span in spans), default=0)
        for span in spans:
            self._bar(span.begin, span.seconds, self.shades.get(span.name, "orange"), span.row - first)
        self.y += (max((span.row - first for span in spans), default=0) + 1) * (ROW + GAP)

    def trials(self, report: Report) -> None:
        """A row for each trial: import and load, then its shards in the colours of their tasks."""
        for number, gpu in enumerate(report.gpus, 1):
            self.picture.text(EDGE, self.y + 16, f"trial {number}", "b")
            begin = gpu.started_at - report.accepted_at
            self._bar(begin, gpu.held, "grey")
            self._bar(begin, gpu.imports + gpu.load + gpu.warm, "orange")
            for shard in report.shards:
                if shard.trial == gpu.trial:
                    task = ShardId.parse(shard.shard).task
                    self._bar(
                        shard.started_at - report.accepted_at, shard.seconds, self.shades.get(task, "blue")
                    )
            self.y += ROW + GAP

    def _bar(self, begin: float, seconds: float, cls: str, row: int = 0) -> None:
        width, y = max(seconds * self.scale, 1.5), self.y + row * (ROW + GAP)
        gap = 0.8 if width > 3 else 0.0
        self.picture.rect(LEFT + begin * self.scale, y, width - gap, ROW, cls, corner=2)


def _causes(picture: Picture, seconds: Mapping[str, float], y: float) -> float:
    """One bar of all slot seconds, with its key; the picture's height."""
    total = sum(seconds.values())
    picture.text(EDGE, y, f"The trials' {total:.1f} slot seconds, by cause", "h")
    scale = (WIDTH - 2 * EDGE) / total
    x = float(EDGE)
    for cause, (_, cls) in CAUSES.items():
        width = seconds[cause] * scale
        picture.rect(x, y + 10, max(0.0, width - 1), ROW, cls, corner=2)
        x += width
    for place, (cause, (words, cls)) in enumerate(CAUSES.items()):
        left, top = EDGE + 178 * (place % 3), y + 54 + 20 * (place // 3)
        picture.rect(left, top - 10, 12, 12, cls, corner=2)
        picture.text(left + 17, top, f"{words} {seconds[cause]:.1f} s", "s")
    return y + 54 + 20 * ((len(CAUSES) - 1) // 3) + 16
