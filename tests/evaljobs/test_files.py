"""Files that outlive a crash."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaljobs.contract import EntryManifest, FrameRef
from evaljobs.files import (
    FrameError,
    FrameWriter,
    encode_frame,
    read_frame,
    read_frames,
    read_record,
    write_atomic,
    write_record,
)
from evaljobs.outcomes import ShardResponses
from evaljobs.paths import shard_id

ANSWERS = st.one_of(
    st.tuples(st.floats(allow_nan=False), st.booleans()).map(list),
    st.text(max_size=30),
    st.tuples(st.integers(0, 9), st.floats(allow_nan=False)).map(list),
)
ON_DISK = settings(max_examples=40)


def shard(number: int, answers: list[object] | None = None) -> ShardResponses:
    return ShardResponses(
        task="t",
        key="k",
        shard=shard_id("t", number, number + 1),
        trial="trial",
        started_at=1.5,
        seconds=0.25,
        responses=tuple(enumerate(answers if answers is not None else ["an answer", [-1.25, True]])),
    )


def write(path: Path, count: int) -> list[FrameRef]:
    with FrameWriter(path) as writer:
        return [writer.append(shard(n)) for n in range(count)]


@ON_DISK
@given(answers=st.lists(ANSWERS, max_size=20))
def test_a_record_reads_back_equal_to_the_last_digit(answers: list[object], tmp_path: Path) -> None:
    """What was dumped is what is read, whatever the answers."""
    with FrameWriter(tmp_path / "a.frames") as writer:
        reference = writer.append(shard(0, answers))
    assert read_frame(tmp_path, reference).responses == tuple(enumerate(answers))


def test_infinite_and_undefined_likelihoods_survive(tmp_path: Path) -> None:
    """-inf and nan are answers too."""
    with FrameWriter(tmp_path / "a.frames") as writer:
        reference = writer.append(shard(0, [[-math.inf, False], [math.nan, False]]))
    (_, (low, _)), (_, (undefined, _)) = read_frame(tmp_path, reference).responses
    assert low == -math.inf
    assert math.isnan(undefined)


@ON_DISK
@given(data=st.data())
def test_a_torn_tail_hides_no_whole_record(data: st.DataObject, tmp_path: Path) -> None:
    """Cut anywhere: every record before the cut is read, nothing after it is, and reading resumes where it stopped."""
    path = tmp_path / "a.frames"
    path.unlink(missing_ok=True)
    references = write(path, 4)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    complaints: list[str] = []
    seen = list(read_frames(path, on_corrupt=lambda _at, why: complaints.append(why)))
    assert [ref for ref, _ in seen] == [r for r in references if r.offset + r.length <= cut]
    assert not complaints
    path.write_bytes(whole)
    resume = seen[-1][0].offset + seen[-1][0].length if seen else 0
    assert [ref for ref, _ in seen] + [ref for ref, _ in read_frames(path, resume)] == references


@ON_DISK
@given(data=st.data())
def test_rot_costs_one_record_and_is_reported(data: st.DataObject, tmp_path: Path) -> None:
    """One flipped bit in a record: it is refused by name or by place, all others are read."""
    path = tmp_path / "a.frames"
    path.unlink(missing_ok=True)
    references = write(path, 4)
    content = bytearray(path.read_bytes())
    hit = data.draw(st.integers(0, references[2].offset + references[2].length - 1))
    content[hit] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(content))
    complaints: list[int] = []
    seen = [ref for ref, _ in read_frames(path, on_corrupt=lambda at, _why: complaints.append(at))]
    struck = [r for r in references if r.offset <= hit < r.offset + r.length]
    assert seen == [r for r in references if r not in struck]
    assert complaints == [struck[0].offset]
    with pytest.raises(FrameError):
        read_frame(tmp_path, struck[0])


def test_a_writer_goes_on_after_its_forerunners_torn_record(tmp_path: Path) -> None:
    """A trial's file that ends in half a record takes further ones, and they are found."""
    path = tmp_path / "a.frames"
    first = write(path, 1)
    with path.open("ab") as file:
        file.write(encode_frame(shard(1))[:-7])
    with FrameWriter(path) as writer:
        third = writer.append(shard(2))
    reported: list[int] = []
    found = list(read_frames(path, on_corrupt=lambda at, _why: reported.append(at)))
    assert [ref for ref, _ in found] == [*first, third]
    assert reported == [first[0].length]


def test_heads_tell_shard_and_times_without_answers(tmp_path: Path) -> None:
    """The coordinator learns task, key, shard, start and seconds from heads."""
    write(tmp_path / "a.frames", 1)
    [(_, head)] = read_frames(tmp_path / "a.frames")
    assert (head.task, head.key, head.shard, head.trial) == ("t", "k", "t|0|1", "trial")
    assert (head.started_at, head.seconds, head.responses) == (1.5, 0.25, 2)


def test_an_atomic_write_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """A write that fails changes nothing and leaves no litter."""
    path = tmp_path / "deep" / "x.json"
    write_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_atomic(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_a_record_round_trips(tmp_path: Path) -> None:
    """write_record and read_record are inverse."""
    record = EntryManifest(entry="e", sets={"a": "b"})
    write_record(tmp_path / "r.json", record)
    assert read_record(tmp_path / "r.json", EntryManifest) == record
    assert json.loads((tmp_path / "r.json").read_text())["entry"] == "e"
