"""scripts/bench_fast MODEL_DIR --data DIR: what fast mode saves on few-shot likelihoods, and how close it stays.

Four parts (`--parts`), on the CPU with one thread:
tokens   tokens computed over the fewest possible (the trie of all requests), of all documents; no model
seconds  units against exact's batches, taken in turn: the ratio of seconds over that of tokens
float32  the model cut to four layers, 2,000 short documents: worst difference, same choice of each document
bfloat16 mean distance of fast from float32, over that of lm-eval's own at batch sizes 1, 8, 32
DIR holds rows of HellaSwag, ARC, WinoGrande and MMLU as NAME.jsonl.gz (`bench.few_shot`). Exit status 1 where a target
is missed. About an hour with the default limits.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import few_shot
from bench.harness import Options, command, option, row, say, targets
from evaljobs.contract.names import Cut
from evaljobs.contract.specs import BuildSpec, ModelOptions, SuiteSpec, TaskEntry
from evaljobs.lmeval import run, tries
from evaljobs.lmeval.batches import Piece, RequestsHead, chunks
from evaljobs.requests.build import build, read_requests
from evaljobs.requests.units import cut_requests

PARTS = ("tokens", "seconds", "float32", "bfloat16")
SHORT_TOKENS = 160  # of a request of a short document
Answers = dict[int, tuple[float, bool]]
Set = tuple[RequestsHead, list[Piece]]


def sets_of(options: Options, name: str, folder: Path) -> list[Set]:
    """The requests of a task's leaves, built by the product from the rows in `folder`."""
    suite = SuiteSpec(name="fast", include_path=(str(folder),), batch_size=8, tasks=(TaskEntry(name=name),))
    spec = BuildSpec(
        name="build",
        evaluation_dir=None,
        suite=suite,
        entry=0,
        batch_size="auto",
        model_dir=str(options.model_dir),
        model=ModelOptions(device="cpu"),
        out_dir=str(folder / "work" / "request_sets" / name),
    )
    return [read_requests(Path(place)) for place in build(spec).sets.values()]


# --- tokens ------------------------------------------------------------------------------------------------------


def counted(sets: Sequence[Set], cut: Cut) -> dict[str, int]:
    """Tokens of a task: asked one by one, computed by exact's batches, by units, and the fewest possible."""
    found: dict[str, int] = defaultdict(int)
    for head, pieces in sets:
        inputs = sorted(tries.input_of(piece, head.max_length) for piece in pieces)
        found["minimum"] += tries.size(inputs)
        found["asked"] += sum(map(len, inputs))
        found["exact"] += sum(tokens for _, tokens, _ in chunks(head, pieces, cut.batch_size))
        units = list(cut_requests(head, pieces, cut))
        found["fast"] += sum(tokens for _, tokens, _ in units)
        found["fast"] += max(batch.unit.prefix for batch, _, _ in units if batch.unit is not None)
        found["units"] += len(units)
    return dict(found)


def measure_tokens(options: Options, folder: Path) -> Iterator[dict[str, Any]]:
    few_shot.write(options.data, folder, options.limit)
    for task in few_shot.TASKS:
        for sampler, name in few_shot.names(task).items():
            found = counted(sets_of(options, name, folder), options.cut)
            say(f"{name}: {found}")
            yield row(
                f"{task}, {sampler}: tokens computed / fewest possible",
                found["fast"] / found["minimum"],
                1.05,
                exact_over_fast=found["exact"] / found["fast"],
                **found,
            )


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    run.quiet_environment(offline=True)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="evalspan-bench-") as made,
        contextlib.redirect_stdout(sys.stderr),
    ):
        if "tokens" in options.parts:
            rows += measure_tokens(options, Path(made) / "all")
    return targets(rows, model=str(options.model_dir), cut=str(options.cut))


OPTIONS = (
    option("model_dir", type=Path),
    option("--data", type=Path, text="folder of NAME.jsonl.gz"),
    option("--parts", list(PARTS), type=str, nargs="+"),
    option("--limit", type=int, text="rows of each task in `tokens`; all if not given"),
    option("--cut", Cut(8, 8192), "of fast mode; exact's batch size is its last number", type=Cut.parse),
)
if __name__ == "__main__":
    sys.exit(command("bench_fast", __doc__, measure, *OPTIONS))
