"""Blocks, hashes and failures of the copier, and which edit of a file makes a checkpoint or an adapter another one."""

import errno
import os
import random
import shutil
import threading
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.node_memory import edit, make_checkpoint, safetensors

from coordinator.intake.checkpoint import inspect_checkpoint
from evaljobs.contract.specs import CheckpointFile
from evaljobs.staging.copy import Copy, CopyStopped, SourceChanged, copy_files
from evaljobs.staging.fingerprint import (
    PLAIN_PARTS,
    SAMPLE_BYTES,
    checkpoint_identity,
    folder_identity,
    hash_file,
    read_header,
    weights_fingerprint,
)

PREADV = os.preadv  # a descriptor's bytes at an offset into buffers; bytes read


@contextmanager
def copies(folder, contents):
    """Files s0, s1, … with these contents, to be copied to t0, t1, …"""
    folder.mkdir(exist_ok=True)
    with ExitStack() as opened:
        made = []
        for i, data in enumerate(contents):
            source = folder / f"s{i}"
            source.write_bytes(data)
            target = opened.enter_context((folder / f"t{i}").open("wb"))
            made.append(
                Copy(
                    name=f"f{i}",
                    source=source,
                    size=len(data),
                    mtime_ns=source.stat().st_mtime_ns,
                    target=target.fileno(),
                )
            )
        yield made


def copied(made, *, read, **how):
    """`copy_files`, where `read` stands between it and storage."""
    with mock.patch.object(os, "preadv", read):
        return copy_files(made, **{"stop": threading.Event(), **how})


@settings(max_examples=40)
@given(
    contents=st.lists(st.binary(max_size=3000), min_size=1, max_size=7),
    readers=st.integers(1, 6),
    block=st.sampled_from([1, 7, 256, 4096]),
    drips=st.booleans(),
)
def test_copies_every_byte_and_hashes_what_it_read(tmp_path, contents, readers, block, drips):
    """For any files, readers and block size: equal bytes, and the hash of the whole file; of short reads the rest is read."""

    def read(descriptor, buffers, offset):
        most = max(1, len(buffers[0]) // 3) if drips else len(buffers[0])
        return PREADV(descriptor, [buffers[0][:most]], offset)

    with copies(tmp_path / "x", contents) as made:
        sums = copied(made, readers=readers, block=block, read=read)
    assert [(tmp_path / "x" / f"t{i}").read_bytes() for i in range(len(contents))] == contents
    assert sums == {f"f{i}": xxhash.xxh3_128(data).hexdigest() for i, data in enumerate(contents)}
    assert all(hash_file(tmp_path / "x" / f"t{name[1:]}") == digest for name, digest in sums.items())


def test_slow_first_blocks_do_not_starve_readers(tmp_path):
    """One block of a file takes long: the others run ahead, then wait for its turn; it ends and is exact."""
    ahead = threading.Event()

    def slow_start(descriptor, buffers, offset):
        assert offset > 0 or ahead.wait(60), "no reader runs ahead"
        if offset == 3000:
            ahead.set()
        return PREADV(descriptor, buffers, offset)

    with copies(tmp_path / "x", [os.urandom(64_000)]) as made:
        sums = copied(made, readers=4, block=1000, read=slow_start)
    assert sums["f0"] == hash_file(tmp_path / "x" / "s0")


@pytest.mark.parametrize("readers", [1, 8])
@pytest.mark.parametrize(
    ("what", "raises"),
    [("EIO", OSError), ("stop", CopyStopped), ("truncate", SourceChanged), ("append", SourceChanged)],
)
def test_what_happens_in_mid_copy_ends_all_readers_and_is_told(tmp_path, what, raises, readers):
    """An error of storage, a stop, a source that is written to: never a short or mixed copy, and no thread is left."""
    stop = threading.Event()
    before = set(threading.enumerate())
    with copies(tmp_path / "x", [bytes(50_000)]) as made:
        source = made[0].source

        def read(descriptor, buffers, offset):
            match what if offset == 20_000 else "":
                case "EIO":
                    raise OSError(errno.EIO, "Input/output error")
                case "stop":
                    stop.set()
                case "truncate":
                    os.truncate(source, 10_000)
                case "append":
                    with source.open("ab") as file:
                        file.write(b"more")
            return PREADV(descriptor, buffers, offset)

        with pytest.raises(raises):
            copied(made, readers=readers, block=1000, read=read, stop=stop)
    assert set(threading.enumerate()) <= before


# --- which edit of a checkpoint's or an adapter's file makes it another one ------------------------------------------


@pytest.mark.parametrize("size", [1, 700, 5000])
def test_an_edit_of_any_one_tensor_is_seen(tmp_path, size):
    """Reversed in place, with size and mtime kept: each tensor of a file has a sample of its own."""
    rng = random.Random(size)
    tensors = {f"t{i}": rng.randbytes(size + i) for i in range(12)}
    path = tmp_path / "model.safetensors"
    safetensors(path, tensors)
    seen = {weights_fingerprint(path)[0]}
    for (start, stop), data in zip(read_header(path).spans, tensors.values(), strict=True):
        edit(path, start, bytes(255 - byte for byte in reversed(data)))
        seen.add(weights_fingerprint(path)[0])
        edit(path, start, data)
        assert stop - start == len(data)
    assert len(seen) == 13


def test_a_training_step_is_seen_in_weights_without_a_header(tmp_path):
    """A .bin file has samples in each of 64 equal parts."""
    path = tmp_path / "pytorch_model.bin"
    part = 10 * SAMPLE_BYTES
    path.write_bytes(bytes(PLAIN_PARTS * part))
    seen = {weights_fingerprint(path)[0]}
    for index in range(PLAIN_PARTS):
        edit(path, index * part, b"x" * part)
        seen.add(weights_fingerprint(path)[0])
    assert len(seen) == PLAIN_PARTS + 1


def test_files_that_are_no_weights_count_by_content_alone(tmp_path):
    """An edit that keeps size and mtime is seen; a touch is none. Weights count by mtime, too."""
    folder = make_checkpoint(tmp_path / "x")
    digest = inspect_checkpoint(folder).digest
    os.utime(folder / "config.json", ns=(0, 0))
    assert inspect_checkpoint(folder).digest == digest
    edit(folder / "tokenizer.json", 0, b"[]")
    assert inspect_checkpoint(folder).digest != digest
    edit(folder / "tokenizer.json", 0, b"{}")
    assert inspect_checkpoint(folder).digest == digest
    os.utime(folder / "model-00001-of-00003.safetensors", ns=(0, 0))
    assert inspect_checkpoint(folder).digest != digest


names = st.text("abcdef-.", min_size=1, max_size=8).filter(lambda n: n[0] != ".").map("{}.safetensors".format)


@given(
    files=st.lists(
        st.builds(CheckpointFile, name=names, size=st.integers(0, 2**50), mtime_ns=st.integers(0, 2**62)),
        min_size=1,
        max_size=6,
        unique_by=lambda f: f.name,
    ),
    data=st.data(),
)
def test_identity_is_of_the_set_and_of_each_field(tmp_path, files, data):
    """The order does not matter; any other name, size or time gives another identity; hashes known or not do not."""
    for name in ("zzz.safetensors", *(f.name for f in files)):
        safetensors(tmp_path / name, {})
    digest = checkpoint_identity(files, tmp_path)
    assert checkpoint_identity(data.draw(st.permutations(files)), tmp_path) == digest
    assert checkpoint_identity([f.model_copy(update={"xxh3_128": "0"}) for f in files], tmp_path) == digest
    i = data.draw(st.integers(0, len(files) - 1))
    field = data.draw(st.sampled_from(["size", "mtime_ns"]))
    changed = [*files]
    changed[i] = files[i].model_copy(update={field: getattr(files[i], field) + 1})
    assert checkpoint_identity(changed, tmp_path) != digest
    assert (
        checkpoint_identity([*files, CheckpointFile(name="zzz.safetensors", size=0, mtime_ns=0)], tmp_path)
        != digest
    )


def test_the_identity_of_an_adapter_follows_its_files(tmp_path):
    """Trained again into the same folder, a config edited, a file added: another; moved with its times: the same.

    A folder below it counts, a hidden file does not, and a file may be named in place of a folder.
    """
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    safetensors(adapter / "adapter_model.safetensors", {"a": b"x" * 5000, "b": b"y" * 50})
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    seen = [folder_identity(adapter)]
    assert folder_identity(shutil.copytree(adapter, tmp_path / "copy")) == seen[0]
    (adapter / ".hidden").write_text("x")
    assert folder_identity(adapter) == seen[0]
    (first, _) = read_header(adapter / "adapter_model.safetensors").spans
    edit(adapter / "adapter_model.safetensors", first[0], b"z" * 5000)
    seen.append(folder_identity(adapter))
    edit(adapter / "adapter_config.json", 0, b'{"r": 9}')
    seen.append(folder_identity(adapter))
    (adapter / "tokens").mkdir()
    (adapter / "tokens" / "vocab.json").write_text("{}")
    seen.append(folder_identity(adapter))
    seen.append(folder_identity(adapter / "adapter_model.safetensors"))
    assert len(set(seen)) == 5
