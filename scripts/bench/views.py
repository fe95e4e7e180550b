"""Views of a made training with planted drops: seconds and peak memory of each, in a child process.

The work folder is as scoring and the end of each evaluation leave it: record, journal, summary, report, results with configs
as large as lm-eval's, and the documents' columns. At 0.75 of the training gsm8k and hellaswag fall for good, and
mmlu_formal_logic at 0.85: with 200 checkpoints at steps 75000 and 85000 of 100000. Half of the tasks have signals.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bench.harness import ROOT, Options, RunError, command, option, row, say, targets
from coordinator.decide.evaluation.events import Accepted
from coordinator.decide.evaluation.records import EvaluationRecord, RunOptions
from coordinator.results.report.measurements import UNMEASURED, EntryLine, Report, ShardSpan
from coordinator.runtime.journal import line_of
from coordinator.runtime.summary import Summary, fields_of_record, with_document, write_summary
from evaljobs.contract.columns import BITS, MARGIN, SHARE, pack_columns, signal_means, text_digests
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import CheckpointSpec, ModelOptions, SuiteSpec, TaskEntry

if TYPE_CHECKING:
    from evaljobs.contract.columns import Columns

ALONE = (
    "gsm8k",
    "hellaswag",
    "arc_challenge",
    "arc_easy",
    "piqa",
    "winogrande",
    "boolq",
    "ifeval",
    "bbh_dyck",
)
SUBJECTS = (
    "formal_logic",
    "abstract_algebra",
    "anatomy",
    "astronomy",
    "business_ethics",
    "clinical_knowledge",
)
DROPS = {
    "gsm8k": (0.75, 0.5),
    "hellaswag": (0.75, 0.5),
    "mmlu_formal_logic": (0.85, 0.7),
}  # since, by how much skill
LAST_STEP = 100_000
SUITE = "core"
CONFIG = 2500  # bytes of a task's config in results.json
SHARDS = 4  # of a task
BEGAN = 1_790_000_000.0  # unix seconds


class Task(NamedTuple):
    """A made task. `skill`: of each document, how hard it is."""

    name: str
    metrics: tuple[str, str]
    signals: bool
    hardness: Any
    hashes: Any


def tasks_of(count: int, documents: int) -> list[Task]:
    """`count` tasks: those of ALONE, then subjects of mmlu."""
    subjects = (SUBJECTS[i] if i < len(SUBJECTS) else f"subject_{i:02d}" for i in range(count))
    names = [*ALONE, *(f"mmlu_{subject}" for subject in subjects)][:count]
    made = []
    for i, name in enumerate(names):
        rng = np.random.default_rng([1, i])
        texts = (f"{name} {n}" for n in range(documents))
        generates = i % 2 == 0
        metrics = (
            ("exact_match,strict-match", "exact_match,flexible-extract")
            if generates
            else ("acc,none", "acc_norm,none")
        )
        made.append(Task(name, metrics, not generates, rng.normal(size=documents), text_digests(texts)))
    return made


def columns_of_task(task: Task, at: float, rng: Any) -> Columns:
    """Its documents at a share `at` of the training: half of an answer's noise is the checkpoint's own."""
    since, fall = DROPS.get(task.name, (2.0, 0.0))
    skill = 0.8 * math.log1p(9 * at) / math.log(10) - (fall if at >= since else 0.0)
    count = len(task.hardness)
    margin = skill + task.hardness + 0.6 * rng.normal(size=count)
    made: Columns = {"doc_id": np.arange(count), "doc_hash": task.hashes}
    made[task.metrics[0]] = (margin > 0).astype(float)
    made[task.metrics[1]] = (margin + 0.3 * rng.normal(size=count) > -0.1).astype(float)
    if task.signals:
        made |= {BITS: np.exp(-margin / 3), SHARE: 1 / (1 + np.exp(-margin)), MARGIN: margin}
    return made


def results_of(record: EvaluationRecord, found: dict[str, Columns]) -> dict[str, Any]:
    """results.json, with mmlu's means as lm-eval gives them: weighed by documents."""

    def scores(columns: list[Columns]) -> dict[str, float]:
        said = {}
        for name in (n for n in columns[0] if "," in n and all(n in one for one in columns)):
            values = np.concatenate([one[name] for one in columns])
            metric, _, which = name.partition(",")
            said[name] = float(values.mean())
            said[f"{metric}_stderr,{which}"] = float(values.std(ddof=1)) / math.sqrt(len(values))
        return said

    results = {task: {"alias": task, **scores([columns])} for task, columns in found.items()}
    groups, subtasks = {}, {task: [] for task in found}
    subjects = [task for task in found if task.startswith("mmlu_")]
    for group, members in (("mmlu_even", subjects[::2]), ("mmlu_odd", subjects[1::2]), ("mmlu", subjects)):
        if len(members) > 1:
            groups[group] = {"alias": group, **scores([found[task] for task in members])}
            subtasks[group] = members
    if "mmlu_even" in groups and "mmlu_odd" in groups:
        subtasks["mmlu"] = ["mmlu_even", "mmlu_odd"]
    digest = hashlib.sha256(b"key").hexdigest()
    keys = dict.fromkeys(("requests", "asks", "score"), digest)
    better = {
        task: {n.partition(",")[0]: True for n in columns if "," in n} for task, columns in found.items()
    }
    return {
        "results": results | groups,
        **({"groups": groups} if groups else {}),
        "group_subtasks": subtasks,
        "configs": {task: {"task": task, "doc_to_text": "x" * CONFIG} for task in found},
        "versions": dict.fromkeys(found, 1.0),
        "n-shot": dict.fromkeys(found, 5),
        "higher_is_better": better | {group: {"acc": True, "exact_match": True} for group in groups},
        "n-samples": {
            t: dict.fromkeys(("original", "effective"), len(c["doc_id"])) for t, c in found.items()
        },
        "config": {"model": "hf", "model_args": {}},
        "evalspan": {
            "evaluation_id": record.evaluation_id,
            "checkpoint": record.checkpoint.announced,
            "step": record.checkpoint.step,
            "suite": SUITE,
            "status": "done",
            "mode": "exact",
            "makespan_seconds": 280.4,
            "paused_seconds": 0.0,
            "keys": dict.fromkeys(found, keys),
            "shown": {"build": {f"package:p{i}": digest for i in range(60)}, "score": {}},
            "signals": {task: signal_means(columns) | {"chance": 0.25} for task, columns in found.items()},
            "at_chance": False,
            "fell_to_chance": "",
        },
    }


def record_of(step: int, number: int, tasks: list[Task]) -> EvaluationRecord:
    entries = dict.fromkeys("mmlu" if task.name.startswith("mmlu_") else task.name for task in tasks)
    return EvaluationRecord(
        evaluation_id=f"step-{step}-{SUITE}-{number:08x}",
        checkpoint=CheckpointSpec(source=f"/runs/made/step-{step}", digest=f"d{step}", files=(), step=step),
        suite=SuiteSpec(name=SUITE, tasks=tuple(TaskEntry(name=name) for name in entries)),
        model=ModelOptions(),
        options=RunOptions(),
        accepted_at=BEGAN + 600 * number,
    )


def leave(work: Path, number: int, step: int, tasks: list[Task]) -> None:
    """Write one evaluation that has ended."""
    record = record_of(step, number, tasks)
    rng = np.random.default_rng([2, number])
    found = {task.name: columns_of_task(task, step / LAST_STEP, rng) for task in tasks}
    paths = EvaluationPaths(work / record.evaluation_id)
    for folder in paths.folders():
        folder.mkdir(parents=True)
    entries = [entry.name for entry in record.suite.tasks]
    entry_of = {task: entries.index("mmlu" if task.startswith("mmlu_") else task) for task in found}
    paths.documents.write_bytes(
        pack_columns({(entry_of[task], task): columns for task, columns in found.items()})
    )
    results = results_of(record, found)
    spans = [
        ShardSpan(
            shard=f"{task}|{i}|{i + 1}", trial=f"{record.evaluation_id}-n{i}", started_at=BEGAN, seconds=2.0
        )
        for task in found
        for i in range(SHARDS)
    ]
    known = {
        "evaluation_id": record.evaluation_id,
        "checkpoint": record.checkpoint.announced,
        "step": step,
        "suite": SUITE,
        "status": "done",
        "accepted_at": record.accepted_at,
        "makespan_seconds": 280.4,
        "gpu_seconds": 1800.0,
        "shards": tuple(spans),
        "metric_seconds": dict.fromkeys(entries, 3.0),
        "entries": tuple(EntryLine(name=name, status="scored") for name in entries),
        "warnings": (),
    }
    paths.evaluation.write_text(record.model_dump_json(indent=1))
    paths.report.write_text(Report(**UNMEASURED | known).model_dump_json(indent=1))
    paths.results.write_text(json.dumps(results, indent=2))
    paths.journal.write_bytes(line_of(Accepted(at=record.accepted_at, record=record)))
    ended = fields_of_record(record) | {
        "written_at": record.accepted_at + 281,
        "ended_at": record.accepted_at + 281,
        "scored": len(entries),
        "shards": len(spans),
        "shards_done": len(spans),
    }
    size = {"journal_bytes": paths.journal.stat().st_size}
    write_summary(paths, with_document(Summary(**ended), paths).model_copy(update=size))


def make(work: Path, checkpoints: int, tasks: int, documents: int) -> None:
    """Make the training's work folder; `work` must not exist."""
    work.mkdir(mode=0o700, parents=True)
    (work / "daemon.lock").touch()
    made = tasks_of(tasks, documents)
    for number in range(checkpoints):
        leave(work, number, LAST_STEP * (number + 1) // checkpoints, made)


# --- measured --------------------------------------------------------------------------------------------------------

FIRST_PAGE = """
import sys
from pathlib import Path
from coordinator.site.config.schema import Config
from coordinator.interface.page import html, server
found = server.Pages(Config(work_dir=Path(sys.argv[1]))).index()
print(len(html.render_page(*found, live=True)))
"""
EVALSPAN = ("-m", "coordinator")


def child(argv: list[str], out: Path | None = None) -> tuple[float, float, float, int]:
    """(seconds, of these on a CPU, peak MB, bytes of stdout) of Python with these arguments."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        started = time.perf_counter()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        process = subprocess.Popen(
            [sys.executable, *argv], stdout=stdout, stderr=stderr, env=environment, cwd=ROOT
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            stderr.seek(0)
            raise RunError(
                f"{' '.join(argv)[:200]}: exit status {process.returncode}: {stderr.read()[-2000:]!r}"
            )
        size = stdout.seek(0, os.SEEK_END) if out is None else out.stat().st_size
        return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, size


def views(work: Path, folder: Path) -> Iterator[tuple[str, list[str], Path | None]]:
    """(view, arguments, file that it writes)."""
    place, page = ["--work-dir", str(work)], folder / "page.html"
    series = [*EVALSPAN, "report", "--series", "/runs/made", *place]
    last = sorted(work.glob(f"*-{SUITE}-*"), key=lambda p: p.name.rpartition("-")[2])
    yield "report --series, first", series, None
    yield "report --series, again", series, None
    yield "report --series --json", [*series, "--json"], None
    yield "report --series --html", [*series, "--html", str(page)], page
    yield "compare", [*EVALSPAN, "compare", last[0].name, last[-1].name, *place], None
    yield "first page", ["-c", FIRST_PAGE, str(work)], None
    yield "status", [*EVALSPAN, "status", *place], None


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(options.keep or f"{folder}/work")
        started = time.perf_counter()
        if not work.exists():
            make(work, options.checkpoints, options.tasks, options.documents)
        for kept in (*work.glob("*/paired.json*"), *work.glob("cache/trainings/*")):
            kept.unlink()
        figures: dict[str, Any] = {"made_seconds": time.perf_counter() - started}
        rows = []
        for view, argv, out in views(work, Path(folder)):
            seconds, cpu, megabytes, size = child(argv, out)
            say(f"{view}: {seconds:.2f} s, {cpu:.2f} s of CPU, {megabytes:.0f} MB, {size} bytes")
            limit, most = TARGETS[view]
            rows.append(row(f"seconds of {view}", seconds, limit, cpu_seconds=cpu, bytes=size))
            rows.append(row(f"MB of {view}", megabytes, most))
        return targets(rows, **figures)


TARGETS = {  # seconds, MB
    "report --series, first": (5.0, 300.0),
    "report --series, again": (1.0, 300.0),
    "report --series --json": (5.0, 300.0),
    "report --series --html": (5.0, 300.0),
    "compare": (3.0, 300.0),
    "first page": (1.0, 300.0),
    "status": (1.0, 300.0),
}

if __name__ == "__main__":
    sys.exit(
        command(
            "bench_views",
            __doc__,
            measure,
            option("--checkpoints", 200),
            option("--tasks", 60),
            option("--documents", 1000),
            option("--keep", "", "work folder to make and keep, or to use where it exists"),
        )
    )
