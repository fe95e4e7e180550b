"""What commands draw and print, at 40 and at 120 columns. The texts are snapshots; three laws hold of each: nothing is wider
than the terminal, no id, name or figure is cut, and every evaluation is shown.
"""

import io
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from support.trainings import compared, point, results

from coordinator.intake import pending
from coordinator.intake.inbox import RefusedCheckpoint
from coordinator.interface.cli.screen import live_screen
from coordinator.interface.cli.screen.board import compose_screen, evaluation_table
from coordinator.interface.cli.screen.evaluation_views import EvaluationView, in_serving_order
from coordinator.interface.cli.screen.listing import Surroundings, show_left_out, show_pending
from coordinator.interface.cli.screen.live_screen import ALIVE_SECONDS, Watcher
from coordinator.results.report import mode_check
from coordinator.results.report.comparisons import heads_of, show_comparison
from coordinator.results.report.learning_curves import make_series
from coordinator.results.report.measurements import UNMEASURED, EntryLine, Report
from coordinator.results.report.render import score_table, show_report
from coordinator.results.report.scores import ScoreValue, scores_of
from coordinator.results.report.series_screen import show_series
from coordinator.results.report.usage import GpuUse
from coordinator.runtime import observers
from coordinator.runtime.summary import Halt, Lane, Node, Summary, Task, TimedNote
from coordinator.site.cluster import JobState
from coordinator.site.cluster.slurm_limits import RULES, limit_in_words, never_starts

NOW = 1_700_000_000.0
DAY = 86400.0
LONG_ID = "step-1000-of-a-training-with-a-long-name-core-1a2b3c4d"
ENDED_ID = "step-900-core-00000000"


def score(task, metric="acc"):
    return ScoreValue(task=task, metric=metric, filter="none", value=0.25, stderr=0.01)


def running(name="step-1000-mini-00001000", *, trials=3, **more):
    """In the middle: one task scored, one to infer, a trial that is pending, others at work on nodes of eight lanes."""
    doing = Lane(lane="", doing="inferring", task="hellaswag", batch="3 of 9")
    lanes = [doing.model_copy(update={"lane": f"n{1 + i // 8}/{i % 8}"}) for i in range(1, trials)]
    known = {
        "suite": "mini", "step": 1000, "checkpoint": "/runs/a/step-1000", "accepted_at": NOW - 60, "stage": "inference",
        "entries": 2, "scored": 1, "shards": 12, "shards_done": 5, "trials": trials, "done_at": NOW + 40.2,
        "lanes": (Lane(lane="n1/0", doing="pending"), *lanes),
        "metric_jobs": 4, "metric_jobs_open": {"execute code": 2, "score add": 1},
        "tasks": (
            Task(name="add", state="scored", scores=(score("add", "exact_match"),)),
            Task(name="a_task_with_a_rather_long_name", state="to infer"),
        ),
    }  # fmt: skip
    return Summary(schema_version=3, evaluation_id=name, written_at=NOW, **{**known, **more})


def ended(name=ENDED_ID, **more):
    known = {
        "suite": "core", "step": 900, "stage": "ended", "scored": 4, "entries": 4, "trials": 0, "lanes": (), "tasks": (),
        "accepted_at": NOW - 7200, "ended_at": NOW - 3600, "makespan_seconds": 61.5, "metric_jobs_open": {},
        "scores": tuple(score(task) for task in ("hellaswag", "arc_challenge", "winogrande", "mmlu")),
    }  # fmt: skip
    return running(name, **{**known, **more})


def printed(*parts):
    def draw(console):
        for part in parts:
            console.print(part, overflow="ignore", crop=False)

    return draw


OVER = (EvaluationView(ended()),)


def drawn(*runs, over=OVER, below="daemon: running", height=None):
    """As `watch`, `eval` and the daemon draw it."""
    found = in_serving_order([*runs], [one.summary for one in runs])
    return lambda console: printed(compose_screen(console, found, over, [below], NOW, height))(console)


def listed(*found, now=NOW, whole=False):
    """As `status` prints it."""
    return printed(*evaluation_table(found, now, whole=whole))


def piped(*runs, dumb=False):
    """Lines of an evaluation that is shown again and again where no cursor moves."""

    def draw(console):
        how = {"force_terminal": dumb, "_environ": {"TERM": "dumb"}} if dumb else {}
        plain = Console(file=console.file, color_system=None, width=console.width, **how)
        with Watcher(plain) as watcher:
            for run in runs:
                watcher.show([run], "")
            watcher.show([], "", [EvaluationView(ended(runs[0].summary.evaluation_id))])

    return draw


def several(*draws):
    def draw(console):
        for one in draws:
            one(console)
            console.print()

    return draw


BACK_OFF = Node(name="n1", status="back-off", why="3 trials died", until=NOW + 61, times=2)
FAILED = Task(name="gsm8k", state="failed", error="no data [set]")
STALE = "cancelled: stale: step-3 is newer"
SIXTY = tuple(Task(name=f"task{i}", state="failed", error=STALE if i else "no data") for i in range(60))
MENDED = {"failed_jobs": {"es-1-trial-n1-a0": "CUDA out of memory"}}
TROUBLED = EvaluationView(
    running(
        LONG_ID, tasks=(FAILED,), nodes=(BACK_OFF,), waits_until=NOW + 61, fault="disk full",
        waits=(TimedNote(what="2 trials are pending", why="Priority"),), held=(TimedNote(what="es-1-build-a0", why="MaxSubmitJobs"),),
        stragglers={"es-1-trial-n2-a0.3": "takes 3.1 times as long"},
        failed_jobs={f"es-1-trial-n1-a{i}": "out of memory" for i in (0, 1)},
    ),
    trackers={"wandb": "no answer"},
)  # fmt: skip
WAITS = [
    EvaluationView(running(trials=0, stage="waits", waits=(TimedNote(what="2 trials are pending", at=NOW - 190, why="jobs of higher priority go first (Priority)"),))),
    EvaluationView(running("step-2000-mini-00002000", priority=-1, stage="waits", held=(TimedNote(what="es-1-build-a0", at=NOW + 9, why="MaxSubmitJobs"),))),
    EvaluationView(running("step-3000-mini-00003000", waits_until=NOW + 61, nodes=(BACK_OFF,), stragglers={"es-1-trial-n2-a0.3": "takes 3.1 times as long as the others"})),
]  # fmt: skip
BROKEN = [
    EvaluationView(
        running(tasks=(FAILED,), failed_jobs={f"es-1-trial-n1-a{i}": "CUDA out of memory" for i in range(2)})
    ),
    EvaluationView(
        running("step-2000-mini-00002000"), Halt("stopped", NOW - 45, "no process goes on with it")
    ),
]
STEPS = [EvaluationView(running(f"step-{step}-mini-0000{step}", step=step)) for step in (1000, 2000, 3000)]
EIGHT = [EvaluationView(running(f"step-{i}-mini-0000000{i}")) for i in range(1, 9)]
STOPPED = EvaluationView(
    running(waits=(TimedNote(what="no GPU is free"),)), Halt("stopped", NOW - 45, ""), jobs_left=4
)
QUEUED = JobState(
    job_id="125",
    name="evalspan-daemon",
    index=0,
    phase="pending",
    state="PENDING",
    reason="BeginTime",
    started_at=NOW,
)
START = "evalspan daemon --work-dir w"
DAEMONS = [
    Surroundings(holder="evalspan daemon, pid 7 on n1", since=NOW - 60),
    Surroundings(holder="evalspan eval, pid 7 on n1", since=NOW - 60),
    Surroundings(holder="", since=None, daemon_command=START),
    Surroundings(wrapped="sbatch -p cpu evalspan-daemon.sbatch --work-dir w"),
    Surroundings(queued=[QUEUED]),
    Surroundings(queued=[replace(QUEUED, reason="PartitionTimeLimit")]),
]
CHECKPOINTS = pending.PendingCheckpoints(
    waiting=tuple(
        pending.WaitingCheckpoint(
            checkpoint=f"/run/[step]-{i}", suite="/s/core.toml", since=NOW - 60, why="no config.json"
        )
        for i in range(7)
    ),
    refused=(RefusedCheckpoint(checkpoint="/run/step-2", suite="croe", at=NOW, why="no suite"),),
)
REASONS = [
    *(rule.reason for rule in RULES if rule.reason),
    "QOSMaxJobsPerUserLimit", "AssocGrpGRES", "AssocGrpCPURunMinutesLimit", "QOSMaxGRESPerJob", "ReqNodeNotAvail, UnavailableNodes:n1",
    "NewInSlurm27", "None", "uid_1001_not_in_group_permitted_to_use_this_partition_(gpu)",  # 25.11, of AllowGroups
    *(f"{whose}{limit}" for whose in ("QOS", "Assoc") for limit in
      ("MaxWallDurationPerJobLimit", "MaxCpuPerJobLimit", "MaxMemPerJob", "MaxGRESPerNode", "MinGRES",
       "GrpCpuLimit", "MaxJobsPerUserLimit", "MaxGRESPerUser", "GrpSubmitJobsLimit")),
]  # fmt: skip

GROUP = {
    "results": {
        "mmlu_high_school_government_and_politics": {"acc,none": 0.25, "acc_stderr,none": 0.0125},
        "gsm8k": {
            "exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.02,
            "exact_match,flexible-extract": 0.75, "exact_match_stderr,flexible-extract": 0.03,
        },
        "wikitext": {"word_perplexity,none": 12345.6789, "word_perplexity_stderr,none": "N/A"},
        "mmlu": {"acc,none": 0.375, "acc_stderr,none": 0.0375},
    },
    "groups": {"mmlu": {"acc,none": 0.375, "acc_stderr,none": 0.0375}},
    "group_subtasks": {"mmlu": ["mmlu_high_school_government_and_politics"]},
    "versions": {"gsm8k": 3.0, "wikitext": 2.0, "mmlu": 2},
    "n-shot": {"gsm8k": 5, "wikitext": 0},
    "higher_is_better": {"gsm8k": {"exact_match": True}, "wikitext": {"word_perplexity": False}},
    "n-samples": {"gsm8k": {"effective": 1319}, "mmlu_high_school_government_and_politics": {"effective": 193}},
}  # fmt: skip
FIGURES = (
    "0.2500", "0.0125", "0.5000", "0.0200", "0.7500", "0.0300", "12345.6789", "0.3750", "0.0375", "1319", "193",
)  # fmt: skip
NODES = {f"gpu-node-of-a-long-name-n{i:04d}": "shm" for i in (1, 2)}
NO_SET = EntryLine(name="add", status="failed", error="no data [set]")
CANCELLED = EntryLine(name="pages", status="failed", error="cancelled: interrupted")


def report(*devices, verbose=False, ran=True, **more):
    """What `eval` and `report` print after an evaluation."""
    held = {"node": "n", "gpus": 1, "started_at": 0.0, "held": 9.0, "infer": 1.0, "other": 8.0, "shards": 1}
    known = {
        "evaluation_id": "step-1-mini-00000001", "checkpoint": "/runs/a/step-1", "step": 1, "suite": "mini", "status": "done",
        "accepted_at": NOW, "makespan_seconds": 90.0, "gpu_seconds": 3600.0, "gpu_busy_fraction": 0.5, "warnings": ("a warning",),
        "entries": (NO_SET,), "gpus": tuple(GpuUse(trial=f"es-1-trial-n-{d}", device=d, ended="drained", **held) for d in devices),
    }  # fmt: skip
    made = Report(**{**UNMEASURED, **known, **more})
    return lambda console: show_report(console, made, results(0.25), 2.0, verbose=verbose, ran=ran)


def documents(of, number, task):
    """Columns of 400 documents whose means are the scores of the task; each checkpoint moves other ones."""
    moved = np.where(np.arange(400) % (number + 2) == 0, 0.1, 0.0)
    values = {
        name: score + moved - moved.mean()
        for name, score in of["results"][task].items()
        if isinstance(score, float)
    }
    return {"doc_id": np.arange(400), "doc_hash": np.arange(400), **values}


def series_and_comparison(*columns, heads=()):
    """The series of these results, and their comparison."""
    points = [point(1000 * (i + 1), 0.5, scores=scores_of(each)) for i, each in enumerate(columns)]
    ids = [p.evaluation_id for p in points]

    def draw(console):
        if not heads:
            show_series(console, make_series(points))
        rows = compared(*columns, documents=lambda i, task: documents(columns[i], i, task))
        show_comparison(console, heads or heads_of(points), ids, rows)

    return draw


def keyed(value, key, version, shots, documents):
    counted = {"n-samples": {"add": {"effective": documents}}}
    made = results(value, versions={"add": version}, **{"n-shot": {"add": shots}}, **counted)
    return {**made, "evalspan": {"keys": {"add": {"asks": key, "score": "s"}}}}


SUITES = [
    point(1000, 0.2),
    point(1000, 0.2, accepted_at=NOW + 1001),
    point(1000, 0.2, suite="second", evaluation_id="x"),
]
UNSTEPPED = [
    point(i if not i else None, 0.1, checkpoint=f"/r/v{i}", evaluation_id=f"v{i}", accepted_at=i)
    for i in range(9)
]
CHECKED = mode_check.ModeCheck(
    evaluations={"exact": "a", "fast": "b"},
    tasks=(mode_check.task_check("t", "multiple_choice", []),),
    scores=(
        mode_check.ScoreCheck(name="t/acc", exact=0.5, fast=0.25),
        mode_check.ScoreCheck(name="u/acc", exact=0.5, fast=None),
    ),
)
# name -> how it is drawn, and what stands in it whole
SCREENS = {
    "one": (drawn(EvaluationView(running(LONG_ID, warnings=("a node is slow",)))), (LONG_ID, ENDED_ID)),
    "many-lanes": (drawn(EvaluationView(running(trials=96))), ("n12", ENDED_ID)),
    "several": (drawn(*STEPS), [one.summary.evaluation_id for one in STEPS]),
    "waits": (drawn(*WAITS), [one.summary.evaluation_id for one in WAITS]),
    "failed": (drawn(*BROKEN), [one.summary.evaluation_id for one in BROKEN]),
    "sixty-tasks": (several(drawn(EvaluationView(running(tasks=SIXTY)), over=()), piped(EvaluationView(running(tasks=SIXTY)))), ("task0:",)),
    "low": (several(*(drawn(*EIGHT, over=(), height=height) for height in (12, 24, 40))), ("daemon: running",)),
    "pipe": (piped(*2 * [EvaluationView(running(nodes=(BACK_OFF,), waits_until=NOW + 9))]), ("0.0100",)),
    "pipe-stopped": (piped(STOPPED, BROKEN[1]), ("stopped",)),
    "dumb-terminal": (piped(*2 * [EvaluationView(running(nodes=(BACK_OFF,), waits_until=NOW + 9))], dumb=True), ("0.0100",)),
    "list": (listed(TROUBLED, EvaluationView(ended())), (LONG_ID, ENDED_ID, "5/12", "1/2", "61.5")),
    "list-many-scores": (listed(EvaluationView(ended(scores=3 * ended().scores))), (ENDED_ID, "and 6 more")),
    "list-later": (several(*(listed(EvaluationView(ended()), now=NOW + days * DAY) for days in (0.001, 5, 400))), ("2023-11-14",)),
    "list-mended": (
        several(listed(EvaluationView(ended(**MENDED))), listed(EvaluationView(ended(**MENDED)), whole=True), listed(EvaluationView(running(**MENDED)))),
        (ENDED_ID, "step-1000-mini-00001000"),
    ),
    "list-stopped": (listed(STOPPED), (STOPPED.summary.evaluation_id, "stopped since")),
    "daemons": (printed(*(one.daemon_line(NOW) for one in DAEMONS)), ("daemon: running", f"`{START}`", "`scancel 125`")),
    "pending": (printed(*show_pending(CHECKPOINTS, NOW), *show_left_out(3, 2, "evalspan status")), ("/run/[step]-0", "/run/step-2")),
    "scores": (printed(score_table(GROUP, "Scores")), (*FIGURES, *GROUP["results"], "strict-match", "flexible-extract")),
    "scores-ascii": (printed(score_table(GROUP, "Scores", ascii_only=True)), FIGURES),
    "report": (report(), ("90.0 s", "a warning", "0.2500", "FAILED add")),
    "report-verbose": (report("NVIDIA A100", "", verbose=True, nodes=NODES), (*NODES, "0.2500", "FAILED add")),
    "report-without-gpus": (several(report("cpu", ""), report("cpu", "", verbose=True)), ("slot time",)),
    "report-not-run": (report(ran=False), ("0.2500",)),
    "report-paused": (
        several(*(report(away_seconds=away, paused_seconds=paused, verbose=verbose) for verbose in (False, True)
                  for away, paused in ((31.0, 31.0), (60.0, 0.0), (60.0, 10.0)))),
        ("31.0 s", "60.0 s", "50.0 s"),
    ),
    "report-reused": (report(reused={"add": "step-0-mini-00000000"}, reused_scores=("add",)), ("step-0-mini-00000000",)),
    "report-failed": (report(status="failed"), ("`evalspan retry step-1-mini-00000001`", "FAILED add: no data")),
    "report-cancelled": (report(status="cancelled", entries=(NO_SET, CANCELLED)), ("`evalspan retry step-1-mini-00000001`",)),
    **{
        f"compare-{count}": (
            series_and_comparison(*(results(0.9 - 0.02 * i) for i in range(count))),
            [f"{0.9 - 0.02 * i:.4f}" for i in range(count)] + [f"step-{1000 * i}-mini-00000000" for i in range(1, count)],
        )
        for count in (1, 2, 5, 30)
    },
    "compare-other-requests": (
        series_and_comparison(keyed(0.9, "a", 2.0, 5, 8), keyed(0.1, "b", 3.0, 0, 8), keyed(0.1, "c", 2.0, 5, 12)),
        ("0.9000", "0.1000~"),
    ),
    "compare-modes": (
        series_and_comparison(results(0.9), *(results(v, evalspan={"mode": m}) for m, v in (("exact", 0.8), ("fast", 0.1))), heads="abc"),
        ("0.1000~",),
    ),
    "series-of-suites": (lambda console: show_series(console, make_series(SUITES)), ("second",)),
    "series-without-steps": (lambda console: show_series(console, make_series(UNSTEPPED)), ("v8",)),
    "check-fast": (lambda console: mode_check.show_mode_check(console, CHECKED), ("-0.2500", "u/acc")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def text_of(draw, width):
    out = io.StringIO()
    draw(Console(file=out, width=width, force_terminal=True, color_system=None))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    return "\n".join(line.rstrip() for line in plain.splitlines()) + "\n"


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_fits_and_nothing_in_it_is_cut(name, goldens, monkeypatch):
    """No line but a command or an id is wider than the terminal; a line that is not drawn to a terminal is whole. A command is on
    one line. A row of an evaluation stands once.
    """
    monkeypatch.setattr(live_screen.time, "time", lambda: NOW)
    draw, whole = SCREENS[name]
    ids = {one for one in whole if one.startswith("step-")}
    for width in (40, 80, 120):
        text = text_of(draw, width)
        joined = " ".join(text.split())
        assert [part for part in whole if part not in text and part not in joined] == [], text
        assert not re.search(r"\S…", text), "cut"  # not `evalspan eval …`
        assert [line for line in text.splitlines() if line.count("`") % 2] == [], "a command is broken"
        wide = [line.strip() for line in text.splitlines() if len(line) > width]
        if name not in ("pipe", "pipe-stopped", "dumb-terminal", "sixty-tasks"):
            assert all(line.rstrip(":") in ids or re.fullmatch(r"`[^`]+`[.;]?", line) for line in wide), wide
        if width != 80:
            goldens.check(f"texts/screens/{name}-{width}.txt", text)


def test_a_reason_of_slurm_is_put_in_words_and_keeps_its_own(goldens):
    """And where no wait mends it, the words say which setting does, or what to do."""
    for reason in (one for one in REASONS if never_starts(one) and not one.startswith("Dependency")):
        assert re.search(r"\[(cluster|trial)\] \w+", limit_in_words(reason)), reason
    told = (f"{r}: {'never starts' if never_starts(r) else 'waits'}: {limit_in_words(r)}\n" for r in REASONS)
    goldens.check("texts/slurm-reasons.txt", "".join(told))


def test_a_long_stage_gives_a_sign_of_life(monkeypatch):
    """The same line again once ALIVE_SECONDS have passed, and not before, in a pipe and by `evalspan.evaluate(progress=…)`;
    what has changed at once.
    """
    out, now, seen = io.StringIO(), [NOW], []
    monkeypatch.setattr(live_screen.time, "time", lambda: now[0])
    monkeypatch.setattr(observers.time, "monotonic", lambda: now[0])
    with Watcher(Console(file=out, width=200, color_system=None)) as watcher:
        for seconds in (0.0, ALIVE_SECONDS - 1, ALIVE_SECONDS, ALIVE_SECONDS + 1):
            now[0] = NOW + seconds
            watcher.show([EvaluationView(running())], "")
    assert out.getvalue().count("inference, 5/12 shards, 1/2 scored") == 2
    caller = observers.CallbackObserver(seen.append)
    for now[0] in (NOW, NOW - 1 + observers.ALIVE_SECONDS, NOW + observers.ALIVE_SECONDS):
        caller._show(running(), "")
    caller._show(running(), "Redis is away")
    assert [progress.trouble for progress in seen] == ["", "", "Redis is away"]
