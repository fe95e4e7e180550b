"""scripts/bench_fast MODEL_DIR --data DIR: what fast mode saves on few-shot likelihoods, and how close it stays.

Three parts (`--parts`), on the CPU with one thread:
saved    tokens computed over the fewest possible (the trie of all requests), of all documents; then units against exact's
         batches, taken in turn: the ratio of seconds over that of tokens
float32  the model cut to four layers, 2,000 short documents: worst difference, same choice of each document
bfloat16 mean distance of fast from float32, over that of lm-eval's own at batch sizes 1, 8, 32
DIR holds rows of HellaSwag, ARC, WinoGrande and MMLU as NAME.jsonl.gz (`bench.few_shot`). Exit status 1 where a target
is missed. About an hour with the default limits.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import few_shot
from bench.harness import Options, RunError, command, option, row, say, targets
from evaljobs.contract.names import Cut
from evaljobs.contract.specs import BuildSpec, ModelOptions, SuiteSpec, TaskEntry
from evaljobs.lmeval import prefix_tries, quiet_environment
from evaljobs.lmeval.batches import Chunk, Piece, RequestsHead, batch_chunks
from evaljobs.requests.build import build_request_sets, read_requests
from evaljobs.requests.units import cut_requests
from evaljobs.trial.engines import loading
from evaljobs.trial.engines.harness import HarnessEngine

CUT = Cut(8, 8192)  # of fast mode; exact's batch size is its first number
Answers = dict[int, Any]  # request -> [log-likelihood, whether greedy]
Set = tuple[RequestsHead, list[Piece]]
Rows = Iterator[dict[str, Any]]


# --- requests and answers ---------------------------------------------------------------------------------------------


def sets_of(options: Options, name: str, folder: Path, shots: int | None = None) -> list[Set]:
    """The requests of a task's leaves, built by the product from the rows in `folder`."""
    entry = TaskEntry(name=name, num_fewshot=shots)
    suite = SuiteSpec(name="fast", include_path=(str(folder),), batch_size=8, tasks=(entry,))
    model = {"model_dir": str(options.model_dir), "model": ModelOptions(device="cpu")}
    out = str(folder / "work" / "request_sets" / name)
    about = {"evaluation_dir": None, "suite": suite, "entry": 0, "batch_size": "auto", "out_dir": out}
    made = build_request_sets(BuildSpec(name="build", **about, **model)).sets
    return [read_requests(Path(place)) for place in made.values()]


def engine_of(options: Options, **model_args: Any) -> HarnessEngine:
    """Of the checkpoint, in float32 unless another `dtype` is given."""
    args = {"dtype": "float32"} | model_args
    model = ModelOptions(device="cpu", threads=1, model_args=args)
    engine = loading.load_engine(str(options.model_dir), model, CUT.batch_size)
    assert isinstance(engine, HarnessEngine)
    return engine


def of_documents(one: Set, chosen: Collection[int]) -> Set:
    return one[0], [piece for piece in one[1] if piece.document in chosen]


def tokens_of(made: Sequence[Chunk]) -> int:
    """Tokens computed by these batches or units, with the task prefix."""
    prefix = max((batch.unit.prefix for batch, _, _ in made if batch.unit is not None), default=0)
    return sum(tokens for _, tokens, _ in made) + prefix


def answered(engine: HarnessEngine, one: Set, batch_size: int = 0) -> tuple[Answers, float, int]:
    """Answers by request, the CPU seconds of this process, the tokens computed.

    With a batch size: lm-eval's own chunks through its own class. Without: units, as the first shard of a trial computes
    them: with the task prefix.
    """
    made = list(batch_chunks(*one, batch_size) if batch_size else cut_requests(*one, CUT))
    if not batch_size and engine._fast is not None:  # noqa: SLF001
        engine._fast._prefix = None  # noqa: SLF001
    batches, started = [batch for batch, _, _ in made], time.process_time()
    found = dict(engine.answers(batches, [0] * len(batches), lambda _done: None))
    spent = time.process_time() - started
    if not batch_size and engine.loaded.fast:
        raise RunError(f"the model's likelihoods go lm-eval's way: {engine.loaded.fast}")
    return found, spent, tokens_of(made)


# --- tokens and seconds -----------------------------------------------------------------------------------------------


def saved(options: Options, folder: Path) -> Rows:
    """Of each task and sampler; the leaf with the most documents stands for MMLU's seconds."""
    few_shot.write(options.data, folder, options.limit)
    engine = engine_of(options)
    for task in few_shot.TASKS:
        for sampler, name in few_shot.names(task).items():
            sets = sets_of(options, name, folder)
            fewest = exact = ours = 0
            for head, pieces in sets:
                fewest += prefix_tries.trie_size(
                    sorted(prefix_tries.input_of(piece, head.max_length) for piece in pieces)
                )
                exact += tokens_of(list(batch_chunks(head, pieces, CUT.batch_size)))
                ours += tokens_of(list(cut_requests(head, pieces, CUT)))
            what = f"{task}, {sampler}: tokens computed / fewest possible"
            yield row(what, ours / fewest, 1.05, exact_over_fast=exact / ours)
            one = of_documents(max(sets, key=lambda s: len(s[1])), range(options.documents))
            answered(engine, of_documents(one, {0}))  # the probe, and what loads at first
            ratios = []
            for _ in range(options.rounds):
                (_, theirs, long), (_, own, short) = (
                    answered(engine, one, CUT.batch_size),
                    answered(engine, one),
                )
                ratios.append(theirs / own)
            spent, counted = statistics.median(ratios), long / short
            more = {"seconds_exact_over_fast": spent, "tokens_exact_over_fast": counted}
            what = f"{task}, {sampler}: ratio of seconds / ratio of tokens"
            yield row(what, spent / counted, 0.8, at_least=True, **more)


# --- closeness --------------------------------------------------------------------------------------------------------


def short_documents(options: Options, folder: Path, number: int) -> list[Set]:
    """One-shot ARC-Challenge and WinoGrande with a fixed example: `number` documents in all."""
    few_shot.write(options.data, folder, None)
    found, left = [], number
    for task in ("arc_challenge", "winogrande"):
        (one,) = sets_of(options, few_shot.names(task)["first_n"], folder, shots=1)
        documents = sorted({piece.document for piece in one[1]})[: left if found else -(-left * 3 // 5)]
        found.append(of_documents(one, set(documents)))
        left -= len(documents)
    return found


def choices(one: Set, answers: Answers) -> dict[int, int]:
    """The likeliest request of each document, the first of several."""
    found: dict[int, int] = {}
    for piece in sorted(one[1], key=lambda piece: -answers[piece.index][0]):
        found.setdefault(piece.document, piece.index)
    return found


def apart(ours: Sequence[Answers], theirs: Sequence[Answers]) -> list[float]:
    """Distances of log-likelihoods."""
    pairs = zip(ours, theirs, strict=True)
    return [abs(own[n][0] - their[n][0]) for own, their in pairs for n in their]


def float32(options: Options, folder: Path) -> Rows:
    engine = engine_of(options, num_hidden_layers=4)  # transformers leaves the others out
    sets = short_documents(options, folder, options.short)
    exact = [answered(engine, one, CUT.batch_size)[0] for one in sets]
    ours = [answered(engine, one)[0] for one in sets]
    yield row("float32, four layers: worst difference of a log-likelihood", max(apart(ours, exact)), 1e-3)
    chosen = [[choices(*pair) for pair in zip(sets, each, strict=True)] for each in (ours, exact)]
    same = [own[n] == their[n] for own, their in zip(*chosen, strict=True) for n in their]
    what = "float32, four layers: documents of the same choice"
    yield row(what, statistics.mean(same), 0.9995, at_least=True, documents=len(same))


def bfloat16(options: Options, folder: Path) -> Rows:
    sets = short_documents(options, folder, options.documents)
    plain, engine = engine_of(options), engine_of(options, dtype="bfloat16")
    true = [answered(plain, one, 8)[0] for one in sets]
    ours = statistics.mean(apart([answered(engine, one)[0] for one in sets], true))
    for size in (1, 8, 32):
        theirs = statistics.mean(apart([answered(engine, one, size)[0] for one in sets], true))
        what = f"bfloat16: mean distance from float32 over lm-eval's at batch size {size}"
        yield row(what, ours / theirs, 1.1)


PARTS = {"saved": saved, "float32": float32, "bfloat16": bfloat16}


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    quiet_environment(offline=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made, contextlib.redirect_stdout(sys.stderr):
        for part in options.parts:
            for found in PARTS[part](options, Path(made) / part):
                say(json.dumps(found))
                rows.append(found)
    return targets(rows, model=str(options.model_dir))


OPTIONS = (
    option("model_dir", type=Path),
    option("--data", type=Path, text="folder of NAME.jsonl.gz"),
    option("--parts", list(PARTS), type=str, nargs="+", choices=PARTS),
    option("--limit", type=int, text="rows of each task in `saved`; all if not given"),
    option("--documents", 20, "of each task whose seconds count, in all in `bfloat16`"),
    option("--short", 2000, "documents in `float32`"),
    option("--rounds", 3, "of seconds"),
)
if __name__ == "__main__":
    sys.exit(command("bench_fast", __doc__, measure, *OPTIONS))
