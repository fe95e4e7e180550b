"""scripts/bench_first_run MODEL_DIR: seconds of `evalspan eval` on this machine beside `lm_eval run`, in turns.

Two tasks with 8 documents each: a cold run (empty work folder), a second checkpoint in the same work folder, and one
`lm_eval run` of both tasks. With --quickstart: the shipped suite cold, beside one `lm_eval run` a task; plain lm_eval
cannot score its programs offline, so it only generates for that task. Scores are compared to the last digit.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Options, RunError, command, option, row, say, targets
from coordinator.intake.suites import load_suite
from evaljobs.contract.specs import TaskEntry

TASKS = ROOT / "evaljobs" / "suites" / "quickstart"
PROGRAMS = "quickstart_humaneval"  # plain lm_eval takes its metric from the hub
UNSCORED = ("--confirm_run_unsafe_code", "--predict_only")
Scores = dict[str, dict[str, Any]]


def suite_file(folder: Path, entries: Sequence[TaskEntry], tasks: Path = TASKS, **settings: Any) -> str:
    """A suite of these entries with their limits, and these settings of the suite."""
    lines = ['name = "bench"', f"include_path = [{json.dumps(str(tasks))}]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    for entry in entries:
        lines += ["[[task]]", f'name = "{entry.name}"', f"limit = {entry.limit}"]
    place = folder / "bench.toml"
    place.write_text("\n".join(lines) + "\n")
    return str(place)


def other_checkpoint(model_dir: Path, folder: Path) -> Path:
    """A copy whose weights differ in one bit, so that nothing of the first one is reused."""
    made = folder / "step-2"
    shutil.copytree(model_dir, made)
    weights = max(made.glob("*.safetensors"))
    weights.chmod(0o600)
    with weights.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        low = file.read(1)[0]
        file.seek(-2, os.SEEK_END)
        file.write(bytes([low ^ 1]))
    return made


def run(argv: Sequence[str], log: Path) -> dict[str, float]:
    """Wall and CPU seconds of a command and its processes, offline. RunError where it fails."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with log.open("ab") as out:
        code = subprocess.run(argv, cwd=log.parent, env=env, stdout=out, stderr=out, check=False).returncode
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        raise RunError(f"{' '.join(argv)} ended with {code}: {log.read_text(errors='replace')[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "cpu": cpu}


def evalspan(checkpoint: Path, suite: str, work: Path, *flags: str) -> tuple[dict[str, float], Scores]:
    words = ("eval", str(checkpoint), "--suite", suite, "--work-dir", str(work), *flags)
    spent = run((str(Path(sys.executable).with_name("evalspan")), *words), work.with_suffix(".log"))
    newest = max(work.glob("*/results.json"), key=lambda place: place.stat().st_mtime_ns)
    return spent, scores_of(newest)


def lm_eval(
    model_dir: Path,
    entries: Sequence[TaskEntry],
    batch_size: int | str,
    out: Path,
    *flags: str,
    tasks: Path = TASKS,
    model_args: str = "",
    python: str = sys.executable,
    model: str = "hf",
    device: str = "cpu",
) -> tuple[dict[str, float], Scores]:
    """One `lm_eval run` of these entries, which have one limit."""
    (limit,) = {entry.limit for entry in entries}
    names = [entry.name for entry in entries]
    argv = [str(Path(python).with_name("lm_eval")), "run", "--model", model, "--device", device]
    argv += ["--model_args", f"pretrained={model_dir}{model_args}", "--include_path", str(tasks)]
    argv += ["--tasks", *names, "--limit", str(limit)]
    argv += ["--batch_size", str(batch_size), "--output_path", str(out), *flags]
    spent = run([*argv, *(UNSCORED if PROGRAMS in names else ())], out.with_suffix(".log"))
    return spent, scores_of(*out.glob("**/results_*.json"))


def scores_of(*files: Path) -> Scores:
    """Numbers of each task: its metrics and their standard errors."""
    found: Scores = {}
    for place in files:
        for task, metrics in json.loads(place.read_text())["results"].items():
            found[task] = {k: v for k, v in metrics.items() if isinstance(v, float) and task != PROGRAMS}
    return found


def two_tasks(options: Options, folder: Path) -> tuple[dict[str, Any], bool]:
    entries = [TaskEntry(name=f"quickstart_{n}", limit=options.limit) for n in ("hellaswag", "mmlu")]
    suite, second = suite_file(folder, entries), other_checkpoint(options.model_dir, folder)
    _, expected = lm_eval(second, entries, 1, folder / "lm_eval-second")
    kept: dict[str, list[dict[str, float]]] = {"cold": [], "second": [], "lm_eval": []}
    equal = True
    for number in range(options.rounds):
        work = folder / f"work-{number}"
        cold, ours = evalspan(options.model_dir, suite, work)
        next_one, next_ours = evalspan(second, suite, work)
        theirs, reference = lm_eval(options.model_dir, entries, 1, folder / f"lm_eval-{number}")
        for name, spent in (("cold", cold), ("second", next_one), ("lm_eval", theirs)):
            kept[name].append(spent)
        equal = equal and ours == reference and next_ours == expected
        say(json.dumps({name: spent[-1] for name, spent in kept.items()}))
        shutil.rmtree(work)
    median = medians(kept)
    base = median["lm_eval"]["wall"]
    return targets(
        [
            row("cold run over one lm_eval command", median["cold"]["wall"] / base, 1.1),
            row("second checkpoint over one lm_eval command", median["second"]["wall"] / base, 0.7),
            row("scores that differ", float(not equal), 0.0),
        ],
        seconds=kept,
        median=median,
    )


def quickstart(options: Options, folder: Path) -> tuple[dict[str, Any], bool]:
    suite = load_suite("quickstart")
    assert suite.batch_size != "auto"
    kept: dict[str, list[dict[str, float]]] = {"evalspan": [], "lm_eval": []}
    equal = True
    for number in range(options.rounds):
        spent, ours = evalspan(options.model_dir, "quickstart", folder / f"work-{number}")
        kept["evalspan"].append(spent)
        total, reference = {"wall": 0.0, "cpu": 0.0}, Scores()
        for entry in suite.tasks:
            out = folder / f"lm_eval-{number}-{entry.name}"
            one, theirs = lm_eval(options.model_dir, [entry], suite.batch_size, out)
            total = {key: total[key] + one[key] for key in total}
            reference |= theirs
        kept["lm_eval"].append(total)
        equal = equal and all(ours[task] == reference.get(task, {}) for task in ours)
        say(json.dumps({name: spent[-1] for name, spent in kept.items()}))
    median = medians(kept)
    times = median["lm_eval"]["wall"] / median["evalspan"]["wall"]
    return targets(
        [
            row("times sooner than one lm_eval command a task", times, 2.0, at_least=True),
            row("scores that differ", float(not equal), 0.0),
        ],
        seconds=kept,
        median=median,
    )


def medians(kept: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        name: {key: statistics.median(run[key] for run in runs) for key in ("wall", "cpu")}
        for name, runs in kept.items()
    }


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    options.model_dir = options.model_dir.resolve()
    with tempfile.TemporaryDirectory(prefix="evalspan-bench-") as made:
        return (quickstart if options.quickstart else two_tasks)(options, Path(made))


OPTIONS = (
    option("model_dir", type=Path),
    option("--rounds", 5),
    option("--limit", 8, "documents per task (without --quickstart)"),
    option(
        "--quickstart", False, "the shipped suite, beside one lm_eval command a task", action="store_true"
    ),
)
if __name__ == "__main__":
    sys.exit(command("bench_first_run", __doc__, measure, *OPTIONS))
