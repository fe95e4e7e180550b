"""Which edit of a checkpoint's or an adapter's file makes it another one."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.node_memory import MIB, make_checkpoint, safetensors

from coordinator.intake.checkpoint import inspect
from evaljobs.contract.specs import CheckpointFile
from evaljobs.staging.fingerprint import (
    PLAIN_PARTS,
    SAMPLE_BYTES,
    BadWeights,
    fingerprint,
    folder_identity,
    identity,
    read_header,
)


def edit(path: Path, place: int, data: bytes) -> None:
    """Write into a file in place; its size and mtime stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("size", [1, 700, 5000, 3 * MIB])
def test_an_edit_of_any_one_tensor_is_seen(tmp_path: Path, size: int) -> None:
    """Reversed in place, with size and mtime kept: each tensor of a file has a sample of its own."""
    rng = random.Random(size)
    tensors = {f"t{i}": rng.randbytes(size + i) for i in range(12)}
    path = tmp_path / "model.safetensors"
    safetensors(path, tensors)
    seen = {fingerprint(path)}
    for (start, stop), data in zip(read_header(path).spans, tensors.values(), strict=True):
        edit(path, start, bytes(255 - byte for byte in reversed(data)))
        seen.add(fingerprint(path))
        edit(path, start, data)
        assert stop - start == len(data)
    assert len(seen) == 13


def test_a_training_step_is_seen_in_weights_without_a_header(tmp_path: Path) -> None:
    """A .bin file has samples in each of 64 equal parts."""
    path = tmp_path / "pytorch_model.bin"
    part = 10 * SAMPLE_BYTES
    path.write_bytes(bytes(PLAIN_PARTS * part))
    seen = {fingerprint(path)}
    for index in range(PLAIN_PARTS):
        edit(path, index * part, b"x" * part)
        seen.add(fingerprint(path))
    assert len(seen) == PLAIN_PARTS + 1


@pytest.mark.parametrize("tensors", [[(0, 8), (4, 12)], [(0, 4), (8, 12)], [(4, 12)], [(0, 12), (12, 4)]])
def test_tensors_that_overlap_or_leave_a_hole_are_refused(
    tmp_path: Path, tensors: list[tuple[int, int]]
) -> None:
    """As the safetensors library refuses them."""
    table = ", ".join(
        f'"t{i}": {{"dtype": "U8", "data_offsets": [{start}, {stop}]}}'
        for i, (start, stop) in enumerate(tensors)
    )
    raw = f"{{{table}}}".encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(12))
    with pytest.raises(BadWeights, match="overlap"):
        read_header(path)


def test_files_that_are_no_weights_count_by_content_alone(tmp_path: Path) -> None:
    """An edit that keeps size and mtime is seen; a touch is none. Weights count by mtime, too."""
    folder = make_checkpoint(tmp_path / "x")
    digest = inspect(folder).digest
    os.utime(folder / "config.json", ns=(0, 0))
    assert inspect(folder).digest == digest
    edit(folder / "tokenizer.json", 0, b"[]")
    assert inspect(folder).digest != digest
    edit(folder / "tokenizer.json", 0, b"{}")
    assert inspect(folder).digest == digest
    os.utime(folder / "model-00001-of-00003.safetensors", ns=(0, 0))
    assert inspect(folder).digest != digest


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
def test_identity_is_of_the_set_and_of_each_field(
    tmp_path: Path, files: list[CheckpointFile], data: st.DataObject
) -> None:
    """The order does not matter; any other name, size or time gives another identity; hashes known or not do not."""
    for name in ("zzz.safetensors", *(f.name for f in files)):
        safetensors(tmp_path / name, {})
    digest = identity(files, tmp_path)
    assert identity(data.draw(st.permutations(files)), tmp_path) == digest
    assert identity([f.model_copy(update={"xxh3_128": "0"}) for f in files], tmp_path) == digest
    i = data.draw(st.integers(0, len(files) - 1))
    field = data.draw(st.sampled_from(["size", "mtime_ns"]))
    changed = [*files]
    changed[i] = files[i].model_copy(update={field: getattr(files[i], field) + 1})
    assert identity(changed, tmp_path) != digest
    assert identity([*files, CheckpointFile(name="zzz.safetensors", size=0, mtime_ns=0)], tmp_path) != digest


def test_the_identity_of_an_adapter_follows_its_files(tmp_path: Path) -> None:
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
