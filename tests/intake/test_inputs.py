"""The table of inputs: what is known before a build is in the id and in the names of request sets, and nothing else is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.inputs.edits import EDITS
from support.inputs.world import World, make

from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import evaluation_id
from coordinator.intake.checkpoint import inspect
from coordinator.intake.request_sets import folder_name
from coordinator.intake.source_keys import inputs_of
from coordinator.intake.suites import load_suite
from evaljobs.contract.specs import ModelOptions

pytestmark = pytest.mark.model


def keys_of(world: World) -> tuple[str, dict[str, str]]:
    """The evaluation's id, and task of the suite -> name of its request sets, as the coordinator makes them."""
    world.write_settings("")
    suite = load_suite(str(world.path("suite.toml")))
    model = ModelOptions(model_args=world.arguments())
    env = dict(world.trial_env)
    site = Site(
        work_dir=str(world.path("work")), trial_command=(sys.executable,), worker_command=(), trial_env=env, worker_env=env
    )  # fmt: skip
    inputs = inputs_of(suite, model, site, "0", lambda _suite, _site: None)
    checkpoint = inspect(world.path(world.model))
    sets = {
        task.name: folder_name(suite, number, checkpoint, model, inputs)
        for number, task in enumerate(suite.tasks)
    }
    return evaluation_id(checkpoint, suite, model, None, inputs), sets


def test_each_edit_changes_its_own_keys_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other on one world. What a build or a scoring shows is not known yet: tests/integration holds that."""
    world = make(tmp_path / "world")
    monkeypatch.setenv("HF_HOME", str(world.hf_home))
    (tmp_path / "work").mkdir()
    wrong = []
    before = keys_of(world)
    for edit in EDITS:
        edit.do(world)
        now = keys_of(world)
        must, may = edit.changes.split(), edit.may.split()
        if (now[0] != before[0]) and not {"id"} & {*must, *may}:
            wrong.append(f"{edit.name}: another id")
        if (now[0] == before[0]) and "id" in must and not edit.found:
            wrong.append(f"{edit.name}: the same id")
        others = {entry for entry in now[1] if now[1][entry] != before[1].get(entry)}
        if others and not {"set"} & {*must, *may}:
            wrong.append(f"{edit.name}: other request sets of {', '.join(sorted(others))}")
        if not others and "set" in must and not edit.found:
            wrong.append(f"{edit.name}: the same request sets")
        before = now
    assert not wrong, "\n".join(wrong)
