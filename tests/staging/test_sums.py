"""Hashes written when a checkpoint is saved: what storage changes afterwards is caught before any GPU is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.node_memory import ROOT, NodeMemory, make_checkpoint

from coordinator import hook
from coordinator.intake.checkpoint import inspect
from evaljobs.contract.outcomes import Failed
from evaljobs.staging.copy import hash_file
from evaljobs.staging.fingerprint import SAVE_SUMS

NOTIFY = """
import sys
from coordinator import hook
print(hook.notify(sys.argv[1], 1, work_dir=sys.argv[2], sums=True), hook.flush(60) if len(sys.argv) == 3 else "")
"""


def announce(checkpoint: Path, work: Path, *more: str, hidden: str = "") -> subprocess.CompletedProcess[str]:
    work.mkdir(exist_ok=True)  # the hook makes no work folder
    hide = f"import sys; sys.modules[{hidden!r}] = None\n" if hidden else ""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0"}
    return subprocess.run(
        [sys.executable, "-c", hide + NOTIFY, str(checkpoint), str(work), *more],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_a_byte_flipped_after_the_save_never_reaches_a_gpu(world: NodeMemory) -> None:
    """The hook's sums are the files'; a flip that keeps size, mtime and header fails the precursor, which keeps nothing."""
    folder = make_checkpoint(world.folder / "step-1")
    assert hook.SUMS == SAVE_SUMS
    done = announce(folder, world.folder / "work")
    assert done.stdout.split() == ["True", "True"], done.stderr
    table = json.loads((folder / SAVE_SUMS).read_text())["xxh3_128"]
    assert not {"optimizer.pt", "trainer_state.json", SAVE_SUMS} & set(table)
    checkpoint = inspect(folder)
    assert {f.name: f.xxh3_128 for f in checkpoint.files} == {
        f.name: hash_file(folder / f.name) for f in checkpoint.files
    }
    victim = folder / "model-00002-of-00003.safetensors"
    before = victim.stat()
    with victim.open("r+b") as file:
        file.seek(before.st_size * 3 // 4)  # between the samples
        byte = file.read(1)
        file.seek(before.st_size * 3 // 4)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert inspect(folder).digest == checkpoint.digest, "nothing else tells"
    assert world.start(world.spec(checkpoint)).wait(120) == 1
    failed = world.outcome("failed")
    assert isinstance(failed, Failed)
    assert failed.blame == "operator"
    assert f"{victim.name} is not what was saved" in failed.error
    assert world.nothing_left()


@pytest.mark.parametrize("why", ["no xxhash", "training ends"])
def test_without_sums_the_checkpoint_is_announced_all_the_same(tmp_path: Path, why: str) -> None:
    """No library, or a training that ends at once: the notice is there, one line at most is said, no half table is left."""
    folder = make_checkpoint(tmp_path / "step-1", size=8 << 20 if why == "training ends" else 1 << 20)
    if why == "no xxhash":
        done = announce(folder, tmp_path / "work", hidden="xxhash")
        assert "announced without sums" in done.stderr
        assert not (folder / SAVE_SUMS).exists()
    else:
        announce(folder, tmp_path / "work", "do not wait")
    assert not (folder / f"{SAVE_SUMS}.tmp").exists()
    assert len(list((tmp_path / "work" / "inbox").glob("*.json"))) == 1
