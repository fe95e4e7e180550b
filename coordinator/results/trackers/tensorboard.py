"""Scores as a TensorBoard run: `tensorboard --logdir OUT`.

Rule: only uses the `tensorboard` package (no TensorFlow, no torch). An export first reads the event files that evalspan wrote
to the run's folder: it skips existing points and removes changed ones from their old file. Other files are not touched, so an
open TensorBoard need not read them again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from coordinator.results.trackers import Row, import_package
from evaljobs.contract.paths import slug

SUFFIX = ".evalspan"


def write_points(rows: Sequence[Row], out: Path, run: str, project: str) -> Path:  # noqa: ARG001 (TensorBoard has none)
    """Write event files of one run in `out/run`, and return the run's folder."""
    loaders, event_pb2, summary_pb2, writers = (
        import_package(f"tensorboard.{module}", "tensorboard", "tensorboard")
        for module in (
            "backend.event_processing.event_file_loader",
            "compat.proto.event_pb2",
            "compat.proto.summary_pb2",
            "summary.writer.event_file_writer",
        )
    )
    folder = out / slug(run)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {row.step: (row.ended_at, {tag: _rounded(v) for tag, v in row.values.items()}) for row in rows}
    changed = []  # files with other values of a wanted point
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        events = map(event_pb2.Event.FromString, loaders.RawEventFileLoader(str(file)).Load())
        there = {
            event.step: (event.wall_time, {v.tag: v.simple_value for v in event.summary.value})
            for event in events
            if event.HasField("summary")
        }
        if any(repr(there[step][1]) != repr(wanted[step][1]) for step in there.keys() & wanted.keys()):
            changed.append(file)
            wanted = there | wanted
        else:
            wanted = {step: point for step, point in wanted.items() if step not in there}
    if wanted:  # named by time, so TensorBoard reads it last
        writer = writers.EventFileWriter(str(folder), filename_suffix=SUFFIX)
        for step, (ended, values) in sorted(wanted.items()):
            scalars = [
                summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
            ]
            summary = summary_pb2.Summary(value=scalars)
            writer.add_event(event_pb2.Event(wall_time=ended, step=step, summary=summary))
        writer.close()
    for file in changed:
        file.unlink(missing_ok=True)
    return folder


def _rounded(value: float) -> float:
    """Round to 32 bits, as an event stores it."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
