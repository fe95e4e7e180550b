"""Laws of modes: what a suite or the settings say, what is refused, and that exact evaluations keep their ids."""

from __future__ import annotations

import json

import pytest
from support.node_memory import make_checkpoint

from coordinator.config.schema import Config, TrialConfig
from coordinator.errors import OperatorError
from coordinator.evaluation.records import Inputs, evaluation_id
from coordinator.intake import one_off, suites
from coordinator.intake.from_settings import record_of
from evaljobs.contract.specs import CheckpointSpec, ModelOptions, Sources, SuiteSpec, TaskEntry

CHECKPOINT = CheckpointSpec(source="/ckpts/step-100", digest="d" * 8, files=())
CORE = SuiteSpec(
    name="core",
    batch_size=8,
    seed=7,
    tasks=(TaskEntry(name="a", num_fewshot=5), TaskEntry(name="b", limit=10, judge=True)),
)


def id_of(suite):
    return evaluation_id(CHECKPOINT, suite, ModelOptions(model_args={"dtype": "float32"}))


def loaded(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\n{text}\n[[task]]\nname = "a"\n')
    return suites.load_suite(path)


def test_an_evaluation_without_the_new_settings_keeps_its_id():
    """Ids of evaluations and of suite files that 0.1 gave, of a suite that uses neither modes nor batch sizes of tasks."""
    inputs = Inputs(lm_eval="0.4.9", entries=(Sources(files="x"), Sources()))
    model = ModelOptions(model_args={"dtype": "float32"})
    for suite in (CORE, suites.settled(CORE.model_copy(update={"mode": "exact"}), "fast", "hf")):
        assert evaluation_id(CHECKPOINT, suite, model, None, inputs) == "step-100-core-b07d7702"
        assert id_of(suite) == "step-100-core-e22616a8"
        assert one_off.file_name(suite) == "core-1e01d506.toml"


def test_mode_budget_and_batch_sizes_of_tasks_are_part_of_the_id():
    fast = suites.settled(CORE, "fast", "hf")
    tasks = (CORE.tasks[0].model_copy(update={"batch_size": 4}), CORE.tasks[1])
    some = [
        CORE,
        fast,
        fast.model_copy(update={"token_budget": 4096}),
        CORE.model_copy(update={"tasks": tasks}),
        fast.model_copy(update={"tasks": tasks}),
    ]
    assert len({id_of(suite) for suite in some}) == len(some)
    assert [("-fast-" in id_of(suite)) for suite in some] == [False, True, True, False, True]


def test_the_suite_s_own_mode_goes_before_the_setting(tmp_path):
    assert suites.settled(CORE, "exact", "vllm").mode is None
    assert suites.settled(CORE, "fast", "hf").mode == "fast"
    assert suites.settled(loaded(tmp_path, 'mode = "exact"'), "fast", "vllm").mode is None
    assert suites.settled(loaded(tmp_path, 'mode = "fast"'), "exact", "hf").mode == "fast"


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ('mode = "fast"', 8192),
        ('mode = "fast"\ntoken_budget = 100', 100),
        ('mode = "fast"\nbatch_size = "auto"', "auto"),
        ('mode = "exact"', None),
    ],
)
def test_a_token_budget_is_said_or_the_default_or_found_with_the_batch_size(tmp_path, text, budget):
    assert suites.settled(loaded(tmp_path, text), "exact", "hf").token_budget == budget


def test_a_mode_of_the_command_line_stands_in_the_suite_s_name():
    options = one_off.SuiteOptions(suite="core", mode="fast", token_budget="4096")  # noqa: S106 (no password)
    changed = one_off.suite_of(options)
    assert (changed.mode, changed.token_budget) == ("fast", 4096)
    assert changed.name.startswith("core-fast-")
    assert one_off.suite_of(one_off.SuiteOptions(suite="core", mode="exact")).name == "core"
    assert options.words() == ["--suite", "core", "--token-budget", "4096", "--mode", "fast"]


ROPES = {
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "longrope": {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}},
    "": {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}, "quantizer": {"type": "dynamic"}},
}


@pytest.mark.parametrize("kind", ROPES)
def test_fast_mode_is_refused_for_a_rope_that_follows_the_longest_row(tmp_path, kind):
    """In one line, by config.json, and before lm-eval or the cluster is asked."""
    folder = make_checkpoint(tmp_path / "step-1")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ROPES[kind]))

    def made(mode):
        suite = CORE.model_copy(update={"tasks": CORE.tasks[:1]})
        return record_of(Config(trial=TrialConfig(mode=mode)), str(folder), suite, lambda *_: Inputs())

    made("exact")
    if not kind:
        made("fast")
        return
    with pytest.raises(OperatorError, match=f"not for a model with {kind} rope.*--mode exact"):
        made("fast")
