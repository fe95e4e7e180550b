"""The shipped suite `portfolio` on drawn rows, with real inference of a tiny model, on a real Slurm of this machine.

4 nodes of 8 slots, all on this machine's cores: evalspan in exact and in fast mode, its round-robin policy, and a job a
data set of plain lm-eval, one after the other, each in an empty folder. Scores of exact mode are compared with lm-eval's.
Exact mode goes on with further checkpoints of that shape, of which the priors have learnt: each one's makespan stands
beside the plan's. `--only exact disturbed` evaluates a second time while things are broken. Generation is cut to a few tokens. Answers are of drawn words: no score means anything.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
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
SETTINGS = """\
[trial]
threads = 1
device = "cpu"
memory_mb = 2000
{trial}[metric]
bootstrap_iters = 0
workers = {workers}
memory_mb = 2000
{plan}[cluster]
kind = "slurm"
partition = "gpu"
poll_seconds = 1.0
"""
CPU_NODES = 2
PREDICTED = 0.15  # that a prediction of learnt priors may be off
FIGURES = ("makespan_seconds", "predicted_makespan_seconds", "lower_bound_seconds", "gpu_busy_fraction")
SECONDS = 1800  # that one run may take


def furnished(
    cluster: Cluster, options: Options, suite: str, models: Sequence[int]
) -> tuple[Path, dict[str, str]]:
    """The user's folder with rows, models of these seeds and suite, and the environment of what runs there."""
    folder = cluster.user_dir / "portfolio"
    with tempfile.TemporaryDirectory() as made:
        short = re.sub(
            r"(num_fewshot = \d+).*", rf"\1\ngen_kwargs = {{max_gen_toks = {options.tokens}}}", suite
        )
        (Path(made) / "suite.toml").write_text(short)
        for seed in models:
            model = Path(made) / f"step-{seed}"
            tiny_model.make(model, sentences(200), seed=seed, max_position_embeddings=4096)
        with contextlib.redirect_stdout(sys.stderr):  # IFEval's words
            rows = place((one["name"] for one in tomllib.loads(suite)["task"]), Path(made) / "hf")
        say(f"{len(rows)} data sets, {sum(rows.values())} rows")
        make_readable(Path(made).rglob("*"))
        Path(made).chmod(0o755)
        copied = cluster.run_as_user(["cp", "-r", made, str(folder)])
    if copied.returncode:
        raise RunError(copied.stderr)
    home = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    paths = ":".join(str(ROOT / part) for part in ("scripts", "", "tests"))
    return folder, {**cluster.user_env, **home, "PYTHONPATH": paths, "NO_COLOR": "1"}


def evalspan(
    cluster: Cluster, folder: Path, env: Mapping[str, str], name: str, options: Options
) -> dict[str, Any]:
    """Evaluations in a folder of its own, in exact mode of several checkpoints; `prepare` before them, timed."""
    place_ = folder / name
    parts = {"trial": 'mode = "fast"\n' if name == "fast" else "", "plan": ""}
    if name == "round_robin":
        parts["plan"] = '[plan]\npolicy = "round-robin"\n'
    text = SETTINGS.format(workers=options.workers, **parts)
    cluster.run_as_user(["mkdir", str(place_)], check=True)
    cluster.run_as_user(["tee", str(place_ / "evalspan.toml")], input=text, check=True)
    program, suite = Path(cluster.python).parent / "evalspan", folder / "suite.toml"
    own = {**env, "EVALSPAN_CONFIG": str(place_ / "evalspan.toml")}

    def run(*words: object) -> str:
        argv = [str(program), *map(str, words), "--work-dir", str(place_ / "work")]
        done = cluster.run_as_user(argv, env=own, timeout=SECONDS)
        if done.returncode:
            raise RunError(f"{name}: {' '.join(argv)}: {done.stderr[-3000:]}")
        return done.stdout

    prepared = timed(lambda: run("prepare", "--suite", suite, "--tokenizer", folder / "step-0"))
    say(f"{name}: prepared in {prepared:.1f} s")
    results, seen = [], []
    for step in range(options.checkpoints if name == "exact" else 1):
        if name == "disturbed":
            words = [
                program,
                "eval",
                folder / f"step-{step}",
                "--suite",
                suite,
                "--work-dir",
                place_ / "work",
            ]
            say(f"cancelled job {disturb(cluster, words, own, place_ / 'work')}")
        results.append(json.loads(run("eval", folder / f"step-{step}", "--suite", suite, "--json")))
        [report] = (place_ / "work").glob(f"step-{step}-*/report.json")
        seen.append({key: value for key, value in json.loads(report.read_text()).items() if key in FIGURES})
        say(f"{name}: step {step} {seen[-1]}")
    return {**seen[0], "later_checkpoints": seen[1:], "prepare_seconds": prepared, "results": results[0]}


def disturb(cluster: Cluster, argv: Sequence[str | Path], env: Mapping[str, str], work: Path) -> str:
    """Start an evaluation, end its coordinator when there are answers, and cancel the trials of a node; their job."""

    def answered() -> bool:
        return any('"shards-dumped"' in one.read_text() for one in work.glob("*/journal.jsonl"))

    null = subprocess.DEVNULL
    with subprocess.Popen(cluster.user_argv(argv), env=dict(env), stdout=null, stderr=null) as coordinator:
        procs.poll(answered, deadline_s=SECONDS, every_s=0.2)
        coordinator.terminate()
    running = cluster.run_as_user(["squeue", "--noheader", "--states=RUNNING", "--format=%F %j"]).stdout
    job = next((line.split()[0] for line in running.splitlines() if "-trial-" in line), "")
    if not job:
        raise RunError(f"no trial ran when the coordinator had ended: {running}")
    cluster.run_as_user(["scancel", job], check=True)
    return job


def per_dataset(cluster: Cluster, folder: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """A job of plain lm-eval for each data set, in the suite's order."""
    out = folder / "per_dataset"
    cluster.run_as_user(["mkdir", str(out)], check=True)
    names = [one["name"] for one in tomllib.loads(SUITE.read_text())["task"]]
    words = [cluster.python, "-m", "bench.lm_eval_job", folder / "step-0", folder / "suite.toml", out]
    job = " ".join(shlex.quote(str(word)) for word in words)
    options = "--quiet --gres=gpu:1 --mem=2000 --export=ALL"
    lines = [f"sbatch {options} -o {out}/{name}.log --wrap='exec {job} {name}' || exit 1" for name in names]
    began = time.time()
    sent = cluster.run_as_user(["bash", "-c", "\n".join(lines)], env=env, timeout=600)
    if sent.returncode:
        raise RunError(sent.stderr)
    if not procs.poll(lambda: len(list(out.glob("*.json"))) == len(names), deadline_s=SECONDS, every_s=0.5):
        raise RunError(f"{len(list(out.glob('*.json')))} of {len(names)} jobs of {out} ended in {SECONDS} s")
    found = {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}
    ended = max(one["ended"] for one in found.values())
    return {
        "makespan_seconds": ended - began,
        "results": {name: one["results"] for name, one in found.items()},
    }


def unequal(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Data sets of which a metric of lm-eval's differs."""
    return [
        name
        for name, tasks in theirs.items()
        for task, values in tasks.items()
        for key, value in values.items()
        if "," in key
        and not _same(value, {**ours["results"], **ours.get("groups", {})}.get(task, {}).get(key))
    ]


def _same(one: Any, other: Any) -> bool:
    return one == other or (
        isinstance(one, float) and math.isnan(one) and (other is None or math.isnan(other))
    )


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    found: dict[str, Any] = {}
    with dev_cluster(nodes=options.nodes, gpus=options.gpus, cpu_nodes=CPU_NODES) as cluster:
        folder, env = furnished(cluster, options, SUITE.read_text(), range(options.checkpoints))
        for name in options.only:
            if name == "per_dataset":
                found[name] = per_dataset(cluster, folder, env)
            else:
                found[name] = evalspan(cluster, folder, env, name, options)
            say(f"{name}: {found[name]['makespan_seconds']:.1f} s")
    scores = {name: one.pop("results") for name, one in found.items()}
    rows = []
    if {"exact", "per_dataset"} <= scores.keys():
        others = sorted(set(unequal(scores["per_dataset"], scores["exact"])))
        rows.append(row("unequal_data_sets", len(others), 0, names=others))
        times = {name: one["makespan_seconds"] for name, one in found.items()}
        rows += [
            row(f"per_dataset_over_{name}", times["per_dataset"] / its, 1.0, at_least=True)
            for name, its in times.items()
            if name != "per_dataset"
        ]
    if {"exact", "disturbed"} <= scores.keys():
        one, other = (json.dumps(scores[name]["results"], sort_keys=True) for name in ("exact", "disturbed"))
        rows.append(row("scores_differ_after_faults", one != other, 0))
    if later := found.get("exact", {}).get("later_checkpoints"):
        off = abs(later[-1]["predicted_makespan_seconds"] / later[-1]["makespan_seconds"] - 1)
        rows.append(row("prediction_off", off, PREDICTED))
    return targets(rows, **found)


RUNS = ("exact", "fast", "round_robin", "per_dataset")
OPTIONS = (
    option("--only", list(RUNS), nargs="*", choices=(*RUNS, "disturbed"), type=str),
    option("--checkpoints", 3, "checkpoints of exact mode"),
    option("--nodes", 4, "GPU nodes"),
    option("--gpus", 8, "slots of a node"),
    option("--tokens", 32, "generated tokens of a document at most"),
    option("--workers", 4, "CPU jobs that run metrics"),
)
if __name__ == "__main__":
    sys.exit(command("bench_portfolio", __doc__, measure, *OPTIONS, slurm=True))
