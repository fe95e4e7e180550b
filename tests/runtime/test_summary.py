"""Laws of `Summary`, the record that screens, pages, metrics and news read in place of a journal."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from support.ended import leave_ended
from support.simulated.large import Large

from coordinator.config.schema import Config
from coordinator.evaluation.state import Phase, State
from coordinator.keeping.archive import archive_ended
from coordinator.report.learning_curves import ScoreValue
from coordinator.runtime.summaries import Summaries
from coordinator.runtime.summarise import summary_now, summary_of
from coordinator.runtime.summary import (
    MOST_BYTES,
    SILENT_SECONDS,
    Summary,
    failed_jobs,
    fitted,
    halt_of,
    read_summary,
    with_costs,
    write_summary,
)
from coordinator.runtime.work_lock import WorkLock
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.paths import EvaluationPaths, WorkPaths


class Halfway(Large):
    """A large evaluation, up to its trials' first responses."""

    def _dump(self) -> None:
        raise StopIteration


def under_way(nodes: int, tasks: int) -> State:
    made = Halfway(nodes, tasks=tasks)
    with pytest.raises(StopIteration):
        made.run()
    return made.state


@pytest.mark.parametrize(("nodes", "tasks"), [(1, 2), (600, 20), (2, 600)])
def test_a_summary_is_read_back_as_it_was_written_and_has_at_most_64_kb(
    tmp_path: Path, nodes: int, tasks: int
) -> None:
    """Of 4,800 lanes, or of 600 tasks with four long scores each: what counts is whole, and what failed stays first."""
    state = under_way(nodes, tasks)
    state.entries[-1].status, state.entries[-1].error = "failed", "KeyError: 'x' " * 500
    for entry in state.entries[:-1]:
        entry.status = "scored"
    value = ScoreValue(
        task="a_task_of_a_long_name" * 3, metric="acc_norm", filter="none", value=0.1 + 0.2, stderr=0.01
    )
    made = summary_of(state, 5.0, scores=lambda _: [value] * 9)
    paths = EvaluationPaths(tmp_path / state.evaluation_id)
    paths.root.mkdir()
    assert write_summary(paths, made)
    read = read_summary(paths)
    assert read == fitted(made)
    assert paths.status.stat().st_size <= MOST_BYTES
    assert (read.scored, read.entries, read.trials) == (tasks - 1, tasks, 8 * nodes)
    assert state.entries[-1].name in read.errors
    assert bool(read.left_out) == (tasks == 600)


def test_the_summary_of_an_ended_evaluation_counts_until_its_journal_grows(tmp_path: Path) -> None:
    """A retry that a coordinator journalled just before it was killed is not lost: the journal is the truth."""
    state = Large(1, tasks=2).run()
    paths = EvaluationPaths(tmp_path / state.evaluation_id)
    paths.root.mkdir()
    paths.journal.write_text("{}\n")
    made = summary_of(state, 9.0)
    write_summary(paths, made.model_copy(update={"journal_bytes": 3}))
    assert read_summary(paths) is not None
    paths.journal.write_text("{}\n{}\n")
    assert read_summary(paths) is None
    (tmp_path / "copy").mkdir()
    copied = EvaluationPaths(tmp_path / "copy")
    copied.status.write_bytes(paths.status.read_bytes())
    copied.journal.write_text("{}\n")
    assert read_summary(copied) is None, "a copied folder is no evaluation"


def test_failed_jobs_are_read_from_their_outcomes_and_the_report(tmp_path: Path) -> None:
    """Each with its line; another version's file is passed over; no folder is no failure. A trial that died with its node
    left no outcome: the report has the cluster's word.
    """
    paths = EvaluationPaths(tmp_path)
    assert failed_jobs(paths) == {}
    paths.outcomes.mkdir()
    told = Failed(name="es-1-trial-n1-a0.0", job="trial", blame="retry", error="CUDA out of memory")
    paths.outcome("failed", told.name).write_text(told.model_dump_json())
    (paths.outcomes / "other.failed.json").write_text(json.dumps({"kind": "unheard-of"}))
    assert failed_jobs(paths) == {told.name: "CUDA out of memory"}
    gpus = [
        {"trial": f"es-1-trial-n{i}-a0.0", "ended": how, "gpus": 1, "load": 2.5}
        for i, how in ((2, "NODE_FAIL"), (3, "drained"))
    ]
    paths.report.write_text(json.dumps({"gpus": gpus, "makespan_seconds": 5.0}))
    made = with_costs(Summary(schema_version=2, evaluation_id="e", written_at=0.0, ended_at=9.0), paths)
    assert made.failed_jobs == {told.name: told.error, "es-1-trial-n2-a0.0": "its job ended: NODE_FAIL"}
    assert (made.makespan_seconds, made.gpu_seconds["load"]) == (5.0, 5.0)


def test_a_retry_shows_the_scores_that_were_archived_before(tmp_path: Path) -> None:
    state, paths = leave_ended(tmp_path, nodes=1)
    assert archive_ended(paths)
    assert not list(paths.scores.glob("*.json"))
    state.ending.phase, state.ending.ended_at = Phase.RUNNING, None
    shown = summary_now(state, paths, 1.0)
    assert [[score.value for score in task.scores] for task in shown.tasks] == [[0.5]] * 60


def test_what_hangs_or_is_not_run_by_the_holder_of_the_work_folder_reads_stopped(tmp_path: Path) -> None:
    """Its coordinator signs its journal: a held lock alone says nothing of it. No journal is read for that."""
    state = under_way(1, 2)
    work = WorkPaths(tmp_path)
    paths = work.evaluation(state.evaluation_id)
    paths.root.mkdir()
    paths.journal.write_bytes(b"no event")
    assert write_summary(paths, summary_of(state, 5.0))
    seen = Summaries(Config(work_dir=tmp_path))
    seen.look(0.0)
    (summary,) = seen.open
    lock = WorkLock(work.lock)
    lock.acquire()
    now, words = time.time(), []
    for signed_at in (now, now - SILENT_SECONDS - 1):
        os.utime(paths.journal, (signed_at, signed_at))
        words.append(halt_of(summary, paths))
    lock.release()
    assert words[0] is None
    assert words[1] is not None
    assert (words[1].word, words[1].since) == ("stopped", pytest.approx(signed_at))
