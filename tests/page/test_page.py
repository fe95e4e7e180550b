"""One HTML file of an evaluation, a training or a comparison."""

import base64
import gzip
import hashlib
import html.parser
import json
import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import typed
from support.simulated.parts import Faults, record
from support.simulated.world import World
from support.trainings import point, two_trainings

from coordinator.decide.evaluation.events import JobEnded, Planned
from coordinator.interface.page import page_contents
from coordinator.interface.page.evaluation import (
    Note,
    Span,
    evaluation_data,
    in_rows,
    standing_of,
    timeline_notes,
    trace_events,
)
from coordinator.interface.page.html import as_json, render_page
from coordinator.interface.page.index import index_data, short_names, training_data
from coordinator.interface.page.samples import SampleKind, blocks_of, sample_row
from coordinator.results.report import training_files
from coordinator.results.report.learning_curves import make_series
from coordinator.results.report.measurements import ShardSpan, make_report
from coordinator.results.report.scores import ScoreValue
from coordinator.results.report.training import Training, training_of
from coordinator.runtime.summary import Node, Summary, fields_of_record
from evaljobs.contract.columns import SUITE_MEAN
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.storage import write_outcome

HOSTILE = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>\x1b[31m\u202e\u2028'
MOST_CODE = 400_000  # bytes of a page without data


class _Elements(html.parser.HTMLParser):
    """The page's elements, and the text of its scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.texts = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts[len(self.tags) - 1] = self.texts.get(len(self.tags) - 1, "") + data

    def of(self, tag):
        return [(attrs, self.texts.get(i, "")) for i, (name, attrs) in enumerate(self.tags) if name == tag]


def _policy(made):
    return next(a["content"] or "" for a, _ in made.of("meta") if a.get("http-equiv"))


def test_a_page_loads_nothing_from_outside_and_runs_its_own_script_alone():
    made = _Elements(
        render_page(HOSTILE, {"kind": "training", "trainings": [], "hostile": HOSTILE}, {"b": b"x"})
    )
    assert not [a for _, a in made.tags if a.get("src") or (a.get("href") or "data:,") != "data:,"]
    scripts, policy = made.of("script"), _policy(made)
    assert policy.startswith("default-src 'none'; ")
    run = [text for attrs, text in scripts if attrs.get("type") is None]
    assert len(run) == 1
    digest = base64.b64encode(hashlib.sha256(run[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert not re.search(
        r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|importScripts|innerHTML)\b",
        run[0].split("const DATA")[1],
    )
    assert [tag for tag, _ in made.tags if tag in ("img", "iframe", "object", "link")] == [
        "link"
    ]  # the empty icon
    assert len(render_page("", {"kind": "training", "trainings": []})) < MOST_CODE


@given(
    st.recursive(
        st.text() | st.floats() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_data_come_back_as_they_were_and_close_no_script_element(data):
    text = as_json({"x": data})
    assert "<" not in text
    assert "NaN" not in re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    assert as_json(json.loads(text)) == text


@given(
    st.lists(
        st.tuples(st.sampled_from(["build", "execute", "score"]), st.floats(0, 100), st.floats(0.1, 50)),
        max_size=30,
    )
)
def test_spans_of_one_row_never_overlap_and_none_is_lost(drawn):
    spans = in_rows([Span(what=what, name="t", begin=begin, seconds=length) for what, begin, length in drawn])
    assert sorted((s.what, s.begin, s.seconds) for s in spans) == sorted(drawn)
    for row in {s.row for s in spans}:
        mine = sorted((s.begin, s.begin + s.seconds) for s in spans if s.row == row)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(mine))


@settings(max_examples=15)
@given(st.integers(0, 200))
def test_an_evaluations_page_holds_each_trial_and_shard_that_counts(seed):
    world = World(seed, Faults(kill=0.1, node_down=0.05), record())
    world.run()
    lanes = [lane for event in world.journal if isinstance(event, Planned) for lane in event.lanes]
    trials = list(world.state.trials.by_name)
    spans = [
        ShardSpan(shard=shard, trial=trials[0] if trials else "t", started_at=world.now, seconds=1.0)
        for lane in lanes
        for shard, _, _ in lane.shards
    ]
    report = make_report(world.state, world.journal, spans, world.now)
    data = evaluation_data(report, world.journal, {})
    assert len(data["shards"]["task"]) == len(spans)
    assert all(seconds is not None for seconds in data["shards"]["predicted"])
    known = trace_events(data)["traceEvents"]
    assert sum(e.get("cat") == "trial" for e in known) == len(report.gpus)
    assert all(e["dur"] >= 0 for e in known if e["ph"] == "X")
    named = {(e["pid"], e["tid"]) for e in known if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in known if e["ph"] == "X"} <= named


def test_a_page_begins_with_the_means_of_the_suites_groups():
    """Of hundreds of tasks it shows the first rows: those means, then lm-eval's groups, then tasks."""
    world = World(0, Faults(), record())
    groups = {"mmlu": {"acc,none": 0.5}, "knowledge": {SUITE_MEAN: 0.5}}
    results = {"results": {"mmlu_law": {"acc,none": 0.5}, **groups}, "groups": groups}
    data = evaluation_data(make_report(world.state, world.journal, [], world.now), [], results)
    assert [row["task"] for row in data["scores"]] == ["knowledge", "mmlu", "mmlu_law"]


def _samples(count, text):
    for i in range(count):
        yield json.dumps(
            {"doc_id": i, "arguments": {"gen_args_0": {"arg_0": f"{text}{i}", "arg_1": {}}}, "resps": [[text]], "filtered_resps": [text],
             "target": text, "metrics": ["acc"], "acc": float("nan"), "filter": "none", "doc_hash": "ab"}
        )  # fmt: skip


def test_samples_are_cut_to_the_pages_size_and_counted():
    noise = "".join(hashlib.sha256(str(i).encode()).hexdigest() for i in range(20))
    index, blocks = blocks_of({"long": _samples(2000, noise), "short": _samples(5, "a")}, most_bytes=100_000)
    assert [(row["task"], row["of"]) for row in index] == [("long", 2000), ("short", 5)]
    assert 0 < index[0]["samples"] < 2000
    assert index[1]["samples"] == 5
    assert sum(map(len, blocks.values())) < 150_000
    rows = json.loads(gzip.decompress(blocks[index[1]["block"]]))
    assert [row[0] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0][6] == {"acc": None}


def test_wrong_or_flipped_samples_are_kept_first_and_a_conversation_turn_by_turn():
    noise = [hashlib.sha256(str(i).encode()).hexdigest() * 9 for i in range(1000)]
    lines = [
        json.dumps({"doc_id": i, "resps": [[[text, "b"]]], "metrics": ["acc"], "acc": float(i < 990), "doc": {"more": "And?"}})
        for i, text in enumerate(noise)
    ]  # fmt: skip
    for kind, first in ((SampleKind(later="more"), range(990, 1000)), (SampleKind({5, 700}), (5, 700))):
        (row,), blocks = blocks_of({"t": lines}, 20_000, lambda _, kind=kind: kind)
        kept = json.loads(gzip.decompress(blocks["samples-0"]))
        assert {*first} <= {sample[0] for sample in kept}
        assert row["samples"] < row["of"] == 1000
        assert [sample[0] for sample in kept] == sorted(sample[0] for sample in kept)
    assert sample_row(json.loads(lines[0]), "more")[3::6] == [[[noise[0], "b"]], ["And?"]]


def test_a_broken_line_costs_itself_alone_and_a_document_of_two_filters_counts_once():
    lines = [*_samples(2, "a"), *(line.replace('"none"', '"vote"') for line in _samples(2, "a"))]
    (row,), blocks = blocks_of({"t": [*lines, '{"doc_id": 7, ', "3", '"x"']})
    assert (row["samples"], row["of"], row["broken"]) == (2, 2, 3)
    assert len(json.loads(gzip.decompress(blocks["samples-0"]))) == 4


def test_an_answer_is_shown_as_it_is_unless_it_is_a_megabyte():
    """A filter may have left it as a list of one; a long one is cut with a word."""
    row = sample_row({"resps": [["def f():\n"]], "filtered_resps": [["    return 1\n"]]})
    assert (row[3], row[4]) == (["def f():\n"], ["    return 1\n"])
    _, blocks = blocks_of({"t": _samples(1, "A" * 1_000_000)})
    text = gzip.decompress(blocks["samples-0"])
    assert len(text) < 30_000
    assert b"characters left out" in text


def test_trainings_of_a_page_are_the_folders_of_checkpoints():
    points = [
        point(step, 0.5, checkpoint=f"/runs/{run}/ckpt/step-{step}", evaluation_id=f"{run}-{step}")
        for run in "ab"
        for step in (1, 2)
    ]
    each = training_files.by_training(points).values()
    series = [make_series(of) for of in each]
    data = training_data([(training_of(one, lambda *_: {"verdict": "no evidence"}), one) for one in series])
    assert [(t["name"], len(t["points"])) for t in data["trainings"]] == [("a/ckpt", 2), ("b/ckpt", 2)]
    curve = next(c for c in data["trainings"][0]["curves"] if c["task"] == "add")
    alone = make_series(points[:2]).curves[0]
    assert curve["value"] == [p.value for p in alone.points]
    assert curve["at"] is None  # all checkpoints of the training


def test_a_card_has_the_scores_of_a_checkpoint_that_is_evaluated_again():
    """It counts each checkpoint once, also a copy of another training's, shows the newest evaluation's state, and the scores
    that there are.
    """

    def one(name, at, **more):
        known = fields_of_record(record()) | {
            "evaluation_id": name,
            "accepted_at": at,
            "checkpoint": "/r/step-1",
        }
        return Summary(written_at=0.0, **known | more)

    score = ScoreValue("add", "acc", "none", 0.5)
    every = [one("first", 1.0, ended_at=2.0, scores=(score,)), one("again", 3.0)]
    scored = Training(folder="/r", suite="s", scored=(("copied", "0"), ("first", "1")), mean=(None, 0.5))
    data = index_data([(every[1], None)], every[:1], lambda *_: scored, 4.0)
    (card,) = data["trainings"]
    assert (card["checkpoints"], card["lines"]) == (2, {"add": [None, 0.5]})
    assert [state[0] for state in card["states"]] == ["again"]


def test_each_node_stands_once_with_the_worst_of_its_evaluations_and_until_when():
    stood = [
        Node(name="n0", status=how, why=f"why {how}", until=90.0) for how in ("ready", "back-off", "staging")
    ]
    found = [Summary(written_at=0.0, nodes=(node,), **fields_of_record(record())) for node in stood]
    rows = {row[0]: row[1:] for row in standing_of(found, {"n9": 120.0})}
    assert rows["n0"] == ["back-off", "why back-off", 90.0]
    assert (rows["n9"][0], rows["n9"][2]) == ("cordoned", 120.0)
    assert {row[0]: row[1] for row in standing_of(found, {"n0": 120.0})} == {"n0": "cordoned"}


def test_a_failed_job_without_a_log_shows_the_end_of_its_traceback(tmp_path):
    paths = EvaluationPaths(tmp_path)
    for folder in paths.folders():
        folder.mkdir(parents=True)
    failed = Failed(
        name="score-0-0", job="score", blame="bug", error="KeyError", detail="a\n" * 100 + "KeyError\n"
    )
    write_outcome(paths, failed)
    paths.log("es-build-a0").write_text("")
    told = [Note(1.0, name, "failed", True) for name in ("score-0-0", "es-build-a0.0", "gone")]
    (shown, empty) = page_contents._logs(paths, told)
    assert (shown[0], shown[1].splitlines()[-1], shown[2]) == ("score-0-0", "KeyError", False)
    assert len(shown[1].splitlines()) == page_contents.LAST_LINES
    assert (empty[0], empty[2]) == ("es-build-a0", True)


def test_a_job_that_slurm_still_cleans_up_after_is_no_trouble():
    ends = [
        JobEnded(at=1.0, job="j", index=0, state=state) for state in ("COMPLETING", "COMPLETED", "FAILED")
    ]
    assert [note.text for note in timeline_notes(ends, 0.0)] == ["ended FAILED"]


@given(st.lists(st.text("ab/", min_size=1), min_size=1, max_size=6, unique=True))
def test_short_names_are_unique(folders):
    folders = list({str(Path("/") / f.strip("/")) for f in folders})
    names = short_names(folders)
    assert len(set(names.values())) == len(folders)


def test_report_and_compare_write_pages(tmp_path):
    work, out = two_trainings(tmp_path / "work"), tmp_path / "p.html"
    words = ["report", "--series", "/runs/*/*", "--work-dir", work, "--html"]
    typed(*words, out)
    assert '"kind":"training"' in out.read_text()
    typed(*words, tmp_path / "no" / "p.html", code=1)
    pipe = tmp_path / "pipe"  # as `>(…)` of a shell: what is no file is written to, not replaced
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        typed(*words, pipe)
        assert pipe.is_fifo()
        assert b'"kind":"training"' in reader.stdout.read()
