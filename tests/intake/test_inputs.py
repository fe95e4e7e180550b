"""The table of inputs: what is known before a build is in the id and in the names of request sets, and nothing else is."""

import os
import re
import sys
from dataclasses import replace

import pytest
from support.inputs.edits import EDITS
from support.inputs.world import kept, make
from support.node_memory import safetensors
from support.simulated.parts import SITE, record

from coordinator.decide.evaluation.job_specs import Site
from coordinator.decide.evaluation.records import evaluation_id
from coordinator.errors import OperatorError
from coordinator.intake.checkpoint import inspect_checkpoint
from coordinator.intake.request_sets import folder_names
from coordinator.intake.source_keys import _named_by, check_adapter, inputs_of, with_full_paths
from coordinator.intake.suites import load_suite
from evaljobs.contract.specs import ModelOptions


def keys_of(world):
    """The evaluation's id, and task of the suite -> name of its request sets, as the coordinator makes them."""
    world.write_settings("")
    suite = load_suite(str(world.path("suite.toml")))
    model = ModelOptions(model_args=world.arguments())
    env = dict(world.trial_env)
    site = Site(
        work_dir=str(world.path("work")), trial_command=(sys.executable,), worker_command=(), trial_env=env, worker_env=env
    )  # fmt: skip
    inputs = inputs_of(suite, model, site, "0")
    checkpoint = inspect_checkpoint(world.path(world.model))
    names = folder_names(suite, checkpoint, model, inputs)
    sets = dict(zip((task.name for task in suite.tasks), names, strict=True))
    return evaluation_id(checkpoint, suite, model, None, inputs), sets


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    made = make(tmp_path_factory.mktemp("inputs") / "world")
    made.path("work").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(made.hf_home))
        yield made


# Each file below tasks/ that a YAML names -> entries of the suite whose prompts it decides.
USED = {
    "choose": ("choose.yaml", "data/choose.jsonl", "data/few.jsonl"),
    "marked": ("globbed.yaml", "parts/one.jsonl", "parts/two.jsonl"),
    "most": (
        "most.yaml", "count.yaml", "data/count.csv", "mapped.yaml", "data/mapped.jsonl", "generated.yaml", "load.py",
        "opened.yaml", "data/opened.jsonl", "shown.py", "packaged.yaml", "data/packaged.jsonl", "edited.yaml", "big.yaml",
        "data/big.jsonl", "helper.py", "linked.yaml", "data/linked.jsonl", "gathered.yaml", "data/gathered.jsonl",
        "beside.py", "hubbed.yaml",
    ),
    "choose marked most": ("common/base.yaml",),
    "": ("metrics.py",),  # scores them
}  # fmt: skip


@pytest.mark.model
def test_each_file_that_tasks_use_counts_by_its_content_alone(world):
    """Another content of the same size and mtime is another evaluation, and names other sets of the entries whose prompts it
    decides. The same bytes written again, at another time, are the same one."""
    wrong, before = [], keys_of(world)
    for entries, names in USED.items():
        for name in names:
            path = world.tasks / name
            content = path.read_bytes()
            path.write_bytes(content)
            if keys_of(world) != before:
                wrong.append(f"{name}: other keys by the same bytes")
            kept(path, re.sub(rb"[\dox]", lambda m: bytes([m[0][0] ^ 1]), content, count=1))
            now = keys_of(world)
            others = {entry for entry in now[1] if now[1][entry] != before[1][entry]}
            if now[0] == before[0] or not others >= set(entries.split()):
                wrong.append(f"{name}: the same keys but {others}")
            kept(path, content)
            before = keys_of(world)
    assert not wrong, "\n".join(wrong)


@pytest.mark.model
def test_each_edit_changes_its_own_keys_and_no_others(world):
    """One after the other on one world. What a build or a scoring shows is not known yet: tests/integration holds that."""
    wrong = []
    before = keys_of(world)
    for edit in EDITS:
        edit.do(world)
        now = keys_of(world)
        must, may = edit.changes.split(), edit.may.split()
        others = {entry for entry in now[1] if now[1][entry] != before[1].get(entry)}
        for key, changed in (("id", now[0] != before[0]), ("set", bool(others))):
            if changed and key not in (*must, *may):
                wrong.append(f"{edit.name}: another {key} {others}")
            if not changed and key in must and not edit.found:
                wrong.append(f"{edit.name}: the same {key}")
        before = now
    assert not wrong, "\n".join(wrong)


# --- files and folders that model arguments name ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "typed"),
    [("peft", "adapter"), ("peft", "./adapter"), ("peft", "~/adapter"), ("other", "runs/../adapter")],
)
def test_a_folder_trained_again_is_another_model(tmp_path, monkeypatch, key, typed):
    """However its path is written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    for folder in (weights.parent, tmp_path / "runs"):
        folder.mkdir()
    keys = set()
    for content in (b"first", b"other"):
        safetensors(weights, {"a": content})
        os.utime(weights, ns=(0, 0))
        arguments = with_full_paths({key: typed}, tmp_path)
        assert arguments == {key: str(weights.parent)}
        keys.add(_named_by(ModelOptions(model_args=arguments), {}))
    assert len(keys - {""}) == 2
    weights.write_bytes(b"half")
    with pytest.raises(OperatorError, match=f"{key} in .* cannot be read"):
        _named_by(ModelOptions(model_args=arguments), {})


def test_values_that_name_no_file_stay_as_they_are(tmp_path, monkeypatch):
    """Also beside a folder of that name; and ids of the Hub. An adapter is looked for only where hf loads it from a folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("float32", "adapter"):
        (tmp_path / name).mkdir()
    arguments = {
        "dtype": "float32",
        "peft": "lab/adapter",
        "tokenizer": "",
        "n": 3,
        "x": "a" * 5000,
        "y": "/",
    }
    assert with_full_paths(arguments, tmp_path) == arguments
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for named in ("adapter", "./adapter", str(tmp_path / "adapter"), "lab/adapter", ""):
        check_adapter(ModelOptions(model_args={"peft": named}))
    check_adapter(ModelOptions(engine="vllm", model_args={"peft": "gone"}))


@pytest.mark.parametrize("changed", [{"worker_env": {"GRADE": "2"}}, {"command": "module load b"}])
def test_another_environment_of_trials_is_another_evaluation(tmp_path, changed):
    """Another value of a variable; another prologue, container or Python of [trial]: a task may compute with it."""
    site = replace(SITE, work_dir=str(tmp_path), worker_env={"GRADE": "1"}, command="module load a")
    of, model = record(), ModelOptions()
    inputs = [inputs_of(of.suite, model, s, "0.4") for s in (site, replace(site, **changed))]
    assert len({evaluation_id(of.checkpoint, of.suite, model, None, each) for each in inputs}) == 2
