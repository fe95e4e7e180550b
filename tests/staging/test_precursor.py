"""The precursor as a process: what it copies, how it ends, and what it does about what is wrong on a node."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.node_memory import MIB, ROOT, edit, flip, make_checkpoint, names
from support.with_root import USER, as_user, small_disk

from coordinator import hook
from coordinator.intake.checkpoint import inspect_checkpoint
from evaljobs.contract.outcomes import Cleared, Failed
from evaljobs.staging import copy, precursor, store
from evaljobs.staging.fingerprint import SAVE_SUMS, hash_file
from evaljobs.staging.store import hold_for_reading

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and other owners need root")


def failed(world):
    """What a precursor left that failed: it blames the operator in one line."""
    found = world.outcome("failed")
    assert isinstance(found, Failed)
    assert found.blame == "operator"
    assert "\n" not in found.error
    return found


def test_stages_holds_and_clears(world):
    """Only what inference needs is copied, its bytes leave storage once, and after the release nothing is left."""
    checkpoint = world.checkpoint()
    process = world.start(world.spec(checkpoint))
    staged = world.staged()
    assert (staged.rung, staged.storage_bytes, staged.why) == ("shm", checkpoint.bytes, "")
    assert world.copy_is_exact(checkpoint)
    assert names(Path(staged.path)) == sorted(f.name for f in checkpoint.files)
    assert not {"optimizer.pt", "trainer_state.json"} & set(names(Path(staged.path)))
    assert world.home.stat().st_mode & 0o777 == 0o700
    world.release()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    cleared = world.outcome("cleared")
    assert isinstance(cleared, Cleared)
    assert cleared.freed_bytes >= checkpoint.bytes
    assert world.nothing_left()


def test_two_at_once_copy_once(world):
    """Two precursors of one checkpoint: storage is read once, and it stays until the second leaves."""
    checkpoint = world.checkpoint(size=16 * MIB)
    processes = {name: world.start(world.spec(checkpoint, name)) for name in "ab"}
    both = [world.staged(name) for name in processes]
    assert sum(s.storage_bytes for s in both) == checkpoint.bytes
    assert both[0].path == both[1].path
    for name, process in processes.items():
        assert world.copy_is_exact(checkpoint)
        world.release(name)
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert world.nothing_left()


@pytest.mark.parametrize(
    ("how", "reason"), [("SIGTERM", "terminated"), ("lease", "not renewed"), ("clean --all", "removed")]
)
def test_it_clears_and_ends_by_itself(world, how, reason):
    """At SIGTERM, where the coordinator's lease file does not change for its time, and where its copy is removed."""
    process = world.start(world.spec(world.checkpoint(), lease_seconds=0.2 if how == "lease" else 900.0))
    if how != "lease":
        world.staged()
    if how == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    elif how == "clean --all":
        assert store.clean_copies(world.root)["removed"] == []
        assert len(store.clean_copies(world.root, everything=True)["removed"]) == 1
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    cleared = world.outcome("cleared")
    assert isinstance(cleared, Cleared)
    assert reason in cleared.reason
    assert world.nothing_left()


@pytest.mark.parametrize("change", ["gone", "gone half-way", "rewritten", "truncated", "replaced"])
def test_a_checkpoint_that_changed_is_a_clear_failure(world, change, monkeypatch):
    """Deleted, rewritten, truncated or replaced since it was announced: Failed for the operator, nothing published."""
    checkpoint = world.checkpoint()
    folder = Path(checkpoint.source)
    weights = folder / "model-00003-of-00003.safetensors"
    match change:
        case "gone":
            shutil.rmtree(folder)
        case "gone half-way":  # every byte could still be read
            reads, preadv = iter(range(1000)), os.preadv

            def read(descriptor, buffers, offset):
                if next(reads) == 2:
                    shutil.rmtree(folder)
                return preadv(descriptor, buffers, offset)

            monkeypatch.setattr(os, "preadv", read)
        case "rewritten":
            before = weights.stat()
            while weights.stat().st_mtime_ns == before.st_mtime_ns:  # of a file system's clock, which ticks
                weights.write_bytes(weights.read_bytes())
        case "truncated":
            os.truncate(weights, MIB)
        case "replaced":  # another step of the same run, copied with its times: only the samples tell
            edit(weights, 4097, bytes(b ^ 255 for b in weights.read_bytes()[4097:]))
    assert precursor.main(world.spec(checkpoint, readers=1)) == 1
    assert "changed or disappeared" in failed(world).error
    assert world.nothing_left()


@root_only
def test_too_small_takes_the_next_rung(world):
    """No room, seen beforehand or by ENOSPC in mid-copy: cleaned up, and the next root is used."""
    checkpoint = world.checkpoint(size=4 * MIB)
    with small_disk(world.folder / "small", "6m") as small:
        spec = world.spec(checkpoint, roots=(str(small), str(world.root)))
        holding = precursor.stage_only(spec)
        assert (holding.staged.rung, "are needed" in holding.staged.why) == ("shm", True)
        precursor.clear_weights(holding, "test")
        slot = store.join_slot(small, checkpoint.digest)
        with pytest.raises(copy.TargetFailed, match="No space left"):
            precursor.copy_in(slot, spec, threading.Event())
        store.leave_slot(slot)
        assert list(small.iterdir()) == []
    assert world.nothing_left()


# --- hashes written when a checkpoint is saved ------------------------------------------------------------------------

NOTIFY = """
import sys
from coordinator import hook
sys.modules["xxhash" if sys.argv[3] == "no xxhash" else "none"] = None
print(hook.notify(sys.argv[1], 1, work_dir=sys.argv[2], sums=True), sys.argv[3] == "training ends" or hook.flush(60))
"""


@pytest.mark.parametrize("case", ["sums", "no xxhash", "training ends"])
def test_a_byte_flipped_after_the_save_never_reaches_a_gpu(world, case):
    """The hook's sums are the files'; a flip that keeps size, mtime and header fails the precursor, which keeps nothing.

    Without the library, or in a training that ends at once, the notice is there, and no half table is left.
    """
    folder = make_checkpoint(world.folder / "step-1", size=(8 if case == "training ends" else 2) * MIB)
    work = world.folder / "work"
    work.mkdir()  # the hook makes no work folder
    argv = [sys.executable, "-c", NOTIFY, str(folder), str(work), case]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert len(list((work / "inbox").glob("*.json"))) == 1
    assert not (folder / f"{SAVE_SUMS}.tmp").exists()
    if case != "sums":
        assert ("announced without sums" in done.stderr) == (case == "no xxhash")
        assert case == "training ends" or not (folder / SAVE_SUMS).exists()
        return
    assert hook.SUMS_FILE == SAVE_SUMS
    assert done.stdout.split() == ["True", "True"], done.stderr
    table = json.loads((folder / SAVE_SUMS).read_text())["xxh3_128"]
    assert not {"optimizer.pt", "trainer_state.json", SAVE_SUMS} & set(table)
    checkpoint = inspect_checkpoint(folder)
    assert {f.name: f.xxh3_128 for f in checkpoint.files} == {
        f.name: hash_file(folder / f.name) for f in checkpoint.files
    }
    victim = folder / "model-00002-of-00003.safetensors"
    flip(victim, victim.stat().st_size * 3 // 4)  # between the samples
    assert inspect_checkpoint(folder).digest == checkpoint.digest, "nothing else tells"
    assert precursor.main(world.spec(checkpoint)) == 1
    assert f"{victim.name} is not what was saved" in failed(world).error
    assert world.nothing_left()


# --- an ordinary user, with a root like /dev/shm, where others may have been first ------------------------------------


@pytest.fixture
def shared(world):
    """A root that is everybody's and sticky, as /dev/shm is, and a folder of the user's for his checkpoints."""
    # what Python imports on first use is imported now: its folder may be closed to the user
    precursor.clear_weights(precursor.stage_only(world.spec(world.checkpoint("warm"))), "test")
    world.root.chmod(0o1777)
    folder = Path(tempfile.mkdtemp(prefix="staging-user-", dir="/dev/shm"))
    for path in (folder, world.paths.root.parent):
        path.chmod(0o755)
    os.chown(folder, USER, USER)
    yield replace(world, folder=folder)
    shutil.rmtree(folder)


@root_only
def test_an_ordinary_user_stages_reads_and_clears(shared):
    """All of it without any privilege; another user's memory is not touched.

    A file that storage denies is a failure that says so and who must act.
    """
    other = shared.root / store.home_name(0)
    (other / ("a" * 32)).mkdir(parents=True)
    (other / ("a" * 32) / "weights").write_text("root's")

    def act():
        checkpoint = shared.checkpoint()
        holding = precursor.stage_only(shared.spec(checkpoint))
        assert (holding.staged.rung, holding.staged.why) == ("shm", "")
        with hold_for_reading(holding.staged.path):
            assert shared.copy_is_exact(checkpoint)
        precursor.clear_weights(holding, "test")
        assert store.clean_copies(shared.root, everything=True)["problems"] == []
        (Path(checkpoint.source) / "model-00002-of-00003.safetensors").chmod(0)
        assert precursor.main(shared.spec(checkpoint)) == 1
        assert "grant this user read access" in failed(shared).error

    as_user(act)
    assert names(shared.root) == [other.name, "foreign"]
    assert (other / ("a" * 32) / "weights").read_text() == "root's"


@root_only
@pytest.mark.parametrize(
    ("kind", "said"), [("file", "Not a directory"), ("link", "Not a directory"), ("folder", "uid 0")]
)
def test_what_others_planted_is_named_and_left_alone(shared, kind, said):
    """At our home's name: trials read storage, a link is not followed, and neither staging nor cleaning touches anything."""
    home, trap = shared.root / store.home_name(USER), shared.folder / "trap"
    trap.mkdir(mode=0o777)
    {"file": home.touch, "link": lambda: home.symlink_to(trap), "folder": home.mkdir}[kind]()
    before = home.lstat()

    def act():
        checkpoint = shared.checkpoint()
        holding = precursor.stage_only(shared.spec(checkpoint))
        assert (holding.staged.rung, holding.staged.path) == ("storage", checkpoint.source)
        assert said in holding.staged.why
        (problem,) = store.clean_copies(shared.root, everything=True)["problems"]
        assert problem in holding.staged.why
        precursor.clear_weights(holding, "test")

    as_user(act)
    assert (home.lstat().st_ino, home.lstat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert list(trap.iterdir()) == []
    assert set(names(shared.root)) - {home.name} == {"foreign"}


# --- what a trial adds ------------------------------------------------------------------------------------------------

# One process makes the checkpoint, stages it and loads it: torch is imported once. Values do not matter, pages do.
TRIAL = """
import json, sys, torch, transformers
from pathlib import Path
from safetensors.torch import save_file
from coordinator.intake.checkpoint import inspect_checkpoint
from evaljobs.contract.specs import StageSpec
from evaljobs.staging import precursor
from evaljobs.staging.store import hold_for_reading

def anonymous():
    rows = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    return int(rows["Anonymous:"]) * 1024

folder, fields = Path(sys.argv[1]), json.loads(sys.argv[2])
config = transformers.LlamaConfig(vocab_size=16000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12,
                                  num_attention_heads=8, dtype="bfloat16", architectures=["LlamaForCausalLM"])
with torch.device("meta"):
    shapes = {k: v.shape for k, v in transformers.LlamaForCausalLM(config).state_dict().items()}
folder.mkdir()
config.save_pretrained(folder)
save_file({k: torch.zeros(s, dtype=torch.bfloat16) for k, s in shapes.items()}, folder / "model.safetensors",
          metadata={"format": "pt"})
(folder / "tokenizer.json").write_text("{}")
fields["checkpoint"] = inspect_checkpoint(folder).model_dump()
holding = precursor.stage_only(StageSpec.model_validate(fields))
assert holding.staged.rung == "shm", holding.staged.why
before = anonymous()
with hold_for_reading(holding.staged.path):
    model = transformers.LlamaForCausalLM.from_pretrained(holding.staged.path, dtype="auto")
    extra = anonymous() - before
size = sum(p.numel() * p.element_size() for p in model.parameters())
precursor.clear_weights(holding, "test")
print(json.dumps({"extra": extra, "size": size, "dtype": str(model.dtype)}))
"""


@pytest.mark.model
def test_a_trial_adds_at_most_a_tenth_of_the_model(world):
    """Anonymous memory (smaps_rollup) that loading adds is at most 0.10 of the model's bytes: weights are mapped."""
    fields = world.spec(world.checkpoint(size=100)).model_dump_json()
    argv = [sys.executable, "-c", TRIAL, str(world.folder / "model"), fields]
    done = subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dtype"] == "torch.bfloat16"
    assert found["size"] > 300e6
    assert found["extra"] <= 0.10 * found["size"], found
    assert world.nothing_left()
