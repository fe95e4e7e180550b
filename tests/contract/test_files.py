"""Files that outlive a crash."""

import math
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaljobs.__main__ import run_verb
from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.storage import FrameError, FrameWriter, read_frame, read_frames, write_atomic

ANSWERS = st.one_of(
    st.tuples(st.floats() | st.sampled_from([-math.inf, math.nan]), st.booleans()).map(list),
    st.text(max_size=30),
    st.tuples(st.integers(0, 9), st.floats()).map(list),
)
ON_DISK = settings(max_examples=40)


def shard(number, answers=None):
    responses = tuple(enumerate(answers if answers is not None else ["an answer", [-1.25, True]]))
    name = str(ShardId("t", number, number + 1))
    return ShardResponses(
        task="t", key="k", shard=name, trial="trial", started_at=1.5, seconds=0.25, responses=responses
    )


def write(path, count):
    with FrameWriter(path) as writer:
        return [writer.append(shard(n)) for n in range(count)]


@ON_DISK
@given(answers=st.lists(ANSWERS, max_size=20))
def test_a_record_reads_back_equal_to_the_last_digit(answers, tmp_path):
    """Every response read equals the one dumped: -inf and nan are answers too. Its head tells task, key, shard and times to one
    that reads no answers."""
    path = tmp_path / "a.frames"
    path.unlink(missing_ok=True)
    with FrameWriter(path) as writer:
        reference = writer.append(shard(0, answers))
    assert repr(read_frame(tmp_path, reference).responses) == repr(tuple(enumerate(answers)))
    [(_, head)] = read_frames(path)
    assert (head.task, head.key, head.shard, head.trial) == ("t", "k", "t|0|1", "trial")
    assert (head.started_at, head.seconds, head.responses) == (1.5, 0.25, len(answers))


@ON_DISK
@given(data=st.data())
def test_a_torn_tail_hides_no_whole_record(data, tmp_path):
    """Cut anywhere: records before the cut are read, and reading resumes where it stopped."""
    path = tmp_path / "a.frames"
    path.unlink(missing_ok=True)
    references = write(path, 4)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    seen = [ref for ref, _ in read_frames(path)]
    assert seen == [r for r in references if r.offset + r.length <= cut]
    path.write_bytes(whole)
    resume = seen[-1].offset + seen[-1].length if seen else 0
    assert seen + [ref for ref, _ in read_frames(path, resume)] == references


@ON_DISK
@given(data=st.data())
def test_rot_costs_one_record_and_is_reported(data, tmp_path, caplog):
    """One flipped bit: its record is refused. In its answers it is reported and all others are read; in its head those before."""
    path = tmp_path / "a.frames"
    path.unlink(missing_ok=True)
    caplog.clear()
    references = write(path, 4)
    whole = path.read_bytes()
    content = bytearray(whole)
    hit = data.draw(st.integers(0, references[2].offset + references[2].length - 1))
    content[hit] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(content))
    seen = [ref for ref, _ in read_frames(path)]
    (struck,) = [r for r in references if r.offset <= hit < r.offset + r.length]
    body = 28 + int.from_bytes(whole[struck.offset + 4 : struck.offset + 8], "little")
    at = hit - struck.offset  # the answers' own sum stands at byte 20
    later = [r for r in references if r.offset > struck.offset and (at >= body or 20 <= at < 28)]
    assert seen == [r for r in references if r.offset < struck.offset] + later
    assert (f"at byte {struck.offset}:" in caplog.text) == bool(later)
    with pytest.raises(FrameError):
        read_frame(tmp_path, struck)


def test_an_atomic_write_leaves_the_old_file_or_the_new_one(tmp_path):
    """A write that fails changes nothing and leaves no litter; who has the old file open reads it to its end."""
    path = tmp_path / "deep" / "x.json"
    write_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_atomic(path, "not bytes")
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    with path.open("rb") as reader:
        write_atomic(path, b"new")
        assert (reader.read(), path.read_bytes()) == (b"old", b"new")


@pytest.mark.parametrize("content", [b"", b"{", b'{"kind": "trial"}', None])
def test_a_spec_that_cannot_be_read_ends_its_job_with_one_line(tmp_path, content, caplog):
    """Damaged, of another version, or gone: the line names the file, and the status is not 0."""
    place = tmp_path / "spec.json"
    if content is not None:
        place.write_bytes(content)
    assert run_verb(place, "trial") == 2
    (line,) = caplog.messages
    assert str(place) in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("parent", "folder", "file"), [(0o700, 0o700, 0o600), (0o2750, 0o2750, 0o640), (0o777, 0o755, 0o644)]
)
def test_a_new_file_is_as_visible_as_the_folder_that_it_lies_in(tmp_path, parent, folder, file):
    tmp_path.chmod(parent)
    write_atomic(tmp_path / "a" / "b" / "file", b"")
    assert [stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a", tmp_path / "a" / "b")] == [folder] * 2
    assert stat.S_IMODE((tmp_path / "a" / "b" / "file").stat().st_mode) == file
