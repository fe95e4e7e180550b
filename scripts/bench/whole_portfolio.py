"""The shipped suite `portfolio` on drawn rows, with real inference of a tiny model, on a real Slurm of this machine.

4 nodes of 8 slots, all on this machine's cores: evalspan in exact and in fast mode, its round-robin policy, and a job a
data set of plain lm-eval, one after the other, each in an empty folder. Scores of exact mode are compared with lm-eval's.
Exact mode goes on with further checkpoints of that shape, of which the priors have learnt: each one's makespan stands
beside the plan's. Generation is cut to a few tokens. Answers are of drawn words: no score means anything.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dev_cluster import procs
from dev_cluster.api import Cluster, dev_cluster
from support.exactness import tiny_model
from support.portfolio.place import place
from support.portfolio.rows import sentences
from support.toys import make_readable

from bench.harness import ROOT, Options, RunError, command, option, row, say, targets, timed

SUITE = ROOT / "evaljobs" / "suites" / "portfolio.toml"
NAMES = [task["name"] for task in tomllib.loads(SUITE.read_text())["task"]]
SETTINGS = """\
[trial]
threads = 1
device = "cpu"
memory_mb = 2000
{trial}
[metric]
bootstrap_iters = 0
workers = {workers}
memory_mb = 2000
{plan}
[cluster]
kind = "slurm"
partition = "gpu"
poll_seconds = 1.0
"""
# a run -> what it adds to the settings
RUNS: dict[str, dict[str, str]] = {
    "exact": {},
    "fast": {"trial": 'mode = "fast"'},
    "round_robin": {"plan": '[plan]\npolicy = "round-robin"'},
    "per_dataset": {},
}
PREDICTED = 0.15  # that a prediction of learnt priors may be off
FIGURES = ("makespan_seconds", "predicted_makespan_seconds", "lower_bound_seconds", "gpu_busy_fraction")
SECONDS = 1800  # that one run may take


def furnished(cluster: Cluster, options: Options) -> tuple[Path, dict[str, str]]:
    """The user's folder with rows, models and suite, and the environment of what runs there."""
    folder = cluster.user_dir / "portfolio"
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        head, *tables = SUITE.read_text().split("[[task]]")
        tables = [text for name, text in zip(NAMES, tables, strict=True) if name in options.tasks]
        fewer = rf"\1\ngen_kwargs = {{max_gen_toks = {options.tokens}}}"
        suite = re.sub(r"(num_fewshot = \d+).*", fewer, "[[task]]".join([head, *tables]))
        (made / "suite.toml").write_text(suite)
        for seed in range(options.checkpoints):
            tiny_model.make(made / f"step-{seed}", sentences(200), seed=seed, max_position_embeddings=4096)
        with contextlib.redirect_stdout(sys.stderr):  # IFEval's words
            rows = place(options.tasks, made / "hf")
        say(f"{len(rows)} data sets, {sum(rows.values())} rows")
        make_readable(made.rglob("*"))
        made.chmod(0o755)
        run(cluster, {}, "cp", "-r", made, folder)
    home = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    paths = ":".join(str(ROOT / part) for part in ("scripts", "", "tests"))
    return folder, {**home, "PYTHONPATH": paths, "NO_COLOR": "1"}


def run(cluster: Cluster, env: Mapping[str, str], *words: object, text: str = "") -> str:
    """What a command of the user's prints. RunError where it fails. `text`: its standard input."""
    done = cluster.run_as_user([str(word) for word in words], env=env, timeout=SECONDS, input=text)
    if done.returncode:
        raise RunError(f"{words}: {done.stderr[-3000:]}")
    return done.stdout


def evalspan(cluster: Cluster, folder: Path, env: dict[str, str], name: str, options: Options) -> Any:
    """Evaluations in a folder of its own, in exact mode of several checkpoints; `prepare` before them, timed."""
    own, suite = folder / name, folder / "suite.toml"
    settings = SETTINGS.format(**{"trial": "", "plan": "", "workers": options.workers} | RUNS[name])
    run(cluster, env, "mkdir", own)
    run(cluster, env, "tee", own / "evalspan.toml", text=settings)

    def typed(*words: object) -> str:
        where = ("--suite", suite, "--work-dir", own / "work")
        given = {**env, "EVALSPAN_CONFIG": str(own / "evalspan.toml")}
        return run(cluster, given, cluster.python.with_name("evalspan"), *words, *where)

    prepared = timed(lambda: typed("prepare", "--tokenizer", folder / "step-0"))
    results, seen = [], []
    for step in range(options.checkpoints if name == "exact" else 1):
        results.append(json.loads(typed("eval", folder / f"step-{step}", "--json")))
        [report] = (own / "work").glob(f"step-{step}-*/report.json")
        seen.append({key: value for key, value in json.loads(report.read_text()).items() if key in FIGURES})
        say(f"{name}: prepared in {prepared:.1f} s; step {step}: {seen[-1]}")
    return {**seen[0], "later_checkpoints": seen[1:], "prepare_seconds": prepared, "results": results[0]}


def per_dataset(cluster: Cluster, folder: Path, env: dict[str, str], name: str, options: Options) -> Any:
    """A job of plain lm-eval for each data set, in the suite's order."""
    out = folder / name
    run(cluster, env, "mkdir", out)
    words = [cluster.python, "-m", "bench.lm_eval_job", folder / "step-0", folder / "suite.toml", out]
    job = " ".join(shlex.quote(str(word)) for word in words)
    sbatch, names = "sbatch --quiet --gres=gpu:1 --mem=2000 --export=ALL", options.tasks
    lines = [f"{sbatch} -o {out}/{task}.log --wrap='exec {job} {task}' || exit 1" for task in names]
    began = time.time()
    run(cluster, env, "bash", "-c", "\n".join(lines))
    if not procs.poll(lambda: len(list(out.glob("*.json"))) == len(names), deadline_s=SECONDS, every_s=0.5):
        raise RunError(f"{len(list(out.glob('*.json')))} of {len(names)} jobs of {out} ended in {SECONDS} s")
    found = {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}
    results = {task: one["results"] for task, one in found.items()}
    return {"makespan_seconds": max(one["ended"] for one in found.values()) - began, "results": results}


def unequal(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Data sets of which a metric of lm-eval's differs; what it has no number for (NaN), we have none for either."""
    known = {**ours["results"], **ours.get("groups", {})}

    def number(value: Any) -> Any:
        return None if isinstance(value, float) and math.isnan(value) else value

    return [
        name
        for name, tasks in theirs.items()
        for task, values in tasks.items()
        if any("," in k and number(v) != number(known.get(task, {}).get(k)) for k, v in values.items())
    ]


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    found: dict[str, Any] = {}
    with dev_cluster(nodes=options.nodes, gpus=options.gpus, cpu_nodes=2) as cluster:
        folder, env = furnished(cluster, options)
        for name in options.only:
            way = per_dataset if name == "per_dataset" else evalspan
            found[name] = way(cluster, folder, env, name, options)
            say(f"{name}: {found[name]['makespan_seconds']:.1f} s")
    scores, rows = {name: one.pop("results") for name, one in found.items()}, []
    if {"exact", "per_dataset"} <= found.keys():
        others = sorted({*unequal(scores["per_dataset"], scores["exact"])})
        rows.append(row("unequal_data_sets", len(others), 0, names=others))
    if theirs := found.get("per_dataset"):
        spans = {name: one["makespan_seconds"] for name, one in found.items() if one is not theirs}
        faster = {name: theirs["makespan_seconds"] / span for name, span in spans.items()}
        rows += [row(f"per_dataset_over_{name}", times, 1.0, at_least=True) for name, times in faster.items()]
    if later := found.get("exact", {}).get("later_checkpoints"):
        off = abs(later[-1]["predicted_makespan_seconds"] / later[-1]["makespan_seconds"] - 1)
        rows.append(row("prediction_off", off, PREDICTED))
    return targets(rows, **found)


OPTIONS = (
    option("--only", list(RUNS), nargs="*", choices=RUNS, type=str),
    option("--tasks", NAMES, "of the suite (all)", nargs="*", type=str, metavar="TASK"),
    option("--checkpoints", 3, "checkpoints of exact mode"),
    option("--nodes", 4, "GPU nodes"),
    option("--gpus", 8, "slots of a node"),
    option("--tokens", 32, "generated tokens of a document at most"),
    option("--workers", 4, "CPU jobs that run metrics"),
)
if __name__ == "__main__":
    sys.exit(command("bench_portfolio", __doc__, measure, *OPTIONS, slurm=True))
