"""A trial that loads staged weights at their own dtype shares the node's copy of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.node_memory import ROOT, NodeMemory

# One process makes the checkpoint, stages it and loads it: torch is imported once. Values do not matter, pages do.
TRIAL = """
import json, sys, torch, transformers
from pathlib import Path
from safetensors.torch import save_file
from coordinator.intake.checkpoint import inspect
from evaljobs.contract.specs import StageSpec
from evaljobs.staging import precursor
from evaljobs.staging.store import reading

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
checkpoint = inspect(folder)
holding = precursor.stage_only(StageSpec.model_validate(fields | {"checkpoint": checkpoint.model_dump()}))
assert holding.staged.rung == "shm", holding.staged.why
before = anonymous()
with reading(holding.staged.path):
    model = transformers.LlamaForCausalLM.from_pretrained(holding.staged.path, dtype="auto")
    extra = anonymous() - before
size = sum(p.numel() * p.element_size() for p in model.parameters())
precursor.clear(holding, "test")
print(json.dumps({"extra": extra, "size": size, "dtype": str(model.dtype)}))
"""


@pytest.mark.model
def test_a_trial_adds_at_most_a_tenth_of_the_model(world: NodeMemory) -> None:
    """Anonymous memory (smaps_rollup) that loading adds is at most 0.10 of the model's bytes: weights are mapped."""
    fields = {
        "name": "a",
        "evaluation_dir": str(world.folder),
        "node": "n1",
        "roots": [str(world.root)],
        "lease_file": str(world.folder / "lease"),
    }
    done = subprocess.run(
        [sys.executable, "-c", TRIAL, str(world.folder / "model"), json.dumps(fields)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dtype"] == "torch.bfloat16"
    assert found["size"] > 300e6
    assert found["extra"] <= 0.10 * found["size"], found
    assert world.nothing_left()
