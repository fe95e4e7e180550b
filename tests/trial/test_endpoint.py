"""Laws of a served model as the engine: the digits of `hf` within float noise; what it cannot answer is refused before."""

import json

import pytest
from support.completions_server import completions_server
from support.toys import TASKS, config_text

import evalspan
from coordinator.errors import OperatorError
from coordinator.intake.from_settings import check_endpoint, model_options, run_options
from coordinator.site.config.schema import ClusterConfig, Config, TrialConfig

TASKS_OF = {"include_path": TASKS, "limit": 6, "num_fewshot": 2}


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "evalspan.toml").write_text(f'work_dir = "work"\n{config_text()}')
    return tmp_path / "evalspan.toml"


def served(address):
    return {
        "trial.engine": "local-completions",
        "trial.model_args": {"base_url": address, "model": "tiny"},
    }


@pytest.mark.model
def test_a_served_model_has_the_scores_of_hf(toy_model, settings):
    """Choices, rolling likelihoods and generations; no weights are staged, and prompts go as the token ids of hf."""
    tasks = ["toy_choice", "toy_pages", "toy_sums"]
    given = {"tasks": tasks, "config": settings, **TASKS_OF}
    with completions_server(toy_model) as (address, asked):
        found = evalspan.evaluate(toy_model, **given, settings=served(address))
    assert (found.status, found.failed) == ("done", {})
    assert all(isinstance(token, int) for body in asked[2:] for one in body["prompt"] for token in one)
    assert {gpu.device.split()[0] for gpu in found.report.gpus} == {"endpoint"}
    # the windows of lm-eval's class: a server generates one token, and the first one is no prediction
    length = json.loads((toy_model / "config.json").read_text())["max_position_embeddings"] - 2
    own = {"dtype": "float32", "max_length": length}
    wanted = evalspan.evaluate(toy_model, **given, settings={"trial.model_args": own})
    ours = {score.name + score.metric: score.value for score in found.scores}
    theirs = {score.name + score.metric: score.value for score in wanted.scores}
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.model
def test_tasks_that_the_endpoint_cannot_answer_are_refused_by_name(toy_model, settings):
    """Likelihoods without log-probabilities of prompts; a server that is not there, or of another model; a GPU cluster."""
    given = {"config": settings, "include_path": TASKS}
    with (
        completions_server(toy_model, echoes=False) as (address, _),
        pytest.raises(
            OperatorError, match="toy_choice: its answers are likelihoods, and the endpoint gives no"
        ),
    ):
        evalspan.evaluate(toy_model, tasks=["toy_sums", "toy_choice"], **given, settings=served(address))
    with pytest.raises(OperatorError, match=r"does not complete a prompt by the model 'tiny'"):
        evalspan.evaluate(toy_model, tasks="toy_sums", **given, settings=served(address))
    with pytest.raises(OperatorError, match="needs base_url in"):
        evalspan.evaluate(
            toy_model, tasks="toy_sums", **given, settings={"trial.engine": "local-completions"}
        )
    assert not [*(settings.parent / "work").glob("*/journal.jsonl")]


def test_a_trial_that_asks_a_server_holds_no_gpu_of_a_cluster(tmp_path):
    """Lanes on Slurm are offers of GPUs: refused, with what to say."""
    trial = TrialConfig(engine="local-completions")
    slurm = Config(work_dir=tmp_path, cluster=ClusterConfig(kind="slurm"), trial=trial)
    with pytest.raises(OperatorError, match="say --cluster local"):
        check_endpoint(slurm)
    assert not run_options(slurm).stage.enabled
    assert model_options(slurm).device == "cpu"
