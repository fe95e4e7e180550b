"""Law 3: greedy scores of `hf` equal one lm_eval process per task, for any sharding."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.exactness.pipeline import TASKS, Case, lm_eval_run, our_run

from coordinator.intake import suites

SHIPPED = str(suites.suite_folder() / "quickstart")
CASES = {
    "multiple choice": Case(task="toy_choice"),
    "one forward for all choices": Case(task="toy_letters"),
    "acc_mutual_info": Case(task="toy_mutual"),
    "generation, two filters, repeats": Case(task="toy_sums"),
    "rolling perplexity": Case(task="toy_pages"),
    "5-shot": Case(task="toy_choice", entry={"num_fewshot": 5, "limit": 24}),
    "chat template": Case(task="toy_sums", entry={"num_fewshot": 2, "limit": 10},
        suite={"apply_chat_template": True, "system_instruction": "Be brief."}),
    "chat template, likelihoods": Case(task="toy_letters", entry={"limit": 0.5},
        suite={"apply_chat_template": True, "seed": 42}),
    "generation settings": Case(task="toy_sums", entry={"gen_kwargs": {"max_gen_toks": 5}, "limit": 12}),
    "documents by number": Case(task="toy_sums", entry={"samples": {"toy_sums": [2, 4, 9]}}),
    "metadata of the command": Case(task="toy_choice", entry={"limit": 4, "metadata": {"seen": [1]}}),
    "without logits cache": Case(task="toy_letters", model_args={"logits_cache": False}),
    "begin token, short context": Case(task="toy_pages", entry={"limit": 6},
        model_args={"add_bos_token": True, "max_length": 96}),
    "programs": Case(task="toy_programs"),
    "HumanEval": Case(task="local_humaneval"),
    "HumanEval, instruct, on another data set": Case(task="local_humaneval_instruct"),
    "MBPP": Case(task="local_mbpp"),
    "MBPP+, instruct": Case(task="local_mbpp_plus_instruct"),
    "HumanEval of the quickstart": Case(task="quickstart_humaneval", entry={"limit": 4}, include_path=SHIPPED),
    "HellaSwag of the quickstart": Case(task="quickstart_hellaswag", entry={"limit": 8}, include_path=SHIPPED),
}  # fmt: skip

ORIGINAL = 64  # tokens: fewer than a row with three examples has


def for_any_sharding(model, case, size, folder, cut=""):
    """Our run: the same at 1, 3 and 7 shards."""
    one, *others = (
        our_run(model, case, size, n, folder / str(n), sets=folder / "sets", cut=cut) for n in (1, 3, 7)
    )
    for other in others:
        assert_equal(other, one)
    return one


def assert_equal(ours, theirs):
    assert ours.samples.keys() == theirs.samples.keys()
    for task, samples in theirs.samples.items():
        assert ours.samples[task] == samples, task
    assert ours.results == theirs.results


@pytest.mark.model
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("name", CASES)
def test_scores_and_samples_equal_lm_eval(name, batch_size, model_dir, tmp_path, lm_eval_outcome):
    """Results, errors, configs and samples are lm-eval's own at 1, 3 and 7 shards."""
    ours = for_any_sharding(model_dir, CASES[name], batch_size, tmp_path)
    assert_equal(ours, lm_eval_outcome(CASES[name], batch_size))


@pytest.mark.model
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("task", ["toy_choice", "toy_letters", "toy_pages", "toy_sums"])
def test_a_batch_size_of_the_task_s_own_gives_lm_eval_s_digits_at_that_size(
    task, batch_size, model_dir, tmp_path, lm_eval_outcome
):
    """`[[task]] batch_size = 3`, smaller or larger than the evaluation's, with which the model is loaded."""
    case = Case(task=task)
    ours = our_run(model_dir, case, batch_size, 3, tmp_path, cut="3")
    assert_equal(ours, lm_eval_outcome(case, 3))


@pytest.mark.model
@pytest.mark.parametrize("task", ["toy_choice", "toy_letters", "toy_mutual", "toy_pages", "toy_sums"])
def test_fast_scores_are_the_same_for_any_sharding_and_close_to_lm_eval(
    task, model_dir, tmp_path, lm_eval_outcome
):
    """Likelihoods of units: the same digits at 1, 3 and 7 shards; generation is lm-eval's own."""
    case = Case(task=task)
    ours = for_any_sharding(model_dir, case, 8, tmp_path, cut="fast-300-8").results["results"][task]
    for metric, value in lm_eval_outcome(case, 8).results["results"][task].items():
        near = pytest.approx(value, abs=1e-3) if isinstance(value, float) else value
        assert ours[metric] == near, metric


@pytest.mark.model
@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
@pytest.mark.parametrize("task", ["toy_choice", "toy_sums"])
def test_rows_past_a_ropes_original_length_score_the_same_for_any_sharding(rope, task, model_dir, tmp_path):
    """`dynamic` keeps its scale from batch to batch in an lm_eval process, so its digits are not those; `longrope`'s are."""
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    config = json.loads((model / "config.json").read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    scaling = {"rope_type": rope, "rope_theta": 1e4, "factor": 16.0}
    longest, max_length = (ORIGINAL, {"max_length": 1024}) if rope == "dynamic" else (1024, {})
    if rope == "longrope":
        factors = {"long_factor": [2.0] * half, "short_factor": [1.0] * half}
        scaling |= {"original_max_position_embeddings": ORIGINAL, **factors}
    changes = {"max_position_embeddings": longest, "rope_parameters": scaling}
    (model / "config.json").write_text(json.dumps(config | changes))
    case = Case(task=task, entry={"num_fewshot": 3, "limit": 24}, model_args=max_length)
    ours, theirs = for_any_sharding(model, case, 8, tmp_path), lm_eval_run(model, case, 8)
    assert (ours.samples == theirs.samples) == (rope == "longrope")


@pytest.mark.model
def test_an_empty_text_has_lm_evals_likelihood(model_dir, tmp_path):
    """A sum without terms: no model is asked, and its document is answered."""
    for file in ("rows.py", "pages.yaml"):
        shutil.copyfile(TASKS / file, tmp_path / file)
    short = "{{page if page|length > 800 else ''}}"
    (tmp_path / "gaps.yaml").write_text(f'include: pages.yaml\ntask: toy_gaps\ndoc_to_target: "{short}"\n')
    case = Case(task="toy_gaps", include_path=str(tmp_path))
    ours = for_any_sharding(model_dir, case, 8, tmp_path / "work")
    assert (
        0 < sum(sample["target"] == "" for sample in ours.samples["toy_gaps"]) < len(ours.samples["toy_gaps"])
    )
    assert_equal(ours, lm_eval_run(model_dir, case, 8))


@pytest.mark.model
def test_a_groups_leaves_equal_lm_eval_leaf_by_leaf(model_dir, tmp_path, lm_eval_outcome):
    """At any batch size a leaf of a group scores as that leaf alone does in lm-eval. Its aggregate, too, equals lm-eval's where
    no batch spans two leaves.
    """
    theirs = lm_eval_outcome(Case(task="toy_group"), 1)
    assert "toy_group" in theirs.results["groups"]
    assert_equal(our_run(model_dir, Case(task="toy_group"), 1, 3, tmp_path / "1"), theirs)
    ours = our_run(model_dir, Case(task="toy_group"), 8, 3, tmp_path / "8")
    for leaf in ("toy_part_a", "toy_part_b"):
        theirs = lm_eval_outcome(Case(task=leaf), 8)
        assert ours.samples[leaf] == theirs.samples[leaf]
        assert ours.results["results"][leaf] == theirs.results["results"][leaf]


@pytest.mark.model
@pytest.mark.parametrize("batch_size", [1, 8])
def test_sampled_generation_is_the_same_for_any_sharding(batch_size, model_dir, tmp_path):
    """Draws are seeded per batch, not per shard or trial. Repeats of a prompt differ."""
    ours = for_any_sharding(model_dir, Case(task="toy_sampled"), batch_size, tmp_path)
    answers = [sample["resps"][0] for sample in ours.samples["toy_sampled"]]
    assert any(len(set(repeats)) > 1 for repeats in answers)


@pytest.mark.model
def test_scores_and_samples_equal_the_lm_eval_commands(model_dir, tmp_path):
    """The command in its own process, with its defaults: the same scores and samples."""
    entry, chat = {"num_fewshot": 2, "limit": 6}, {"apply_chat_template": True}
    case = Case(task="toy_sums", entry=entry, suite=chat, bootstrap=0)
    options = "--tasks toy_sums --num_fewshot 2 --limit 6 --batch_size 4 --device cpu --apply_chat_template --log_samples"
    argv = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model_dir}",
    ]
    argv += [
        *options.split(),
        "--include_path",
        case.include_path,
        "--output_path",
        str(tmp_path / "command"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(argv, env=environment, check=True, capture_output=True)
    [results] = (tmp_path / "command").rglob("results_*.json")
    [samples] = (tmp_path / "command").rglob("samples_toy_sums_*.jsonl")
    theirs = json.loads(results.read_text())
    ours = our_run(model_dir, case, 4, 3, tmp_path / "ours")
    assert ours.samples["toy_sums"] == [json.loads(line) for line in samples.read_text().splitlines()]
    for part in ("configs", "versions", "n-shot", "higher_is_better", "n-samples", "group_subtasks"):
        assert ours.results[part] == theirs[part], part
    values = {k: v for k, v in theirs["results"]["toy_sums"].items() if "stderr" not in k}
    assert values == {k: v for k, v in ours.results["results"]["toy_sums"].items() if "stderr" not in k}
