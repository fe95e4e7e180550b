"""Files that outlive a crash."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.written import framed, head_of

from evaljobs.__main__ import run
from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.specs import EntryManifest, FrameRef
from evaljobs.contract.storage import (
    MAGIC,
    FrameError,
    FrameWriter,
    encode_frame,
    read_frame,
    read_frames,
    read_record,
    write_atomic,
    write_record,
)

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
        shard=str(ShardId("t", number, number + 1)),
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
    """Every response read equals the one dumped."""
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
    """Cut anywhere: records before the cut are read, and reading resumes where it stopped."""
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
    """One flipped bit: its record is refused and reported, all others are read."""
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
    """A file that ends in half a record takes further ones, and readers find them."""
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


# --- hostile content: every checksum is right ------------------------------------------------------------------------


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)
HEADS = st.one_of(
    st.just(head_of()),
    st.binary(max_size=60),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("task", "shard", "trial", "seconds", "responses", "more"), JSON)
    ).map(lambda changed: head_of(**changed)),
    st.sampled_from([b'{"task": "\xff"}', b"[" * 60_000, head_of(shard="../../x\0"), head_of(task="\ud800")]),
)
TEXTS = st.one_of(
    st.binary(max_size=60),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.lists(st.tuples(st.integers(), JSON)).map(lambda value: json.dumps(value).encode()),
    st.sampled_from(
        [
            b'[[0,"\xff"]]',
            b"[" * 100_000 + b"]" * 100_000,
            b'{"01":"x"}',
            b'["01"]',
            b'[["a","x"]]',
            b'[[-1,"x"]]',
            b"[[0,1,2]]",
            b'[[0,"\\ud800"]]',
            b'[[0,"a\\u0000b"]]',
            b"[[" + b"9" * 5000 + b',"x"]]',
            b"[[0,[]]]",
            b'[[0,{"a":1}]]',
            b"[]",
        ]
    ),
)
BODIES = st.one_of(
    TEXTS.map(zlib.compress), st.binary(max_size=60), TEXTS.map(lambda t: zlib.compress(t)[:-2])
)


@settings(max_examples=150)
@given(head=HEADS, body=BODIES)
def test_a_well_framed_record_of_any_content_is_answers_or_no_record(
    head: bytes, body: bytes, tmp_path: Path
) -> None:
    """Any content behind right checksums: the walk goes on to the next record, and a read returns
    answers or raises FrameError.
    """
    hostile, sound = framed(head, body), encode_frame(shard(1))
    (tmp_path / "a.frames").write_bytes(hostile + sound)
    seen = [ref for ref, _ in read_frames(tmp_path / "a.frames", on_corrupt=lambda _at, _why: None)]
    assert seen[-1] == FrameRef(file="a.frames", offset=len(hostile), length=len(sound))
    try:
        record = read_frame(tmp_path, FrameRef(file="a.frames", offset=0, length=len(hostile)))
    except FrameError:
        return
    assert all(index >= 0 for index, _ in record.responses)
    json.dumps(record.responses, ensure_ascii=False).encode()


@settings(max_examples=80)
@given(data=st.binary(max_size=200), offset=st.integers(-5, 300), length=st.integers(-5, 300))
def test_any_bytes_and_any_reference_give_a_record_or_frame_error(
    data: bytes, offset: int, length: int, tmp_path: Path
) -> None:
    """Also bytes that begin as a record does."""
    (tmp_path / "a.frames").write_bytes(MAGIC + data)
    assert list(read_frames(tmp_path / "a.frames", on_corrupt=lambda _at, _why: None)) == []
    with pytest.raises(FrameError):
        read_frame(tmp_path, FrameRef(file="a.frames", offset=offset, length=length))


def test_a_body_that_unpacks_without_end_is_no_record_and_takes_bounded_memory(tmp_path: Path) -> None:
    """A zip bomb is refused with little more memory than the largest record."""
    pack = zlib.compressobj(1)
    answer = (pack.compress(b"a" * (1 << 24)) for _ in range(17))
    data = framed(head_of(), b"".join([pack.compress(b'[[0,"'), *answer, pack.flush()]))
    (tmp_path / "a.frames").write_bytes(data)
    script = """
import resource, sys
from pathlib import Path
from evaljobs.contract import storage as files
from evaljobs.contract.specs import FrameRef
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
try:
    files.read_frame(Path(sys.argv[1]), FrameRef(file="a.frames", offset=0, length=int(sys.argv[2])))
except files.FrameError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(len(data))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "does not unpack to the answers of one shard" in done.stdout, done.stderr


def test_a_response_file_that_is_a_pipe_a_link_or_elsewhere_is_neither_read_nor_waited_for(
    tmp_path: Path,
) -> None:
    """Path tricks: no reader hangs on a pipe, follows a link, or leaves the folder."""
    root = tmp_path / "responses"
    root.mkdir()
    [reference] = write(tmp_path / "secret.frames", 1)
    os.mkfifo(root / "pipe.frames")
    (root / "link.frames").symlink_to(tmp_path / "secret.frames")
    (root / "folder.frames").mkdir()
    for name in ("pipe.frames", "link.frames", "folder.frames"):
        with pytest.raises(FrameError):
            list(read_frames(root / name))
    for name in (
        "pipe.frames",
        "link.frames",
        "folder.frames",
        "../secret.frames",
        "a\0b",
        "..",
        "",
        "x" * 300,
    ):
        with pytest.raises(FrameError):
            read_frame(root, reference.model_copy(update={"file": name}))
    with pytest.raises(FrameError):
        read_frame(tmp_path, reference.model_copy(update={"file": str(tmp_path / "secret.frames")}))
    assert read_frame(tmp_path, reference)


def test_a_spec_that_another_user_owns_or_may_write_is_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job refuses it before it reads a word; a link may lead to any file."""
    spec = tmp_path / "a.json"
    write_atomic(spec, b"{}")
    with pytest.raises(ValidationError):
        run(spec, "trial")
    for bits in (0o620, 0o602):
        spec.chmod(bits)
        assert run(spec, "trial") == 2
        assert f"{spec} may be written by others: it is not run" in caplog.text
        caplog.clear()
    spec.chmod(0o600)
    (tmp_path / "link.json").symlink_to(spec)
    assert run(tmp_path / "link.json", "trial") == 2
    if os.geteuid() == 0:
        os.chown(spec, 64321, -1)
        assert run(spec, "trial") == 2
        assert f"{spec} belongs to uid 64321, not to 0" in caplog.text


@pytest.mark.parametrize(
    ("parent", "folder", "file"), [(0o700, 0o700, 0o600), (0o2750, 0o2750, 0o640), (0o777, 0o755, 0o644)]
)
def test_a_new_file_is_as_visible_as_the_folder_that_it_lies_in(
    tmp_path: Path, parent: int, folder: int, file: int
) -> None:
    tmp_path.chmod(parent)
    write_atomic(tmp_path / "a" / "b" / "file", b"")
    assert [stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a", tmp_path / "a" / "b")] == [folder] * 2
    assert stat.S_IMODE((tmp_path / "a" / "b" / "file").stat().st_mode) == file
