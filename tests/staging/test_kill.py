"""A precursor that is killed leaves nothing that a trial could take for a checkpoint, and nothing for ever."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

from support.node_memory import NodeMemory, names

from evaljobs.staging import clean, precursor, store

RUNNER = str(Path(__file__).with_name("killed.py"))
POINTS = int(os.environ.get("EVALSPAN_KILL_POINTS", "12"))


def test_killed_anywhere_a_successor_completes_exactly_and_clean_leaves_nothing(
    world: NodeMemory, monkeypatch
) -> None:
    """After SIGKILL at any step: what is published is whole, the next precursor ends with the exact copy, clean cleans."""
    monkeypatch.setenv("PYTHONPATH", str(Path(RUNNER).parents[2]))
    checkpoint = world.checkpoint(shards=3, size=3 << 20)
    spec = world.spec(checkpoint)
    world.release()
    process = world.start(spec, runner=(RUNNER, "0"))
    output, errors = process.communicate(timeout=120)
    steps = int(output)
    assert process.returncode == 0, errors
    assert world.nothing_left()

    rng = random.Random(os.environ.get("EVALSPAN_KILL_SEED", "7"))
    for step in sorted(rng.sample(range(1, steps + 1), min(POINTS, steps))):
        process = world.start(spec, runner=(RUNNER, str(step)))
        process.communicate(timeout=120)
        # threads interleave: the count of a run may differ by a few, and the last steps may not be reached
        assert process.returncode in (-signal.SIGKILL, 0), f"step {step}"
        if (world.home / checkpoint.digest / store.MANIFEST).exists():
            assert world.copy_is_exact(checkpoint), f"step {step}: published, but not whole"
        if step % 2:
            holding = precursor.stage_only(spec)
            assert holding.staged.rung == "shm", f"step {step}: {holding.staged.why}"
            assert world.copy_is_exact(checkpoint), f"step {step}"
            precursor.clear(holding, "test")
        else:
            done = clean.clean(world.root)
            assert not done.problems, f"step {step}: {done.problems}"
        assert clean.clean(world.root).problems == ()
        assert world.nothing_left(), f"step {step}: {names(world.root)}"
