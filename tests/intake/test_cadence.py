"""Laws of `[[task]] every`: which tasks a checkpoint is asked, and that what was not asked has neither failed nor passed."""

import itertools
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.toys import config_text, suite_text
from typer.testing import CliRunner

import evalspan
from coordinator.decide.evaluation.records import EvaluationRecord, Inputs, RunOptions, evaluation_id
from coordinator.decide.verdicts.gate import Policy, judge_rows, outcome_of
from coordinator.errors import OperatorError
from coordinator.intake import cadence, suites
from coordinator.interface.cli import app
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import CheckpointSpec, ModelOptions, SuiteSpec, TaskEntry


def suite(name="mini", **every):
    tasks = tuple(TaskEntry(name=task, every=count) for task, count in {"often": 1, **every}.items())
    return SuiteSpec(name=name, tasks=tasks)


def checkpoint(place):
    return CheckpointSpec(source=str(place), digest="d", files=())


def accept(work, place, of, at, *, final=False, cadences=None, step=None):
    """Leave the record of an evaluation that is accepted now, and return what it does not ask."""
    now = checkpoint(place).model_copy(update={"step": step})
    left_out = () if final else cadence.not_asked(work, of, now, cadences)
    record = EvaluationRecord(
        evaluation_id=evaluation_id(checkpoint(place), of, ModelOptions(), None, Inputs(command=str(at))),
        checkpoint=checkpoint(place),
        suite=of,
        model=ModelOptions(),
        options=RunOptions(),
        not_asked=left_out,
        accepted_at=float(at),
    )
    paths = EvaluationPaths(work / record.evaluation_id)
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.evaluation.write_text(record.model_dump_json())
    return left_out


@given(every=st.integers(2, 7), count=st.integers(1, 15), again=st.data())
def test_a_task_is_asked_at_each_k_th_checkpoint_in_order_of_acceptance(
    tmp_path_factory, every, count, again
):
    """The first one is asked all; asked again, a checkpoint is asked the same; other trainings, suites and modes count nothing."""
    work = tmp_path_factory.mktemp("work")
    rare = suite(rare=every)
    at = itertools.count()
    for number in range(count):
        accept(work, f"/other/step-{number}", rare, next(at))
        accept(work, f"/run/step-{number}", suite("another", rare=2), next(at))
        asked = accept(work, f"/run/step-{100 - number}", rare, next(at))
        assert asked == (() if number % every == 0 else ("rare",))
        before = again.draw(st.integers(0, number))
        asked = accept(work, f"/run/step-{100 - before}", rare, next(at))
        assert asked == (() if before % every == 0 else ("rare",))


def test_the_final_checkpoint_is_asked_all_and_stays_so(tmp_path):
    for number in range(2):
        accept(tmp_path, f"/run/step-{number}", suite(rare=5), number)
    assert accept(tmp_path, "/run/step-2", suite(rare=5), 2, final=True) == ()
    assert accept(tmp_path, "/run/step-2", suite(rare=5), 3) == ()
    assert cadence.not_asked(tmp_path, suite(rare=1), checkpoint("/run/step-9")) == ()


@given(often=st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_auto_asks_a_task_once_as_many_checkpoints_have_passed_as_its_scores_say(tmp_path_factory, often):
    """Counted from the last one that was asked, since what they say changes; and at the first one, and at steps of `all_at`."""
    work, since = tmp_path_factory.mktemp("work"), None
    rare = suite(rare="auto").model_copy(update={"all_at": (3,)})
    for number, count in enumerate(often):
        place = f"/run/step-{number}"
        asked = accept(work, place, rare, number, step=number, cadences=lambda *_, k=count: {"rare": k}) == ()
        assert asked == (since is None or since + 1 >= count or number == 3)
        since = 0 if asked else since + 1
        again = accept(work, place, rare, number, cadences=lambda *_: {"rare": 99})
        assert again == (() if asked else ("rare",))


def test_how_rarely_a_task_is_asked_changes_no_id():
    """That it is not asked always does: an evaluation that asks all is another one."""
    names = [
        evaluation_id(checkpoint("/run/a"), one, ModelOptions(), None, Inputs())
        for one in (suite(rare=1), suite(rare=5), suite(rare="auto").model_copy(update={"all_at": (9,)}))
    ]
    assert names[1] == names[2] != names[0]


def test_a_suite_whose_tasks_are_all_rare_is_refused(tmp_path):
    (tmp_path / "s.toml").write_text('name = "s"\n[[task]]\nname = "a"\nevery = 2\n')
    with pytest.raises(OperatorError, match=r"s\.toml, line 4: every task has `every` above 1"):
        suites.load_suite(tmp_path / "s.toml")


def row(task, *values, not_asked=(False, False)):
    known = {"metric": "acc,none", "higher_is_better": True, "leaves": [], "documents": [100, 100]}
    verdict = {"verdict": "not comparable", "words": "", "why": "not asked at both"}
    return {"task": task, "values": [*values], "not_asked": [*not_asked], "verdicts": [verdict], **known}


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        ([row("rare", 0.5, None, not_asked=(False, True))], "not asked"),
        ([row("often", 0.5, 0.5)], "not asked"),  # neither was asked "rare", and the rule names it
        ([row("rare", 0.5, None)], "missing"),
        ([row("rare", None, 0.5, not_asked=(True, False))], "undecidable"),
    ],
)
def test_a_gate_neither_passes_nor_fails_what_was_not_asked(rows, outcome):
    policy = Policy(rule=({"task": "rare", "max_drop": 0.01, "required": True},))
    rulings = judge_rows(policy, rows, ("rare",))
    assert outcome_of(rulings) == outcome
    assert any(one.has_failed for one in rulings) == (outcome == "missing")


@pytest.mark.model
def test_what_was_not_asked_is_said_to_be_so_in_every_view(tmp_path, toy_model, monkeypatch):
    """Three checkpoints, `every = 2`: the second lacks the rare task, takes no time for it, and is done."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evalspan.toml").write_text(config_text())
    (tmp_path / "s.toml").write_text(suite_text("s", {"toy_choice": {}, "toy_pages": {"every": 2}}))
    places = [tmp_path / "run" / f"step-{number}" for number in (1, 2, 3)]
    for place in places:
        shutil.copytree(toy_model, place)
    found = [evalspan.evaluate(place, "s.toml", config="evalspan.toml", slots=1) for place in places]
    assert [one.not_asked for one in found] == [(), ("toy_pages",), ()]
    assert {one.status for one in found} == {"done"}
    assert "toy_pages" not in found[1].raw["results"]
    said = CliRunner().invoke(app, ["report", "--series", "run"])
    assert "not asked" in said.stdout
    listed = CliRunner().invoke(app, ["status", "--json"])
    assert [one["entries"] for one in json.loads(listed.stdout)["evaluations"]] == [2, 1, 2]
    (tmp_path / "p.toml").write_text('[[rule]]\ntask = "toy_pages"\nmax_drop = 0.1\n')
    gate = CliRunner().invoke(app, ["gate", found[1].evaluation_id, "--policy", "p.toml"])
    assert (gate.exit_code, gate.stdout.split(":")[0]) == (4, "not asked")
    whole = evalspan.evaluate(places[1], "s.toml", every=1, config="evalspan.toml", slots=1)
    assert whole.not_asked == ()
    assert "toy_pages" in whole.raw["results"]
