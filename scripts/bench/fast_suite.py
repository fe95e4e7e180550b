"""scripts/bench_fast_suite MODEL_DIR --data DIR: a suite of eight tasks in fast mode, in exact mode and by `lm_eval`.

Four few-shot tasks, one likelihood without choices, one rolling likelihood and two generations. Each round runs
`evalspan eval` in both modes, each in an empty work folder, then one `lm_eval run` a task. Plain lm_eval cannot score
HumanEval's programs offline, so it only generates there. Exit status 1 where a target is missed.
"""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import few_shot, first_run
from bench.harness import Options, command, option, row, say, targets
from evaljobs.contract.specs import TaskEntry

TASKS = (
    *(few_shot.names(task)["default"] for task in ("hellaswag", "arc_challenge", "winogrande")),
    few_shot.names("mmlu")["first_n"],
    *("bench_lambada", "bench_pages", "quickstart_gsm8k", "quickstart_humaneval"),
)
LAMBADA = """\
task: bench_lambada
dataset_path: json
dataset_kwargs: {data_files: {test: LAMBADA}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: " {{continuation}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def write_tasks(data: Path, folder: Path, rows: int) -> Path:
    """All eight tasks' files in a new folder. `rows`: of each few-shot task."""
    shutil.copytree(first_run.TASKS, folder)
    shutil.copy(Path(__file__).with_name("pages.yaml"), folder)
    few_shot.write(data, folder, rows)
    lambada = folder / "lambada.jsonl"
    with gzip.open(data / "lambada_openai.jsonl.gz", "rt", encoding="utf-8") as lines:
        lambada.write_text("".join(next(lines) for _ in range(rows)))
    (folder / "lambada.yaml").write_text(LAMBADA.replace("LAMBADA", str(lambada)))
    return folder


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    model_dir = options.model_dir.resolve()
    kept: dict[str, list[float]] = {"fast": [], "exact": [], "lm_eval": []}
    entries = [TaskEntry(name=name, limit=options.limit) for name in TASKS]
    equal = True
    with tempfile.TemporaryDirectory(prefix="evalspan-bench-") as made:
        folder = Path(made)
        tasks = write_tasks(options.data, folder / "tasks", options.rows)
        for number in range(options.rounds):
            scores: dict[str, first_run.Scores] = {}
            for mode in ("exact", "fast"):
                suite = first_run.suite_file(folder, entries, tasks, batch_size=8, mode=mode)
                spent, scores[mode] = first_run.evalspan(model_dir, suite, folder / f"{mode}-{number}")
                kept[mode].append(spent["wall"])
            total = 0.0
            for entry in entries:
                out = folder / f"lm_eval-{number}-{entry.name}"
                spent, theirs = first_run.lm_eval(model_dir, [entry], 8, out, tasks=tasks)
                total += spent["wall"]
                equal = equal and all(scores["exact"][task] == found for task, found in theirs.items())
            kept["lm_eval"].append(total)
            say(json.dumps({name: seconds[-1] for name, seconds in kept.items()}))
    median = {name: statistics.median(seconds) for name, seconds in kept.items()}
    return targets(
        [
            row("exact over fast, makespan", median["exact"] / median["fast"], 2.0, at_least=True),
            row("one lm_eval a task over fast", median["lm_eval"] / median["fast"], 3.0, at_least=True),
            row("exact scores that differ from lm_eval's", float(not equal), 0.0),
        ],
        seconds=kept,
        documents=options.limit,
    )


OPTIONS = (
    option("model_dir", type=Path),
    option("--data", type=Path, text="folder of NAME.jsonl.gz"),
    option("--limit", 20, "documents of each task; of MMLU, of each subject"),
    option("--rows", 200, "rows of each few-shot task from which its documents come"),
    option("--rounds", 1),
)
if __name__ == "__main__":
    sys.exit(command("bench_fast_suite", __doc__, measure, *OPTIONS))
