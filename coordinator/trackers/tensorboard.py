"""Points as a TensorBoard run: `tensorboard --logdir OUT`.

Rule: written with the `tensorboard` package alone (no TensorFlow, no torch). TensorBoard cannot replace a value, so an
export writes a new event file and then removes the ones that earlier exports left in this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordinator.report.series import Point
from coordinator.trackers import need, steps_of, values_of
from evaljobs.paths import slug

SUFFIX = ".evalspan"


def write(points: Sequence[Point], out: Path, run: str, project: str) -> Path:  # noqa: ARG001 (TensorBoard has none)
    """Event file of one run in `out/run`; the run's folder."""
    writers = need("tensorboard.summary.writer.event_file_writer", "tensorboard", "tensorboard")
    events = need("tensorboard.compat.proto.event_pb2", "tensorboard", "tensorboard")
    summaries = need("tensorboard.compat.proto.summary_pb2", "tensorboard", "tensorboard")
    folder = out / slug(run)
    folder.mkdir(parents=True, exist_ok=True)
    before = list(folder.glob(f"*{SUFFIX}"))
    writer = writers.EventFileWriter(str(folder), filename_suffix=f".{len(before)}{SUFFIX}")
    for step, point in steps_of(points):
        rows = [summaries.Summary.Value(tag=tag, simple_value=v) for tag, v in values_of(point).items()]
        ended = point.accepted_at + (point.makespan_seconds or 0.0)
        writer.add_event(events.Event(wall_time=ended, step=step, summary=summaries.Summary(value=rows)))
    writer.close()
    for old in before:
        old.unlink(missing_ok=True)
    return folder
