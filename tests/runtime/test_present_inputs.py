"""Laws of the id that a question has now: an ended evaluation is shown again only where its inputs are those of now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.simulated.parts import record

from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import EvaluationRecord, Inputs, evaluation_id
from coordinator.runtime.present_inputs import as_of_now, changed_since, renewed
from coordinator.runtime.summary import Summary, known_by, write_summary
from evaljobs.contract.storage import write_atomic
from evaljobs.lmeval.shown_inputs import digest_of


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(work_dir=str(tmp_path / "work"), trial_command=("false",), worker_command=("false",))


def asked(site: Site) -> EvaluationRecord:
    """What a person asks for, before anyone looks at what earlier evaluations used."""
    base = record(1)
    inputs = Inputs(lm_eval="0.4.13")
    name = evaluation_id(base.checkpoint, base.suite, base.model, base.judge, inputs)
    return base.model_copy(update={"inputs": inputs, "evaluation_id": name})


def end(site: Site, made: EvaluationRecord, *files: Path, rows: dict[str, str] | None = None) -> str:
    """The evaluation has ended, and its scoring used these files. Returns its id."""
    paths = site.paths.evaluation(made.evaluation_id)
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.journal.write_bytes(b"{}\n")
    shown = {"build": {}, "score": rows or {str(file): digest_of(str(file)) for file in files}}
    write_atomic(paths.results, json.dumps({"evalspan": {"shown": shown}}).encode())
    write_atomic(paths.evaluation, made.model_dump_json().encode())
    over = Summary(**known_by(made), written_at=2.0, ended_at=2.0, journal_bytes=3)
    assert write_summary(paths, over)
    return made.evaluation_id


def test_an_ended_evaluation_is_todays_until_a_file_it_used_changes(site: Site, tmp_path: Path) -> None:
    """Taking the edit back finds the first one again; the message names the file."""
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("A = 1\n")
    other.write_text("B = 1\n")
    first = end(site, as_of_now(asked(site), site), one)
    assert as_of_now(asked(site), site).evaluation_id == first

    one.write_text("A = 2\n")
    now = as_of_now(asked(site), site)
    assert now.evaluation_id != first
    assert f"{one} changed since {first}: this is a new evaluation" in changed_since(now, site)
    second = end(site, now, one, other)
    assert as_of_now(asked(site), site).evaluation_id == second

    other.write_text("B = 2\n")  # a file that the first one did not use
    third = end(site, as_of_now(asked(site), site), one, other)
    assert as_of_now(asked(site), site).evaluation_id == third
    assert len({first, second, third}) == 3

    one.write_text("A = 1\n")
    assert as_of_now(asked(site), site).evaluation_id == first


def test_an_open_evaluation_goes_on(site: Site, tmp_path: Path) -> None:
    """Whatever has changed: its tasks say which file it was."""
    file = tmp_path / "one.py"
    file.write_text("A = 1\n")
    first = end(site, as_of_now(asked(site), site), file)
    site.paths.evaluation(first).journal.write_bytes(b"{}\n{}\n")  # a retry
    file.write_text("A = 2\n")
    assert as_of_now(asked(site), site).evaluation_id == first


def test_a_file_that_a_node_sees_otherwise_costs_one_evaluation(site: Site, tmp_path: Path) -> None:
    """And not a new one each time that it is asked for."""
    rows = {str(tmp_path / "of-a-node"): "digest there"}
    first = end(site, as_of_now(asked(site), site), rows=rows)
    second = end(site, as_of_now(asked(site), site), rows=rows)
    assert second != first
    assert as_of_now(asked(site), site).evaluation_id == second


def test_fresh_names_another_evaluation_each_time(site: Site) -> None:
    base = asked(site)
    later = base.model_copy(update={"accepted_at": base.accepted_at + 1})
    ids = {base.evaluation_id, renewed(base).evaluation_id, renewed(later).evaluation_id}
    assert len(ids) == 3
