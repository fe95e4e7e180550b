"""Real checkpoints of a few megabytes, real precursors as processes, and a root of node memory of one's own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dev_cluster.testing import wait_until

from coordinator.intake.checkpoint import inspect_checkpoint
from evaljobs.contract.outcomes import OUTCOME, Staged
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import StageSpec
from evaljobs.contract.storage import write_atomic
from evaljobs.staging import store

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def safetensors(path, tensors):
    """Write a safetensors file of U8 tensors."""
    table, offset = {}, 0
    for name, data in tensors.items():
        table[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    raw = json.dumps(table).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(tensors.values()))


def make_checkpoint(folder, *, shards=3, size=2 * MIB, seed=0):
    """A sharded checkpoint (`shards=1`: a single file) of random bytes, with files that trainers leave beside it."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"o" * 1000)
    (folder / "trainer_state.json").write_text("{}")
    if shards == 1:
        safetensors(folder / "model.safetensors", {"t": rng.randbytes(size)})
        return folder
    index = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        safetensors(folder / name, {f"t{i}": rng.randbytes(size)})
        index[f"t{i}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def edit(path, place, data):
    """Write into a file in place; its size and mtime stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(path, place):
    """Flip a bit there; size and mtime stay."""
    edit(path, place, bytes([path.read_bytes()[place] ^ 1]))


def names(folder):
    """Sorted names in a folder."""
    return sorted(p.name for p in folder.iterdir())


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """An evaluation folder, and a root of node memory with a foreign file in it."""

    folder: Path
    root: Path

    @property
    def paths(self):
        return EvaluationPaths(self.folder / "evaluation")

    @property
    def home(self):
        return self.root / store.home_name(os.geteuid())

    def checkpoint(self, name="step-1", **options):
        return inspect_checkpoint(make_checkpoint(self.folder / name, **options))

    def spec(self, checkpoint, name="stage-a", **changes):
        for folder in self.paths.folders():
            folder.mkdir(parents=True, exist_ok=True)
        lease = self.folder / "lease"
        lease.touch()
        fields = {
            "name": name,
            "evaluation_dir": str(self.paths.root),
            "node": "n1",
            "checkpoint": checkpoint,
            "roots": (str(self.root),),
            "lease_file": str(lease),
            "readers": 4,
        }
        return StageSpec.model_validate(fields | changes)

    def start(self, spec, *, runner=("-m", "evaljobs", "stage")):
        """The precursor of `spec` as a process."""
        place = self.paths.spec(spec.name)
        place.write_text(spec.model_dump_json())
        return subprocess.Popen(
            [sys.executable, *runner, str(place)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def outcome(self, kind, name="stage-a"):
        place = self.paths.outcome(kind, name)
        return OUTCOME.validate_json(place.read_bytes()) if place.exists() else None

    def staged(self, name="stage-a"):
        wait_until(lambda: self.outcome("staged", name) or self.outcome("failed", name))
        found = self.outcome("staged", name)
        assert isinstance(found, Staged), self.outcome("failed", name)
        return found

    def release(self, name="stage-a"):
        """As the coordinator does."""
        write_atomic(self.paths.release_file(name), b"")

    def copy_is_exact(self, checkpoint):
        model = self.home / checkpoint.digest / store.MODEL
        return all(
            (model / f.name).read_bytes() == (Path(checkpoint.source) / f.name).read_bytes()
            for f in checkpoint.files
        )

    def nothing_left(self):
        """Whether the root holds the foreign file alone, as it was."""
        return names(self.root) == ["foreign"] and (self.root / "foreign").read_text() == "not ours"
