"""scripts/bench_gpu: seconds and digits on this machine's GPU, beside lm_eval. Needs no network.

Parts: load (storage to /dev/shm to device), exact (evalspan beside `lm_eval run`, digit by digit), fast (mode = "fast"
beside exact), vllm (beside `lm_eval run --model vllm`), two-gpus (a trial on two GPUs). The tasks are the quickstart
suite's. Without --model the model has random weights: its seconds are real, its scores mean nothing.

A part that fails gives its error, one that cannot run here its reason, and the others go on. Exit status 1 where a part
failed or exact digits are not lm_eval's. Without a GPU it says so and runs in small, on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.exactness import tiny_model

from bench import staging
from bench.harness import ROOT, Options, RunError, command, option, say, timed
from coordinator.base.version import version_text
from coordinator.intake.checkpoint import inspect_checkpoint
from coordinator.site.cluster.local import gpu_names
from evaljobs.staging import precursor

TASKS = ROOT / "evaljobs" / "suites" / "quickstart"
SHOTS = 5  # of the part fast
KINDS = ("quickstart_mmlu", "quickstart_gsm8k", "bench_pages", "quickstart_hellaswag")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# LlamaConfig's fields: in small, and of 1 billion parameters
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocabulary": 4096}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocabulary": 32768}
LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 8}
TRIAL = "import sys; from evaljobs.trial.engines import loading; from evaljobs.contract.specs import ModelOptions; "
TRIAL += "loading.load_engine(sys.argv[1], ModelOptions(device=sys.argv[2]), 1)"
Row = dict[str, Any]


class Ran(NamedTuple):
    """What a command gave. `answers`: (task, document) -> the values of its answers, as the samples hold them."""

    seconds: float
    scores: dict[str, dict[str, float]]
    answers: dict[tuple[str, int], list[str]]

    @classmethod
    def read(cls, seconds: float, folder: Path, results: str) -> Ran:
        """From what it left in a folder. `results`: the pattern of its files of results."""

        def leaves(value: Any) -> list[str]:
            return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list) else [value]

        tables = [json.loads(place.read_text())["results"] for place in folder.glob(results)]
        scores = {
            task: {key: value for key, value in row.items() if isinstance(value, float)}
            for table in tables
            for task, row in table.items()
        }
        files = [(task, file) for task in KINDS for file in folder.glob(f"**/samples_{task}_*.jsonl")]
        samples = [(task, json.loads(line)) for task, file in files for line in file.read_text().splitlines()]
        answers = {(task, sample["doc_id"]): leaves(sample["resps"]) for task, sample in samples}
        return cls(seconds, scores, answers)


def suite(given: Options, name: str, kinds: Sequence[str] = KINDS, shots: int = 0, **settings: Any) -> Path:
    """A suite file in a new folder of this name, with all tasks' files beside it."""
    folder = Path(given.folder) / name
    shutil.copytree(TASKS, folder / "tasks")
    shutil.copy(Path(__file__).with_name("pages.yaml"), folder / "tasks")
    for file in (folder / "tasks").glob("*.yaml"):  # lm-eval changes no 0 of a task's own by a setting
        file.write_text(file.read_text().replace("num_fewshot: 0", f"num_fewshot: {shots}"))
    lines = ['name = "bench"', f"include_path = [{json.dumps(str(folder / 'tasks'))}]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    lines += [f'[[task]]\nname = "{kind}"\nlimit = {given.limit}' for kind in kinds]
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
    return Ran.read(typed(given, "evalspan", [*words, *flags], file), work, "*/results.json")


def lm_eval(
    given: Options, file: Path, more: str = "", model: str = "hf", python: str = sys.executable
) -> Ran:
    """`lm_eval run` of the same tasks, in two commands: lm-eval would mix tasks of one kind in its batches. `more`: model arguments."""
    out, seconds = file.with_name("lm_eval"), 0.0
    words = ["run", "--model", model, "--model_args", f"pretrained={given.model}{more}"]
    words += ["--device", given.device, "--batch_size", "auto" if model == "vllm" else given.batch_size]
    words += ["--include_path", file.with_name("tasks"), "--log_samples", "--limit", given.limit]
    for kinds in (KINDS[:-1], KINDS[-1:]):
        own = ["--tasks", *kinds, "--output_path", out / kinds[0]]
        seconds += typed(given, "lm_eval", [*words, *own], file, python)
    return Ran.read(seconds, out, "**/results_*.json")


def typed(
    given: Options, name: str, words: Sequence[object], beside: Path, python: str = sys.executable
) -> float:
    """Seconds of a command that stands beside an interpreter. RunError where it fails."""
    argv, log = [str(Path(python).with_name(name)), *map(str, words)], beside.with_name(f"{name}.log")
    with log.open("ab") as out:
        how: dict[str, Any] = {"cwd": log.parent, "stdout": out, "stderr": out, "timeout": given.seconds}
        try:
            return timed(lambda: subprocess.run(argv, check=True, **how))
        except subprocess.CalledProcessError as error:
            raise RunError(f"{error}: {log.read_text(errors='replace')[-2000:]}") from error


def difference(ours: Ran, theirs: Ran, *, due: bool = False) -> Row:
    """A row of how many documents' answers differ, and the first pair that does. `due`: equal digits are due."""
    if ours.answers.keys() != theirs.answers.keys() or not ours.answers:
        raise RunError(f"not the same documents were answered: {len(ours.answers)}, {len(theirs.answers)}")
    other = sorted(key for key in ours.answers if ours.answers[key] != theirs.answers[key])
    scores = [task for task in theirs.scores if ours.scores.get(task) != theirs.scores[task]]
    found = {"documents": len(ours.answers), "other_answers": len(other), "other_scores": scores}
    if other:
        both = zip(ours.answers[other[0]], theirs.answers[other[0]], strict=True)
        found["first"] = [*other[0], *next(pair for pair in both if len({*pair}) > 1)]
    return {"what": "differences", **found, **({"met": not (other or scores)} if due else {})}


# --- parts -----------------------------------------------------------------------------------------------------------


def make_model(given: Options) -> list[Row]:
    """A Llama with random weights in bfloat16, and a tokenizer trained on the shipped tasks' texts."""
    lines = [x for file in sorted((TASKS / "data").glob("*.jsonl")) for x in file.read_text().splitlines()]
    how = {"dtype": "bfloat16", "files_of": "1GB", "initializer_range": 0.05, "max_position_embeddings": 4096}
    tiny_model.make(Path(given.model), lines, **how, **(SMALL if given.small else LARGE))
    return []


def load(given: Options) -> list[Row]:
    """Seconds of staging, and of a trial's process up to its load, from node memory and from storage.

    Before each row from storage the weights are dropped from the page cache, as far as their file system does that.
    """
    bench = staging.Bench(Path(given.folder), Path(given.memory), inspect_checkpoint(Path(given.model)))

    def taken(what: str, work: Callable[[], float], *, cold: bool) -> Row:
        for file in bench.weights if cold else ():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return {"what": what, "seconds": work(), "bytes": bench.checkpoint.bytes}

    def trial(model: str) -> Callable[[], float]:
        argv = [sys.executable, "-c", TRIAL, model, given.device]
        how: dict[str, Any] = {"stdout": subprocess.DEVNULL, "timeout": given.seconds}
        return lambda: timed(lambda: subprocess.run(argv, check=True, **how))

    rows = [taken("cold storage to /dev/shm", bench.staged, cold=True)]
    rows.append(taken("storage in the page cache to /dev/shm", bench.staged, cold=False))
    holding = precursor.stage_only(bench.spec("held"))
    try:
        rows.append(taken("a trial's process, from /dev/shm", trial(holding.staged.path), cold=False))
        rows.append(taken("a trial's process, from cold storage", trial(given.model), cold=True))
    finally:
        precursor.clear_weights(holding, "bench")
    return rows


def compared(ours: tuple[str, Ran], theirs: tuple[str, Ran], *, due: bool = False) -> list[Row]:
    """Seconds of two runs, and their difference."""
    rows = [{"what": what, "seconds": ran.seconds} for what, ran in (ours, theirs)]
    return [*rows, difference(ours[1], theirs[1], due=due)]


def exact(given: Options) -> list[Row]:
    file = suite(given, "exact", batch_size=given.batch_size)
    return compared(("evalspan", evalspan(given, file)), ("lm_eval", lm_eval(given, file)), due=True)


def fast(given: Options) -> list[Row]:
    what = {"kinds": (KINDS[0], KINDS[-1]), "shots": SHOTS, "batch_size": given.batch_size}
    slow, quick = suite(given, "exact", **what), suite(given, "fast", **what, mode="fast")
    return compared(("fast", evalspan(given, quick)), ("exact", evalspan(given, slow)))


def vllm(given: Options) -> list[Row] | str:
    if given.vllm_python is None:
        return "no interpreter with vLLM was given (--vllm-python)"
    file, python = suite(given, "vllm", batch_size="auto"), given.vllm_python
    ours = evalspan(given, file, "--shards-per-task", "1", engine='"vllm"', python=json.dumps(python))
    return compared(("evalspan", ours), ("lm_eval", lm_eval(given, file, model="vllm", python=python)))


def two_gpus(given: Options) -> list[Row] | str:
    if given.gpus < 2:
        return f"needs two GPUs; this machine has {given.gpus}"
    file = suite(given, "two", batch_size=given.batch_size)
    ours = evalspan(given, file, gpus=2, model_args="{ parallelize = true }")
    return compared(("evalspan", ours), ("lm_eval", lm_eval(given, file, ",parallelize=True")), due=True)


PARTS = {"load": load, "exact": exact, "fast": fast, "vllm": vllm, "two-gpus": two_gpus}


def run_part(part: Callable[[Options], list[Row] | str], given: Options) -> dict[str, Any]:
    """A part's rows, or why it has none. Nothing of it is left in /dev/shm."""
    for folder in (given.folder, given.memory):
        Path(folder).mkdir()
    try:
        rows = part(given)
        found: dict[str, Any] = {"skipped": rows} if isinstance(rows, str) else {"rows": rows}
        if left := sorted(str(place) for place in Path(given.memory).rglob("*")):
            found["error"] = f"left {', '.join(left)}"
    except Exception as error:  # noqa: BLE001 (a part's error is its result)
        found = {"error": f"{type(error).__name__}: {error}"}
    shutil.rmtree(given.memory)
    return found


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    os.environ |= OFFLINE
    gpus = [line.partition(", ")[2] for line in gpu_names()]  # less their index
    small = options.small or not gpus
    if not gpus:
        say("nvidia-smi lists no GPU of this machine: every part runs in small, on the CPU")
        os.environ["OMP_NUM_THREADS"] = "1"  # of both commands: more threads give other digits
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=options.scratch) as scratch,
        tempfile.TemporaryDirectory(prefix="bench-gpu-", dir="/dev/shm") as memory,
    ):
        given = vars(options) | {
            "model": str(options.model.resolve() if options.model else Path(scratch) / "model"),
            "small": small,
            "device": "cuda" if gpus else "cpu",
            "gpus": len(gpus),
            "limit": 8 if small else 120,  # all that are shipped
            "batch_size": 4 if small else 32,
            "seconds": options.command_seconds,
        }
        parts = {} if options.model else {"model": make_model}
        for name, part in (parts | {name: PARTS[name] for name in options.parts}).items():
            own = {"folder": f"{scratch}/{name}-part", "memory": f"{memory}/{name}"}
            found[name] = run_part(part, Options(**given | own))
            say(f"{name}: {json.dumps(found[name])}")
    met = all(row.get("met", True) for part in found.values() for row in part.get("rows", []))
    about = {"gpus": gpus, "model": str(options.model or "random weights"), "version": version_text()}
    return {**about, "parts": found}, met and not any("error" in part for part in found.values())


OPTIONS = (
    option("--small", False, "a tiny model and few documents, to see that it works", action="store_true"),
    option("--parts", list(PARTS), "only these parts", nargs="+", choices=PARTS, type=str),
    option("--model", text="a checkpoint's folder (default: one with random weights is made)", type=Path),
    option("--vllm-python", text="an interpreter with vLLM and lm_eval, for the part vllm", type=str),
    option("--command-seconds", 1800.0, "time limit of each command"),
    option("--scratch", text="a folder on the storage to measure (default: the temporary folder)", type=Path),
)
if __name__ == "__main__":
    sys.exit(command("bench_gpu", __doc__, measure, *OPTIONS))
