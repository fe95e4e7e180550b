"""What the bench's trials run in the place of `python`: evaljobs' own trial, with a model that sleeps and looks its answers up.

$BENCH_ANSWERS: JSON with `seconds` (of one generation, and of one likelihood) and `answers` (prompt → completion).
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from evaljobs.__main__ import main
from evaljobs.contract.specs import ModelOptions
from evaljobs.lmeval.batches import Batch
from evaljobs.trial import engine

_GIVEN: dict[str, Any] = {}


def load(
    _path: str,
    _options: ModelOptions,
    _size: int | str,
    *,
    phase: Callable[[str], None] = lambda _phase: None,
) -> engine.Loaded:
    phase("load")
    _GIVEN.update(json.loads(Path(os.environ["BENCH_ANSWERS"]).read_text()))
    return engine.Loaded(lm=None, devices="table", gpus=1, import_seconds=0.0, load_seconds=0.0)


def seed_batch(_seed: int, _key: str, _number: int) -> None:
    """Nothing is drawn."""


def run_batch(_lm: Any, batch: Batch) -> list[tuple[int, Any]]:
    time.sleep(
        _GIVEN["seconds"]["generate" if batch.kind == "generate_until" else "likelihood"] * len(batch.pieces)
    )
    if batch.kind == "generate_until":
        return [(p.index, _GIVEN["answers"].get(p.context, "an answer")) for p in batch.pieces]
    noise = [zlib.crc32(repr((p.context, p.continuation)).encode()) / 2**32 for p in batch.pieces]
    if batch.kind == "loglikelihood":
        return [(p.index, [-x, False]) for p, x in zip(batch.pieces, noise, strict=True)]
    return [(p.index, -x if batch.text else [p.window, -x]) for p, x in zip(batch.pieces, noise, strict=True)]


engine.load, engine.seed_batch, engine.run_batch = load, seed_batch, run_batch

sys.exit(main(sys.argv[3:]))  # node.py -m evaljobs trial SPEC
