"""An item whose metric hangs or kills costs its own score and no other's."""

import json
import os
import re
import signal
import statistics
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exactness.pipeline import Case, dumped, score_spec

from evaljobs.contract.outcomes import Scored
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.errors import OperatorError, RetryError
from evaljobs.scoring import item_deadlines, score
from evaljobs.scoring.item_deadlines import Items, ItemWatch


def spec_in(folder, seconds=0.2):
    return score_spec(folder, "t", item_seconds=seconds)


@pytest.mark.model
def test_hanging_and_deadly_items_have_no_score_and_all_others_have_theirs(model_dir, tmp_path, monkeypatch):
    """An item on which the job's process died twice, and one that exceeds its deadline while its
    metric catches every Exception, are named; the mean is over the rest.
    """
    monkeypatch.setenv("HOSTILE", "horse")
    spec = dumped(model_dir, Case(task="toy_hostile"), tmp_path).model_copy(update={"item_seconds": 0.5})
    deaths = 0
    while True:
        child = os.fork()
        if child == 0:
            try:
                score.perform_metric_job(spec)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        deaths += 1
    assert deaths == 2
    outcome = Scored.model_validate_json(EvaluationPaths(tmp_path).outcome("scored", "score").read_bytes())
    assert list(outcome.unscored) == ["toy_hostile 2", "toy_hostile 5"]
    assert "2 processes died" in outcome.unscored["toy_hostile 2"]
    assert "longer than 0.5 s" in outcome.unscored["toy_hostile 5"]
    (samples,) = (tmp_path / "samples").glob("*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    values = [line["letters"] for line in lines if "letters" in line]
    assert len(values) == 6
    found = json.loads(Path(outcome.result_file).read_text())["results"]["toy_hostile"]
    assert found["letters,none"] == pytest.approx(statistics.mean(values))
    monkeypatch.delenv("HOSTILE")
    again = score.perform_metric_job(spec)
    assert isinstance(again, Scored)
    assert list(again.unscored) == ["toy_hostile 2"], "what died is not run again, whatever became of it"


@pytest.mark.model
@pytest.mark.parametrize("task", ["toy_choice", "toy_pages"])
def test_a_look_scores_what_was_asked_as_the_whole_score_does_and_nothing_else(model_dir, tmp_path, task):
    """Of documents whose answers are there; no metric runs on another, all requests are built, and each template is compiled once."""
    import lm_eval.utils

    spec = dumped(model_dir, Case(task=task), tmp_path)

    def samples_of(documents):
        told = spec.model_copy(update={"documents": documents and {task: documents}})
        found = json.loads(Path(score.score_entry(told).result_file).read_text())
        (file,) = (tmp_path / "samples").glob("*.jsonl")
        return found["results"], [json.loads(line) for line in file.read_text().splitlines()]

    results, whole = samples_of(None)
    assert results
    asked = tuple(sorted({line["doc_id"] for line in whole})[1::2])
    compiled = lm_eval.utils.env.from_string.cache_info().misses
    assert samples_of(asked) == ({}, [line for line in whole if line["doc_id"] in asked])
    assert lm_eval.utils.env.from_string.cache_info().misses == compiled


def test_where_no_item_is_left_there_is_no_score(tmp_path):
    """A task all of whose items fail is a failure that names the first reason; one whose filters never end names those."""

    class Task:
        def doc_iterator(self):
            return iter(enumerate("ab"))

        def process_results(self, _doc, _results):
            time.sleep(3600)

        def apply_filters(self):
            re.match(r"(a+)+$", "a" * 60 + "b")

    task = Task()
    with Items(spec_in(tmp_path)) as some, pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_deadlines, "FIRST_SECONDS", 0.0)
        some.guard("t", task)
        with pytest.raises(OperatorError, match=r"t: its filters took longer than 0.2 s: .* backtracks"):
            task.apply_filters()
        documents = task.doc_iterator()
        for _ in range(2):
            task.process_results(next(documents)[1], [])
        with pytest.raises(RetryError, match=r"no item could be scored.*longer than 0.2 s"):
            next(documents)
    assert list(some.reasons()) == ["t 0", "t 1"]


def test_an_alarm_of_before_is_still_due_after_an_item(tmp_path):
    """RQ's limit on a job outlasts items that set and clear their own alarms."""
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    signal.setitimer(signal.ITIMER_REAL, 0.4)
    try:
        with Items(spec_in(tmp_path, 60.0)) as some:
            for number in range(3):
                assert some.value(("t", number), lambda: {"left": signal.alarm(0)})
            deadline = time.monotonic() + 20
            while not rang:
                assert time.monotonic() < deadline
                time.sleep(0.02)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@given(in_hand=st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=8))
def test_only_an_item_current_at_two_deaths_is_deadly(tmp_path_factory, in_hand):
    """An item is left out from the second death during it; a job that ends well leaves a note only
    if a process died.
    """
    folder = tmp_path_factory.mktemp("note")
    spec = spec_in(folder)
    for number in in_hand:
        dying = Items(spec).__enter__()
        if number is not None:
            dying.take(("t", number))
        os.close(dying._note)
    with Items(spec) as some:
        left = {n for n in range(4) if not some.value(("t", n), lambda: {"x": 1})}
    assert left == {n for n in range(4) if in_hand.count(n) >= 2}
    assert bool(list(folder.rglob("*.hand"))) == any(n is not None for n in in_hand)


def test_a_note_held_by_a_twin_is_not_read_as_a_death(tmp_path):
    """The same job twice at once: the second counts no death of the first."""
    spec = spec_in(tmp_path)
    with Items(spec) as first:
        first.take(("t", 1))
        for _ in range(3):
            with Items(spec) as second:
                assert second.value(("t", 1), lambda: {"x": 1})


def test_the_watch_finds_an_item_that_hangs(tmp_path):
    """An item that stays current for over twice its deadline plus import time is overdue; a new one
    is not.
    """
    spec = spec_in(tmp_path, 60.0)
    watch = ItemWatch(spec)
    assert watch.overdue(0.0) == ""
    with Items(spec) as some:
        some.take(("t", 1))
        assert watch.overdue(1.0) == ""
        assert watch.overdue(420.0) == ""
        assert watch.overdue(422.0) == "t 1"
        some.take(("t", 2))
        assert watch.overdue(423.0) == ""
        some.clear()
        assert watch.overdue(9999.0) == ""
