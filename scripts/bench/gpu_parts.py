"""The parts of scripts/bench_gpu: each runs users' commands, `evalspan eval` and `lm_eval run`, and gives rows of the table.

Rule: a part that cannot run here gives the reason instead; one that fails raises RunError or subprocess.TimeoutExpired.
A row with `met` false has other digits than lm-eval's where those are due. `given`: see `gpu.measure`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from support.exactness import tiny_model

from bench import staging
from bench.harness import ROOT, Options, RunError
from coordinator.intake.checkpoint import inspect
from evaljobs.contract.paths import WorkPaths
from evaljobs.staging import precursor
from priors import table

TASKS = ROOT / "evaljobs" / "suites" / "quickstart"
KINDS = ("quickstart_mmlu", "quickstart_gsm8k", "bench_pages", "quickstart_hellaswag")
LIKELIHOODS = (KINDS[0], KINDS[-1])
SHAPES: dict[
    bool, dict[str, int]
] = {  # in small or not: LlamaConfig's fields; the large one has 1 billion parameters
    True: {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocabulary": 4096},
    False: {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocabulary": 32768,
    },
}
Row = dict[str, Any]


def seen(what: str, seconds: float | None = None, figure: str = "", **more: Any) -> Row:
    """A row of the table."""
    return {"what": what, "seconds": seconds, "figure": figure, **more}


# --- the two commands ------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """What a command gave. `answers`: (task, document) -> the values of its answers, as the samples hold them.

    `learnt`: of evalspan, what its priors learnt: task -> (seconds of inference, padded prompt tokens).
    """

    wall: float
    scores: dict[str, dict[str, float]]
    answers: dict[tuple[str, int], list[str]]
    learnt: Mapping[str, tuple[float, int]] = {}

    def row(self, what: str) -> Row:
        seconds, tokens = (sum(each[i] for each in self.learnt.values()) for i in range(2))
        known = f"inference {seconds:.2f} s, {tokens:,} prompt tokens" if self.learnt else ""
        return seen(what, self.wall, known, learnt=self.learnt)


def suite(given: Options, name: str, kinds: Sequence[str] = KINDS, shots: int = 0, **settings: Any) -> Path:
    """A suite file in a new folder of this name, with all tasks' files beside it."""
    folder = Path(given.folder) / name
    shutil.copytree(TASKS, folder / "tasks")
    shutil.copy(Path(__file__).with_name("pages.yaml"), folder / "tasks")
    for file in (folder / "tasks").glob("*.yaml"):  # lm-eval changes no 0 of a task's own by a setting
        file.write_text(file.read_text().replace("num_fewshot: 0", f"num_fewshot: {shots}"))
    lines = ['name = "bench"', f"include_path = [{json.dumps(str(folder / 'tasks'))}]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    for kind in kinds:
        lines += ["[[task]]", f'name = "{kind}"', f"limit = {given.limit}"]
    (folder / "bench.toml").write_text("\n".join(lines) + "\n")
    return folder / "bench.toml"


def evalspan(given: Options, file: Path, *flags: str, gpus: int = 1, **trial: str) -> Ran:
    """`evalspan eval` of a suite file in one trial, in a work folder beside it. `trial`: settings of [trial], as TOML."""
    weights = sum(place.stat().st_size for place in Path(given.model).glob("*.safetensors"))
    own = {"device": f'"{given.device}"', "gpus_per_trial": gpus, "memory_mb": 8000 + weights // 500_000}
    own |= {"threads": 1} if given.device == "cpu" else {}
    config, work = file.with_name("evalspan.toml"), file.with_name("work")
    lines = [f"[stage]\nroots = [{json.dumps(given.memory)}]\n[trial]"]
    config.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in (own | trial).items())]))
    words = ["eval", given.model, "--suite", file, "--work-dir", work, "--config", config, "--slots", gpus]
    wall = timed_command(given, "evalspan", [*words, *flags], work.with_suffix(".log"))
    known = table.read(WorkPaths(work).observations)
    learnt = {one.task: (one.inference_seconds, one.prefill_tokens) for one in known}
    return Ran(wall, scores_of(work.glob("*/results.json")), answers(work), learnt)


def lm_eval(
    given: Options,
    file: Path,
    batch_size: int | str,
    *,
    model: str = "hf",
    model_args: str = "",
    python: str = sys.executable,
) -> Ran:
    """`lm_eval run` of the same tasks, in two commands: lm-eval would mix tasks of one kind in its batches."""
    out, wall = file.with_name("lm_eval"), 0.0
    out.mkdir()
    words = ["run", "--model", model, "--device", given.device, "--log_samples", "--limit", given.limit]
    words += ["--model_args", f"pretrained={given.model}{model_args}", "--batch_size", batch_size]
    words += ["--include_path", file.with_name("tasks")]
    for kinds in (KINDS[:-1], KINDS[-1:]):
        own = ["--tasks", *kinds, "--output_path", out / kinds[0]]
        wall += timed_command(given, "lm_eval", [*words, *own], out / f"{kinds[0]}.log", python)
    return Ran(wall, scores_of(out.glob("**/results_*.json")), answers(out))


def timed_command(
    given: Options, name: str, words: Sequence[object], log: Path, python: str = sys.executable
) -> float:
    """Seconds of a command that stands beside an interpreter. RunError where it fails."""
    argv, started = [str(Path(python).with_name(name)), *map(str, words)], time.perf_counter()
    with log.open("ab") as out:
        how: dict[str, Any] = {"cwd": log.parent, "stdout": out, "stderr": out, "timeout": given.seconds}
        code = subprocess.run(argv, check=False, **how).returncode
    if code:
        raise RunError(f"{' '.join(argv)} ended with {code}: {log.read_text(errors='replace')[-2000:]}")
    return time.perf_counter() - started


def scores_of(files: Any) -> dict[str, dict[str, float]]:
    """Numbers of each task: its metrics and their standard errors."""
    tables = [json.loads(place.read_text())["results"] for place in files]
    found = {task: metrics for each in tables for task, metrics in each.items()}
    return {task: {k: v for k, v in row.items() if isinstance(v, float)} for task, row in found.items()}


def answers(folder: Path) -> dict[tuple[str, int], list[str]]:
    def leaves(value: Any) -> list[str]:
        return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list) else [value]

    files = [(task, file) for task in KINDS for file in folder.glob(f"**/samples_{task}_*.jsonl")]
    samples = [(task, json.loads(line)) for task, file in files for line in file.read_text().splitlines()]
    return {(task, sample["doc_id"]): leaves(sample["resps"]) for task, sample in samples}


def difference(what: str, ours: Ran, theirs: Ran, *, due: bool = False) -> Row:
    """A row of how many documents' answers differ, and the first of them. `due`: equal digits are due."""
    if ours.answers.keys() != theirs.answers.keys() or not ours.answers:
        raise RunError(f"not the same documents were answered: {len(ours.answers)}, {len(theirs.answers)}")
    other = sorted(key for key in ours.answers if ours.answers[key] != theirs.answers[key])
    scores = [task for task in theirs.scores if ours.scores.get(task) != theirs.scores[task]]
    text = f"answers of {len(other)} of {len(ours.answers)} documents differ, scores of {len(scores)} tasks"
    if other:
        both = zip(ours.answers[other[0]], theirs.answers[other[0]], strict=True)
        a, b = next(pair for pair in both if len({*pair}) > 1)
        text += f"; first: {other[0][0]} document {other[0][1]}, {a[:40]!r} and {b[:40]!r}"
    found = {"documents": len(ours.answers), "other_answers": len(other), "other_scores": len(scores)}
    return seen(what, None, text, **found, **({"met": not (other or scores)} if due else {}))


# --- parts -----------------------------------------------------------------------------------------------------------


def make_model(given: Options) -> list[Row]:
    """A Llama with random weights in bfloat16, and a tokenizer trained on the shipped tasks' texts."""
    lines = [x for file in sorted((TASKS / "data").glob("*.jsonl")) for x in file.read_text().splitlines()]
    shape = {"max_position_embeddings": 4096, **SHAPES[given.small]}
    how = {"dtype": "bfloat16", "files_of": "1GB", "initializer_range": 0.05}
    tiny_model.make(Path(given.model), lines, **how, **shape)
    return []


def load(given: Options) -> list[Row]:
    """Rows for staging, and for a trial's whole start from node memory and from storage; the best round of each."""
    bench = staging.Bench(Path(given.folder), Path(given.memory), inspect(Path(given.model)))

    def dropped() -> None:
        """Drop the weights from the page cache, as far as their file system does that."""
        for file in bench.weights:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def best(what: str, work: Callable[[], list[float]], *, cold: bool) -> Row:
        """`work` gives its seconds, and of a trial those of import and load."""
        rounds = []
        for _ in range(given.rounds):
            if cold:
                dropped()
            rounds.append(work())
        spent, *parts = min(rounds)
        figure = (
            "import {:.1f} s, load {:.1f} s" if parts else f"{bench.checkpoint.bytes / spent / 1e9:.3g} GB/s"
        )
        return seen(what, spent, figure.format(*parts))

    rows = [best("cold storage to /dev/shm", lambda: [bench.staged()], cold=True)]
    rows.append(best("storage in the page cache to /dev/shm", lambda: [bench.staged()], cold=False))
    holding = precursor.stage_only(bench.spec("held"))
    try:
        for name, place in (("/dev/shm", holding.staged.path), ("cold storage", given.model)):
            trial = partial(staging.run, staging.TRIAL, str(place), given.device, seconds=given.seconds)
            rows.append(best(f"a trial's process, from {name}", trial, cold=place == given.model))
    finally:
        precursor.clear(holding, "bench")
    return rows


def exact(given: Options) -> list[Row]:
    file = suite(given, "exact", batch_size=given.batch_size)
    ours, theirs = evalspan(given, file), lm_eval(given, file, given.batch_size)
    both = [ours.row("evalspan eval"), theirs.row("lm_eval run, two commands")]
    return [*both, difference("digits", ours, theirs, due=True)]


def fast(given: Options) -> list[Row]:
    what = {"kinds": LIKELIHOODS, "shots": given.shots, "batch_size": given.batch_size}
    plain, quick = suite(given, "exact", **what), suite(given, "fast", **what, mode="fast")
    ran, faster = evalspan(given, plain), evalspan(given, quick)
    rows = [ran.row(f"exact, {given.shots} shots"), faster.row(f"fast, {given.shots} shots")]
    for task, (seconds, tokens) in ran.learnt.items():
        times = (seconds / faster.learnt[task][0], tokens / faster.learnt[task][1])
        gain = "{:.2f} times sooner in inference, {:.2f} times fewer tokens".format(*times)
        rows.append(seen(f"gain: {task}", None, gain, times=times))
    return [*rows, difference("fast beside exact", faster, ran)]


def vllm(given: Options) -> list[Row] | str:
    if given.vllm_python is None:
        return "no interpreter with vLLM was given (--vllm-python)"
    file, python = suite(given, "vllm", batch_size="auto"), given.vllm_python
    whole = ("--shards-per-task", "1")
    ours = evalspan(given, file, *whole, engine='"vllm"', python=json.dumps(python))
    theirs = lm_eval(given, file, "auto", model="vllm", python=python)
    both = [ours.row("evalspan eval, a shard a task"), theirs.row("lm_eval run --model vllm, two commands")]
    return [*both, difference("answers", ours, theirs)]


def two_gpus(given: Options) -> list[Row] | str:
    if given.gpus < 2:
        return f"needs two GPUs; this machine has {given.gpus}"
    file = suite(given, "two", batch_size=given.batch_size)
    ours = evalspan(given, file, gpus=2, model_args="{ parallelize = true }")
    theirs = lm_eval(given, file, given.batch_size, model_args=",parallelize=True")
    both = [ours.row("evalspan eval, one trial"), theirs.row("lm_eval run, parallelize=True, two commands")]
    return [*both, difference("digits", ours, theirs, due=True)]


PARTS = {"model": make_model, "load": load, "exact": exact, "fast": fast, "vllm": vllm, "two-gpus": two_gpus}
