"""scripts/bench_exactness MODEL_DIR: is every score of a real model lm-eval's own, for any sharding?

Runs each task through lm-eval and through evalspan's node side in this process, on the CPU, and compares results,
standard errors and every sample: a row for each task, batch size and number of shards. Exit status 1 where a row is not
equal. About 20 minutes for SmolLM2-135M on two cores with the default limits.

With --wrong-weights, instead: how a trial finds each kind of wrong checkpoint (`bench.wrong_weights`), which takes minutes.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.exactness.pipeline import Case, lm_eval_run, our_run

from bench.harness import ROOT, Options, command, option, say
from evaljobs.contract.specs import ModelOptions
from evaljobs.lmeval import quiet_environment
from evaljobs.trial.engines import loading

SHIPPED = str(ROOT / "evaljobs" / "suites" / "quickstart")


def cases(limit: int, dtype: str) -> dict[str, Case]:
    """The kinds of task whose equality is claimed, on real rows where the product ships them."""

    def toy(name: str, documents: int = limit, **entry: Any) -> Case:
        return Case(task=f"toy_{name}", entry={"limit": documents, **entry}, model_args={"dtype": dtype})

    def real(name: str, documents: int = limit, tokens: int | None = None, **suite: Any) -> Case:
        entry = {"limit": documents} | ({"gen_kwargs": {"max_gen_toks": tokens}} if tokens else {})
        how = {"entry": entry, "suite": suite, "model_args": {"dtype": dtype}}
        return Case(task=f"quickstart_{name}", include_path=SHIPPED, **how)

    return {
        "mmlu": real("mmlu", 4 * limit),
        "hellaswag, acc_norm": real("hellaswag"),
        "gsm8k, two filters": real("gsm8k", tokens=24),
        "gsm8k, chat template": real("gsm8k", tokens=24, apply_chat_template=True),
        "HumanEval": real("humaneval", tokens=48),
        "5-shot": toy("choice", num_fewshot=5),
        "acc_mutual_info": toy("mutual"),
        "repeats 3, two filters": toy("sums"),
        "rolling perplexity": toy("pages", 6),
    }


def rows_of(name: str, case: Case, options: Options, batch_size: int) -> Iterator[dict[str, Any]]:
    theirs = lm_eval_run(options.model_dir, case, batch_size, options.threads)
    model = ModelOptions(device="cpu", threads=options.threads, model_args=case.model_args)
    engine = loading.load_engine(str(options.model_dir), model, batch_size)
    for shards in options.shards:
        with tempfile.TemporaryDirectory(prefix="evalspan-bench-") as made:
            how = {"engine": engine, "threads": options.threads}
            ours = our_run(options.model_dir, case, batch_size, shards, Path(made), **how)
        pairs = [
            pair for t, lines in theirs.samples.items() for pair in zip(ours.samples[t], lines, strict=True)
        ]
        counted = {"samples": len(pairs), "unequal_samples": sum(a != b for a, b in pairs)}
        yield {"task": name, "batch_size": batch_size, "shards": shards, "equal": ours == theirs, **counted}


def wrong_weights(options: Options) -> tuple[dict[str, Any], bool]:
    from bench import wrong_weights as kinds  # noqa: PLC0415 (imports torch)

    found: dict[str, list[str]] = {}
    unexpected: list[str] = []
    with tempfile.TemporaryDirectory(prefix="evalspan-bench-", dir=options.scratch) as scratch:
        for row in kinds.rows(options.model_dir, Path(scratch), options.dtype, options.tasks or ()):
            say(json.dumps(row))
            found.setdefault(row["found_by"], []).append(row["kind"])
            unexpected += [row["kind"]] if not row["expected"] else []
    counts = {how: len(rows) for how, rows in found.items()}
    figures = {"model": str(options.model_dir), "dtype": options.dtype, **counts}
    return {**figures, "found_by": found, "unexpected": unexpected}, not unexpected


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    quiet_environment(offline=True)
    if options.wrong_weights:
        return wrong_weights(options)
    rows: list[dict[str, Any]] = []
    for name, case in cases(options.limit, options.dtype).items():
        for batch_size in options.batch_sizes:
            if not options.tasks or any(word in name for word in options.tasks):
                with contextlib.redirect_stdout(sys.stderr):  # lm-eval prints what it bootstraps
                    rows += rows_of(name, case, options, batch_size)
                say(json.dumps(rows[-1]))
    counts = {"equal": sum(row["equal"] for row in rows), "of": len(rows)}
    equal = counts["equal"] == counts["of"]
    return {"model": str(options.model_dir), **counts, "unequal": [r for r in rows if not r["equal"]]}, equal


OPTIONS = (
    option("model_dir", type=Path),
    option("--batch-sizes", [1, 8], type=int, nargs="+"),
    option("--shards", [1, 3, 7], type=int, nargs="+"),
    option("--limit", 10, "documents per task (four times as many of mmlu)"),
    option("--threads", 2),
    option("--dtype", "float32", "many CPUs are slow at the checkpoint's own bfloat16"),
    option(
        "--wrong-weights", False, "find wrong checkpoints, in place of comparing scores", action="store_true"
    ),
    option("--scratch", text="folder for damaged copies", type=Path),
    option("--tasks", text="only cases or kinds whose name holds one of these", nargs="*", type=str),
)
if __name__ == "__main__":
    sys.exit(command("bench_exactness", __doc__, measure, *OPTIONS))
