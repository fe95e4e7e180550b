"""Laws of what `eval` and `report` print: whole figures at any width, and scores where a person looks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.trainings import leave, results

from coordinator.report.gpu_use import GpuUse
from coordinator.report.learning_curves import scores_of
from coordinator.report.measurements import EntryLine, Report
from coordinator.report.render import score_table, show

GROUP = {
    "results": {
        "mmlu_high_school_government_and_politics": {"acc,none": 0.25, "acc_stderr,none": 0.0125},
        "gsm8k": {
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": 0.02,
            "exact_match,flexible-extract": 0.75,
            "exact_match_stderr,flexible-extract": 0.03,
        },
        "wikitext": {"word_perplexity,none": 12345.6789, "word_perplexity_stderr,none": "N/A"},
        "mmlu": {"acc,none": 0.375, "acc_stderr,none": 0.0375},
    },
    "groups": {"mmlu": {"acc,none": 0.375, "acc_stderr,none": 0.0375}},
    "group_subtasks": {"mmlu": ["mmlu_high_school_government_and_politics"]},
    "versions": {"gsm8k": 3.0, "wikitext": 2.0, "mmlu": 2},
    "n-shot": {"gsm8k": 5, "wikitext": 0},
    "higher_is_better": {"gsm8k": {"exact_match": True}, "wikitext": {"word_perplexity": False}},
    "n-samples": {
        "gsm8k": {"effective": 1319},
        "mmlu_high_school_government_and_politics": {"effective": 193},
    },
}
FIGURES = ("0.2500", "0.0125", "0.5000", "0.0200", "0.7500", "0.0300", "12345.6789", "0.3750", "0.0375")


def printed(width: int, what: Any, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=file, width=width, color_system=None)
    console.print(score_table(what, "Scores", ascii_only=console.options.ascii_only))
    file.flush()
    return raw.getvalue().decode(encoding)


@given(width=st.integers(40, 220))
def test_a_score_table_cuts_nothing_at_any_width(width: int) -> None:
    """Each figure, name, filter and number of documents, and the group last; version and n-shot go first."""
    text = printed(width, GROUP)
    words = [word.strip(",") for word in text.split()]
    assert max(map(len, text.splitlines())) <= width
    assert {*FIGURES, *GROUP["results"], "1319", "193", "strict-match", "flexible-extract"} <= {*words}
    assert [word for word in words if word in GROUP["results"]][-1] == "mmlu"


def test_a_wide_terminal_has_a_row_per_score_and_a_column_per_fact() -> None:
    """As lm_eval prints; the lines are for narrow ones. A terminal without UTF-8 gets `^` and `v` for the direction."""
    rows = [line.split() for line in printed(140, GROUP).splitlines()]
    assert ["gsm8k", "3.0", "5", "1319", "strict-match", "exact_match", "↑", "0.5000", "0.0200"] in rows
    assert ["wikitext", "2.0", "0", "word_perplexity", "↓", "12345.6789", "-"] in rows
    assert ["mmlu", "2", "193", "acc", "0.3750", "0.0375"] in rows
    for width in (50, 120):
        assert {"^", "v"} <= {mark.strip(",") for mark in printed(width, GROUP, "ascii").split()}


def test_a_group_counts_the_documents_of_its_tasks() -> None:
    """None where one of them is unknown."""
    known = {s.task: (s.documents, s.version, s.n_shot) for s in scores_of(GROUP)}
    assert known["mmlu"] == (193, "2", None)
    assert known["gsm8k"] == (1319, "3.0", 5)
    assert known["wikitext"] == (None, "2.0", 0)
    more = {**GROUP, "group_subtasks": {"mmlu": ["mmlu_high_school_government_and_politics", "other"]}}
    assert {s.task: s.documents for s in scores_of(more)}["mmlu"] is None


@pytest.fixture
def report(tmp_path: Path) -> Report:
    read = Report.model_validate_json(leave(tmp_path, 1, 0.5).report.read_bytes())
    failed = EntryLine(name="add", status="failed", error="no data [set]")
    update = {"warnings": ("a warning",), "entries": (failed,)}
    return read.model_copy(update=update)


def shown(report: Report, width: int, **more: Any) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, color_system=None), report, results(0.25), 2.0, **more)
    return out.getvalue()


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_scores_come_after_the_accounting_and_only_failures_after_them(
    report: Report, width: int, verbose: bool
) -> None:
    """Warnings push no score off the screen; a failure, on which a person must act, is the last line. Names of nodes are whole."""
    nodes = {f"gpu-node-of-a-long-name-n{i:04d}": "shm" for i in (1, 2)}
    text = shown(report.model_copy(update={"nodes": nodes}), width, verbose=verbose)
    assert all(node in text for node in nodes) or not verbose, text
    order = [
        text.index(part) for part in ("90.0 s", "a warning", "Scores of", "0.2500", "9.7500", "FAILED add")
    ]
    assert order == sorted(order)
    assert "2.0000" in text, "an hour at 2"
    assert max(map(len, text.splitlines())) <= width
    assert len(text[: text.index("Scores of")].splitlines()) < 10 or verbose


@pytest.mark.parametrize(("device", "held"), [("cpu", "slot time"), ("NVIDIA A100", "GPU time")])
def test_a_machine_without_gpus_has_slot_time(report: Report, device: str, held: str) -> None:
    """Also where a trial died without its device."""
    known: dict[str, Any] = {"node": "n", "gpus": 1, "started_at": 0.0, "held": 9.0, "infer": 1.0}
    known |= {"other": 8.0, "shards": 1, "ended": "drained"}
    gpus = tuple(GpuUse(trial=f"es-1-trial-n-{d}", device=d, **known) for d in (device, ""))
    made = report.model_copy(update={"gpus": gpus})
    assert f"{held} 1:00 h" in " ".join(shown(made, 120).split())
    text = shown(made, 200, verbose=True)
    assert ("slot time" in text, "GPU time" in text) == (device == "cpu", device != "cpu")
    assert ("slots by cause" in text) == (device == "cpu")


def test_what_did_not_run_has_no_times(report: Report) -> None:
    """Scores of an earlier run are printed without its makespan and cost."""
    text = shown(report, 80, ran=False)
    assert "0.2500" in text
    assert "makespan" not in text.lower()
    assert "GPU" not in text


@pytest.mark.parametrize(
    ("away", "paused", "said"),
    [
        (0.0, 0.0, ()),
        (31.0, 31.0, ("without 31.0 s in which no coordinator ran and no job worked",)),
        (60.0, 0.0, ("jobs went on for 60.0 s without a coordinator",)),
        (60.0, 10.0, ("without 10.0 s in which", "jobs went on for 50.0 s without")),
    ],
)
def test_a_pause_is_named_beside_the_makespan(
    report: Report, away: float, paused: float, said: tuple[str, ...]
) -> None:
    """How much was left out, and how long jobs went on without a coordinator; short and long."""
    paused_one = report.model_copy(update={"away_seconds": away, "paused_seconds": paused})
    for verbose in (False, True):
        text = " ".join(shown(paused_one, 120, verbose=verbose).split())
        assert all(part in text for part in said), text
        assert ("coordinator" in text) == bool(said)


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_what_did_not_score_says_what_to_type(report: Report, status: str) -> None:
    """A failure its log, a cancellation what goes on; what a cancellation ended has not failed, what failed before has."""
    ended = EntryLine(name="pages", status="failed", error="cancelled: interrupted")
    entries = (*report.entries, *([ended] if status == "cancelled" else []))
    text = " ".join(shown(report.model_copy(update={"status": status, "entries": entries}), 200).split())
    assert f"`evalspan retry {report.evaluation_id}`" in text
    assert (f"`evalspan logs {report.evaluation_id} NAME`" in text) == (status == "failed")
    assert ("FAILED add: no data" in text, "FAILED pages" in text) == (True, False)
    assert "evalspan retry" not in shown(report.model_copy(update={"entries": ()}), 200)
