"""scripts/bench_exactness MODEL_DIR: is every score of a real model lm-eval's own, for any sharding?

Runs each task through lm-eval and through evalspan's node side in this process, on the CPU, and compares results,
standard errors and every sample: a row for each task, batch size and number of shards. Exit status 1 where a row is not
equal. About 20 minutes for SmolLM2-135M on two cores with the default limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.exactness.pipeline import Case, lm_eval_run, our_run

from bench.harness import ROOT, Options, command, option, say
from evaljobs.contract.specs import ModelOptions
from evaljobs.lmeval import run
from evaljobs.trial.engines import loading


def cases(limit: int) -> dict[str, Case]:
    """The kinds of task whose equality is claimed, on real rows where the product ships them."""

    def real(name: str, documents: int = limit, tokens: int | None = None, **suite: Any) -> Case:
        entry = {"limit": documents} | ({"gen_kwargs": {"max_gen_toks": tokens}} if tokens else {})
        folder = str(ROOT / "evaljobs" / "suites" / "quickstart")
        return Case(task=f"quickstart_{name}", include_path=folder, entry=entry, suite=suite)

    return {
        "mmlu": real("mmlu", 4 * limit),
        "hellaswag, acc_norm": real("hellaswag"),
        "gsm8k, two filters": real("gsm8k", tokens=24),
        "gsm8k, chat template": real("gsm8k", tokens=24, apply_chat_template=True),
        "HumanEval": real("humaneval", tokens=48),
        "5-shot": Case(task="toy_choice", entry={"num_fewshot": 5, "limit": limit}),
        "acc_mutual_info": Case(task="toy_mutual", entry={"limit": limit}),
        "repeats 3, two filters": Case(task="toy_sums", entry={"limit": limit}),
        "rolling perplexity": Case(task="toy_pages", entry={"limit": 6}),
    }


def rows_of(name: str, case: Case, options: Options, batch_size: int) -> list[dict[str, Any]]:
    started = time.monotonic()
    theirs = lm_eval_run(options.model_dir, case, batch_size, options.threads)
    baseline = time.monotonic() - started
    model = ModelOptions(device="cpu", threads=options.threads, model_args=case.model_args)
    engine = loading.load(str(options.model_dir), model, batch_size)
    rows = []
    for shards in options.shards:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="evalspan-bench-") as made:
            folder = Path(made)
            ours = our_run(
                options.model_dir, case, batch_size, shards, folder, engine=engine, threads=options.threads
            )
        pairs = [
            pair for t, lines in theirs.samples.items() for pair in zip(ours.samples[t], lines, strict=True)
        ]
        row = {
            "task": name,
            "batch_size": batch_size,
            "shards": shards,
            "equal": ours == theirs,
            "samples": len(pairs),
            "unequal_samples": sum(a != b for a, b in pairs),
            "results_equal": ours.results == theirs.results,
            "lm_eval_seconds": round(baseline, 1),
            "evalspan_seconds": round(time.monotonic() - started, 1),
        }
        rows.append(row)
        say(json.dumps(row))
    return rows


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    run.quiet_environment(offline=True)
    rows: list[dict[str, Any]] = []
    for name, kind in cases(options.limit).items():
        if options.tasks and not any(word in name for word in options.tasks):
            continue
        case = dataclasses.replace(kind, model_args={"dtype": options.dtype})
        for batch_size in options.batch_sizes:
            with contextlib.redirect_stdout(sys.stderr):  # lm-eval prints what it bootstraps
                rows += rows_of(name, case, options, batch_size)
    equal = all(row["equal"] for row in rows)
    return {"model": str(options.model_dir), "all_equal": equal, "rows": rows}, equal


OPTIONS = (
    option("model_dir", type=Path),
    option("--batch-sizes", [1, 8], type=int, nargs="+"),
    option("--shards", [1, 3, 7], type=int, nargs="+"),
    option("--limit", 10, "documents per task (four times as many of mmlu)"),
    option("--threads", 2),
    option("--dtype", "float32", "many CPUs are slow at the checkpoint's own bfloat16"),
    option("--tasks", text="only cases whose name holds one of these", nargs="*", type=str),
)
if __name__ == "__main__":
    sys.exit(command("bench_exactness", __doc__, measure, *OPTIONS))
