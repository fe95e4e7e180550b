"""The parts of scripts/bench_gpu, each in a process of its own: python -m bench.gpu_parts NAME GIVEN RESULT.

Rule: a part runs users' commands, `evalspan eval` and `lm_eval run`. RESULT holds `rows`, or `skipped` with the reason, or
`error`. A row with `met` false has other digits than lm-eval's where those are due. GIVEN: see `gpu.measure`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.exactness import tiny_model

from bench import first_run, gpu_load
from bench.gpu_load import Row, seen
from bench.harness import Options, RunError
from coordinator.errors import OperatorError
from coordinator.intake.suites import load_suite
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import TaskEntry
from priors import table

KINDS = ("quickstart_mmlu", "quickstart_gsm8k", "bench_pages", "quickstart_hellaswag")
LIKELIHOODS = (KINDS[0], KINDS[-1])
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocabulary": 32768}
SHAPES: dict[str, dict[str, int]] = {  # LlamaConfig's fields
    "tiny": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocabulary": 4096},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, **HEADS},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, **HEADS},
}


class Ran(NamedTuple):
    """What a command gave. `answers`: (task, document) -> the values of its answers, as the samples hold them.

    `learnt`: of evalspan, what its priors learnt: task -> (seconds of inference, padded prompt tokens).
    """

    wall: float
    scores: first_run.Scores
    answers: dict[tuple[str, int], list[str]]
    learnt: Mapping[str, tuple[float, int]] = {}

    def row(self, what: str) -> Row:
        seconds, tokens = (sum(each[i] for each in self.learnt.values()) for i in range(2))
        known = f"inference {seconds:.2f} s, {tokens:,} prompt tokens" if self.learnt else ""
        return seen(what, self.wall, known, learnt=self.learnt)


# --- the two commands ------------------------------------------------------------------------------------------------


def suite(given: Options, name: str, kinds: Sequence[str] = KINDS, shots: int = 0, **settings: Any) -> str:
    """A suite file in a new folder of this name, with all tasks' files beside it."""
    folder = Path(given.folder) / name
    shutil.copytree(first_run.TASKS, folder / "tasks")
    shutil.copy(Path(__file__).with_name("pages.yaml"), folder / "tasks")
    for file in (folder / "tasks").glob("*.yaml"):  # lm-eval changes no 0 of a task's own by a setting
        file.write_text(file.read_text().replace("num_fewshot: 0", f"num_fewshot: {shots}"))
    return first_run.suite_file(folder, entries(given, kinds), folder / "tasks", **settings)


def entries(given: Options, kinds: Sequence[str]) -> list[TaskEntry]:
    return [TaskEntry(name=name, limit=given.limit) for name in kinds]


def evalspan(given: Options, file: str, *flags: str, gpus: int = 1, **trial: str) -> Ran:
    """`evalspan eval` of a suite file in one trial, in a work folder beside it. `trial`: settings of [trial], as TOML."""
    weights = sum(place.stat().st_size for place in Path(given.model).glob("*.safetensors"))
    own = {"device": f'"{given.device}"', "gpus_per_trial": gpus, "memory_mb": 8000 + weights // 500_000}
    own |= {"threads": 1} if given.device == "cpu" else {}
    config, work = Path(file).with_name("evalspan.toml"), Path(file).with_name("work")
    lines = [f"[stage]\nroots = [{json.dumps(given.memory)}]\n[trial]"]
    config.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in (own | trial).items())]))
    more = ("--config", str(config), "--slots", str(gpus), *flags)
    spent, scores = first_run.evalspan(Path(given.model), file, work, *more)
    learnt = {
        o.task: (o.inference_seconds, o.prefill_tokens) for o in table.read(WorkPaths(work).observations)
    }
    return Ran(spent["wall"], scores, answers(work), learnt)


def lm_eval(given: Options, file: str, batch_size: int | str, **how: Any) -> Ran:
    """`lm_eval run` of the same tasks, in two commands: lm-eval would mix tasks of one kind in its batches."""
    out, scores, wall = Path(file).with_name("lm_eval"), first_run.Scores(), 0.0
    more = {"tasks": Path(file).with_name("tasks"), "device": given.device, **how}
    out.mkdir()
    for kinds in (KINDS[:-1], KINDS[-1:]):
        chosen = (Path(given.model), entries(given, kinds), batch_size, out / kinds[0])
        spent, found = first_run.lm_eval(*chosen, "--log_samples", **more)
        wall, scores = wall + spent["wall"], scores | found
    return Ran(wall, scores, answers(out))


def answers(folder: Path) -> dict[tuple[str, int], list[str]]:
    def leaves(value: Any) -> list[str]:
        return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list) else [value]

    files = [(task, file) for task in KINDS for file in folder.glob(f"**/samples_{task}_*.jsonl")]
    samples = [(task, json.loads(line)) for task, file in files for line in file.read_text().splitlines()]
    return {(task, sample["doc_id"]): leaves(sample["resps"]) for task, sample in samples}


def difference(what: str, ours: Ran, theirs: Ran, *, due: bool = False) -> Row:
    """A row of how many documents' answers differ, the first of them, and by how much. `due`: equal digits are due."""
    if ours.answers.keys() != theirs.answers.keys() or not ours.answers:
        raise RunError(f"not the same documents were answered: {len(ours.answers)}, {len(theirs.answers)}")
    other = sorted(key for key in ours.answers if ours.answers[key] != theirs.answers[key])
    scores = [task for task in theirs.scores if ours.scores.get(task) != theirs.scores[task]]
    pairs = [(numbers(ours.answers[key]), numbers(theirs.answers[key])) for key in ours.answers]
    found: dict[str, Any] = {
        "documents": len(ours.answers),
        "other_answers": len(other),
        "other_scores": len(scores),
        "worst": max((abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=False)), default=0.0),
        "other_choices": sum(a.index(max(a)) != b.index(max(b)) for a, b in pairs if len(a) > 1),
    }
    text = f"all answers of {len(ours.answers)} documents equal, and all scores"
    if other or scores:
        counts = "{other_answers} of {documents} documents differ, log-likelihoods by {worst:.3g} at most, choices in "
        text = (counts + "{other_choices}; scores of {other_scores} tasks differ").format(**found)
    for key in other[:1]:
        a, b = next(
            pair for pair in zip(ours.answers[key], theirs.answers[key], strict=True) if len({*pair}) > 1
        )
        text += f"; first: {key[0]} document {key[1]}, {a[:40]!r} and {b[:40]!r}"
    return seen(what, None, text, **found, **({"met": not (other or scores)} if due else {}))


def numbers(values: Sequence[str]) -> list[float]:
    """Log-likelihoods among an answer's values; none of a text."""
    try:
        return [float(value) for value in values if value not in {"True", "False"}]
    except ValueError:
        return []


# --- parts -----------------------------------------------------------------------------------------------------------


def make_model(given: Options) -> list[Row]:
    """A Llama with random weights in bfloat16, and a tokenizer trained on the shipped tasks' texts."""
    texts = [file.read_text() for file in sorted((first_run.TASKS / "data").glob("*.jsonl"))]
    shape = {"max_position_embeddings": 4096, **SHAPES[given.size]}
    how = {"dtype": "bfloat16", "files_of": "1GB", "initializer_range": 0.05}
    tiny_model.make(Path(given.model), [line for text in texts for line in text.splitlines()], **how, **shape)
    return []


def load(given: Options) -> list[Row]:
    folders = (Path(place) for place in (given.model, given.folder, given.memory))
    return gpu_load.measure(*folders, given.device, given.rounds)


def exact(given: Options) -> list[Row]:
    file = suite(given, "exact", batch_size=given.batch_size)
    ours, theirs = evalspan(given, file), lm_eval(given, file, given.batch_size)
    both = [ours.row("evalspan eval"), theirs.row("lm_eval run, two commands")]
    return [*both, difference("digits", ours, theirs, due=True)]


def fast(given: Options) -> list[Row] | str:
    what = {"kinds": LIKELIHOODS, "shots": given.shots, "batch_size": given.batch_size}
    plain = suite(given, "exact", **what)
    load_suite(plain)
    quick = suite(given, "fast", **what, mode="fast")
    try:
        load_suite(quick)
    except OperatorError as error:
        return f"this version has no fast mode: {str(error).partition(': ')[2].partition(';')[0]}"
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
    log = Path(file).with_name("memory.txt")
    look = "while sleep 0.5; do nvidia-smi --query-gpu=memory.used,index --format=csv,noheader; done"
    with log.open("w") as out, subprocess.Popen(["sh", "-c", look], stdout=out) as looking:
        try:
            ours = evalspan(given, file, gpus=2, model_args="{ parallelize = true }")
        finally:
            looking.terminate()
    theirs = lm_eval(given, file, given.batch_size, model_args=",parallelize=True")
    looks = [line.split(", ") for line in log.read_text().splitlines()]
    most = {gpu: size for size, gpu in sorted(looks, key=lambda look: int(look[0].split()[0]))}
    used = ", ".join(f"GPU {gpu} {size}" for gpu, size in sorted(most.items()))
    both = [ours.row("evalspan eval, one trial"), theirs.row("lm_eval run, parallelize=True, two commands")]
    memory = seen("most memory in use meanwhile", None, used)
    return [*both, memory, difference("digits", ours, theirs, due=True)]


PARTS = {"model": make_model, "load": load, "exact": exact, "fast": fast, "vllm": vllm, "two-gpus": two_gpus}


def main(name: str, given_file: str, result_file: str) -> int:
    given = Options(**json.loads(Path(given_file).read_text()))
    if given.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"  # of both commands: more threads give other digits
    result: dict[str, Any]
    try:
        found = PARTS[name](given)
        result = {"skipped": found} if isinstance(found, str) else {"rows": found}
    except Exception as error:  # noqa: BLE001 (a part's error is its result)
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    Path(result_file).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
