"""Laws of `evalspan plan` at the command line: what they assume is said, and their file is documented."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from coordinator.cli.app import app
from coordinator.errors import OperatorError
from coordinator.intake.suites import load_suite, settled
from coordinator.planning import from_suite
from coordinator.planning.instance import DataSet, Instance, plan_instance
from evaljobs.contract.specs import Mode
from priors.hardware import NOMINAL, memory_bytes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluating" / "plan.md"


def evalspan(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--work-dir", str(folder)], env={"EVALSPAN_CONFIG": ""})


def test_the_documented_instance_is_planned_and_its_keys_are_all_there() -> None:
    """The page's JSON runs as it stands; its table has each key of the format."""
    page = PAGE.read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert plan_instance(text)["planned_makespan_seconds"] > 0
    table = page.partition("| key | meaning |")[2]
    for key in {*Instance.model_fields, *DataSet.model_fields} - {"datasets"}:
        assert re.search(rf"`(datasets\[\]\.)?{key}`", table), key


def test_a_suites_instance_is_saved_and_taken_back(tmp_path: Path) -> None:
    """The saved file plans to the same makespan."""
    saved = tmp_path / "i.json"
    asked = ("plan", "--suite", "core", "--nodes", "2", "--json")
    first = evalspan(tmp_path, *asked, "--save-instance", str(saved))
    assert first.exit_code == 0, first.output
    again = CliRunner().invoke(app, ["plan", "--instance", str(saved), "--json"])
    planned = json.loads(again.stdout)["planned_makespan_seconds"]
    assert planned == json.loads(first.stdout)["planned_makespan_seconds"]


@pytest.mark.parametrize("text", ["inf", "nan", "1e999b", "²b"])
def test_a_size_that_is_no_number_of_parameters_is_refused(text: str) -> None:
    with pytest.raises(OperatorError):
        from_suite.parameters(text)


def test_a_large_model_is_planned_on_several_gpus_and_says_so(tmp_path: Path) -> None:
    """70b on GPUs of 80 GB: 2 a trial, so 4 trials a node."""
    saved = tmp_path / "i.json"
    done = evalspan(tmp_path, "plan", "--suite", "core", "--model-size", "70b", "--save-instance", str(saved))
    assert "a trial takes 2 GPUs" in done.output
    assert json.loads(saved.read_text())["gpus_per_node"] == 4


@given(
    parameters=st.integers(1, 10**13),
    hardware=st.sampled_from(["cpu", "own", *NOMINAL, "nvidia_a100_40gb"]),
    node=st.sampled_from([1, 2, 4, 8]),
)
def test_a_trial_has_the_fewest_gpus_that_hold_the_model(parameters: int, hardware: str, node: int) -> None:
    """A power of two within a node; half of it would be too small."""
    memory = memory_bytes(hardware)
    needed = 2.2 * parameters
    try:
        gpus = from_suite.gpus_per_trial(parameters, hardware, node)
    except OperatorError:
        assert memory is not None
        assert node * memory < needed
        return
    assert gpus in (1, 2, 4, 8)
    assert gpus <= node
    if memory is not None:
        assert gpus * memory >= needed * 0.999
        assert gpus == 1 or gpus / 2 * memory < needed * 1.001


def test_each_type_with_figures_has_a_memory() -> None:
    """So that no large model is planned on a GPU that it does not fit; a type is known by its own name, too."""
    for known in ("cpu", "nvidia_h100_80gb_hbm3", "NVIDIA A100-SXM4-40GB"):
        from_suite.check_hardware(known, [])
    assert memory_bytes("NVIDIA A100-SXM4-40GB") == 40 * 10**9
    assert memory_bytes("NVIDIA GH200 480GB") == 96 * 10**9, "480 GB are of its CPU"
    assert memory_bytes("NVIDIA GH200 144G HBM3e") == 144 * 10**9
    assert memory_bytes("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == 10 * 10**9, "of the slice"
    assert memory_bytes("cpu") is None


def test_a_suite_in_fast_mode_is_predicted_to_take_less() -> None:
    """A question's choices share its prompt; generation takes as long as in exact mode."""
    core = load_suite("core")

    def seconds(mode: Mode) -> dict[str, float]:
        made = from_suite.instance(
            settled(core, mode, "hf"),
            {},
            [],
            nodes=1,
            gpus_per_node=8,
            cpu_slots=8,
            model_parameters=7 * 10**9,
            hardware="a100",
            engine="hf",
        )
        return {row["name"]: row["gpu_seconds"] for row in made["datasets"]}

    exact, fast = seconds("exact"), seconds("fast")
    assert fast["hellaswag"] < exact["hellaswag"] / 2
    assert fast["gsm8k"] == exact["gsm8k"]
    assert all(fast[name] <= exact[name] for name in exact)
