"""Scores as a TensorBoard run: `tensorboard --logdir OUT`.

Rule: uses the `tensorboard` package alone (no TensorFlow, no torch). An export first reads the
event files that evalspan wrote to the run's folder: it skips points that are there and removes
changed ones from their old file. Other files stay untouched, so an open TensorBoard need not read
them again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.trackers import Row, need
from evaljobs.contract.paths import slug

SUFFIX = ".evalspan"
Values = dict[str, float]  # by tag


def write(rows: Sequence[Row], out: Path, run: str, project: str) -> Path:  # noqa: ARG001 (TensorBoard has none)
    """Event files of one run in `out/run`; the run's folder."""
    loaders = need("tensorboard.backend.event_processing.event_file_loader", "tensorboard", "tensorboard")
    events = need("tensorboard.compat.proto.event_pb2", "tensorboard", "tensorboard")
    folder = out / slug(run)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {row.step: (row.ended_at, _rounded(row.values)) for row in rows}
    there: set[int] = set()
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        held = [
            event
            for event in map(events.Event.FromString, loaders.RawEventFileLoader(str(file)).Load())
            if event.HasField("summary")
        ]
        kept = []
        for event in held:
            values = {v.tag: v.simple_value for v in event.summary.value}
            changed = event.step in wanted and repr(values) != repr(wanted[event.step][1])
            if not changed and event.step not in there:
                there.add(event.step)
                kept.append(event)
        if len(kept) < len(held):
            _write(folder, kept)
            file.unlink(missing_ok=True)
    _write(folder, _events({step: wanted[step] for step in sorted(wanted.keys() - there)}))
    return folder


def _rounded(values: Mapping[str, float]) -> Values:
    """The values rounded to 32 bits, as an event holds them."""
    return {tag: struct.unpack("f", struct.pack("f", value))[0] for tag, value in values.items()}


def _events(rows: Mapping[int, tuple[float, Values]]) -> list[Any]:
    events = need("tensorboard.compat.proto.event_pb2", "tensorboard", "tensorboard")
    summaries = need("tensorboard.compat.proto.summary_pb2", "tensorboard", "tensorboard")
    made = []
    for step, (ended, values) in rows.items():
        pairs = [summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        made.append(events.Event(wall_time=ended, step=step, summary=summaries.Summary(value=pairs)))
    return made


def _write(folder: Path, events: Iterable[Any]) -> None:
    """Write one file, unless `events` is empty; named by time, so TensorBoard reads it last."""
    events = list(events)
    if not events:
        return
    writers = need("tensorboard.summary.writer.event_file_writer", "tensorboard", "tensorboard")
    writer = writers.EventFileWriter(str(folder), filename_suffix=SUFFIX)
    for event in events:
        writer.add_event(event)
    writer.close()
