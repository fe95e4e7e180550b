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
from evaljobs.lmeval import run, tries
from evaljobs.lmeval.batches import Chunk, Piece, RequestsHead, chunks
from evaljobs.requests.build import build, read_requests
from evaljobs.requests.units import cut_requests
from evaljobs.trial.engines import loading
from evaljobs.trial.engines.harness import HarnessEngine

CUT = Cut(8, 8192)  # of fast mode; exact's batch size is its first number
Answers = dict[int, Any]  # request -> [log-likelihood, whether greedy]
Set = tuple[RequestsHead, list[Piece]]


# --- requests and answers ---------------------------------------------------------------------------------------------


def sets_of(options: Options, name: str, folder: Path, shots: int | None = None) -> list[Set]:
    """The requests of a task's leaves, built by the product from the rows in `folder`."""
    entry = TaskEntry(name=name, num_fewshot=shots)
    suite = SuiteSpec(name="fast", include_path=(str(folder),), batch_size=8, tasks=(entry,))
    model = {"model_dir": str(options.model_dir), "model": ModelOptions(device="cpu")}
    out = str(folder / "work" / "request_sets" / name)
    about = {"evaluation_dir": None, "suite": suite, "entry": 0, "batch_size": "auto", "out_dir": out}
    return [
        read_requests(Path(place)) for place in build(BuildSpec(name="build", **about, **model)).sets.values()
    ]


def engine_of(model_dir: Path, dtype: str = "float32") -> HarnessEngine:
    options = ModelOptions(device="cpu", threads=1, model_args={"dtype": dtype})
    engine = loading.load(str(model_dir), options, 8)
    assert isinstance(engine, HarnessEngine)
    return engine


def cut_to_layers(model_dir: Path, layers: int, folder: Path) -> Path:
    """The checkpoint with its first layers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)
    return folder


def of_documents(one: Set, chosen: Collection[int]) -> Set:
    return one[0], [piece for piece in one[1] if piece.document in chosen]


def tokens_of(made: Sequence[Chunk]) -> int:
    """Tokens computed by these batches or units, with the task prefix."""
    prefix = max((batch.unit.prefix for batch, _, _ in made if batch.unit is not None), default=0)
    return sum(tokens for _, tokens, _ in made) + prefix


def answered(engine: HarnessEngine, made: Sequence[Chunk]) -> tuple[Answers, float, int]:
    """Answers by request, the CPU seconds of this process, the tokens computed."""
    batches = [batch for batch, _, _ in made]
    started = time.process_time()
    pairs = engine.answers(batches, [0] * len(batches), lambda _done: None)
    return dict(pairs), time.process_time() - started, tokens_of(made)


def exactly(engine: HarnessEngine, one: Set, batch_size: int) -> tuple[Answers, float, int]:
    """lm-eval's own chunks through lm-eval's own class: the digits of `lm_eval` at this batch size."""
    return answered(engine, list(chunks(*one, batch_size)))


def fast(engine: HarnessEngine, one: Set) -> tuple[Answers, float, int]:
    """Units, as the first shard of a trial computes them: with the task prefix."""
    if engine._fast is not None:  # noqa: SLF001
        engine._fast._prefix = None  # noqa: SLF001
    found = answered(engine, list(cut_requests(*one, CUT)))
    if engine.loaded.fast:
        raise RunError(f"the model's likelihoods go lm-eval's way: {engine.loaded.fast}")
    return found


# --- tokens and seconds -----------------------------------------------------------------------------------------------


def saved(options: Options, folder: Path) -> Iterator[dict[str, Any]]:
    """Of each task and sampler; the leaf with the most documents stands for MMLU's seconds."""
    few_shot.write(options.data, folder, options.limit)
    engine = engine_of(options.model_dir)
    for task in few_shot.TASKS:
        for sampler, name in few_shot.names(task).items():
            sets = sets_of(options, name, folder)
            fewest = exact = ours = 0
            for head, pieces in sets:
                fewest += tries.size(sorted(tries.input_of(piece, head.max_length) for piece in pieces))
                exact += tokens_of(list(chunks(head, pieces, CUT.batch_size)))
                ours += tokens_of(list(cut_requests(head, pieces, CUT)))
            what = f"{task}, {sampler}: tokens computed / fewest possible"
            yield row(what, ours / fewest, 1.05, exact_over_fast=exact / ours)
            one = of_documents(max(sets, key=lambda s: len(s[1])), range(options.documents))
            fast(engine, of_documents(one, {0}))  # the probe, and what loads at first
            runs = [
                (exactly(engine, one, CUT.batch_size)[1:], fast(engine, one)[1:])
                for _ in range(options.rounds)
            ]
            spent = statistics.median(theirs[0] / own[0] for theirs, own in runs)
            counted = runs[0][0][1] / runs[0][1][1]
            what = f"{task}, {sampler}: ratio of seconds / ratio of tokens"
            more = {"seconds_exact_over_fast": spent, "tokens_exact_over_fast": counted}
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


def float32(options: Options, folder: Path) -> Iterator[dict[str, Any]]:
    engine = engine_of(cut_to_layers(options.model_dir, 4, folder / "cut"))
    worst, same, documents = 0.0, 0, 0
    for one in short_documents(options, folder / "short", options.short):
        exact = exactly(engine, one, CUT.batch_size)[0]
        ours = fast(engine, one)[0]
        worst = max(worst, *(abs(exact[n][0] - ours[n][0]) for n in exact))
        theirs, chosen = choices(one, exact), choices(one, ours)
        same += sum(chosen[document] == choice for document, choice in theirs.items())
        documents += len(theirs)
    yield row("float32, four layers: worst difference of a log-likelihood", worst, 1e-3)
    what = "float32, four layers: documents of the same choice"
    yield row(what, same / documents, 0.9995, at_least=True, documents=documents)


def bfloat16(options: Options, folder: Path) -> Iterator[dict[str, Any]]:
    sets = short_documents(options, folder, options.documents)
    plain = engine_of(options.model_dir)
    true = [exactly(plain, one, 8)[0] for one in sets]
    engine = engine_of(options.model_dir, "bfloat16")

    def distance(answers: Sequence[Answers]) -> float:
        """Mean over all requests."""
        pairs = zip(answers, true, strict=True)
        return statistics.mean(abs(own[n][0] - exact[n][0]) for own, exact in pairs for n in exact)

    ours = distance([fast(engine, one)[0] for one in sets])
    for size in (1, 8, 32):
        theirs = distance([exactly(engine, one, size)[0] for one in sets])
        yield row(
            f"bfloat16: mean distance from float32 over lm-eval's at batch size {size}", ours / theirs, 1.1
        )


PARTS = {"saved": saved, "float32": float32, "bfloat16": bfloat16}


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    run.quiet_environment(offline=True)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="evalspan-bench-") as made,
        contextlib.redirect_stdout(sys.stderr),
    ):
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
