"""Scores and samples of 24 evaluations of a tiny model by `evalspan eval --json`, one file a suite (README.md)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import pytest
from support import endpoint, goldens, sites, toys

pytestmark = [goldens.long, pytest.mark.model]

# Variables by which torch, MKL, oneDNN and numpy compute with the same instructions on every x86-64 processor.
KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "OMP_NUM_THREADS": "1",
}
PACKAGES = ("torch", "transformers", "tokenizers", "lm_eval", "datasets", "numpy", "peft", "safetensors")
FORWARD = """
import hashlib, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokens = torch.arange(5, 5 + 8 * 40).reshape(8, 40) % model.config.vocab_size
print(hashlib.sha256(torch.log_softmax(model(tokens).logits, -1).detach().numpy().tobytes()).hexdigest())
"""
# Beside the toy tasks: a group of a group, and sampled answers of which some are right; of one token to choose, since
# seeds of batches are made of a key that changes with any module of our engines.
TASKS = {
    "nested": "group: toy_nested\ntask: [toy_group, toy_letters]\naggregate_metric_list: [{metric: acc, aggregation: mean}]\n",
    "vote": "include: sums.yaml\ntask: toy_vote\ndoc_to_target: e\n"
    "generation_kwargs: {until: ['Q:'], do_sample: true, temperature: 0.8, top_k: 1, max_gen_toks: 8}\n",
}


@dataclass(frozen=True)
class Row:
    """A suite: its tasks (name, and lines of TOML), settings, model arguments, and further options of the command."""

    tasks: tuple[str, ...] = ()
    suite: str = "batch_size = 8"
    model: dict[str, Any] = field(default_factory=dict)
    options: str = ""
    code: int = 0


EXACT = Row(
    (
        "toy_choice, limit = 20",
        "toy_mutual, num_fewshot = 5, limit = 10",
        "toy_sums, limit = 12",
        "toy_pages, limit = 6",
        "toy_group, limit = 10",
        "toy_programs, limit = 12",
    )
)
FAST = Row(
    (
        *("toy_choice", "toy_letters", "toy_mutual", "toy_pages", "toy_sums, limit = 8"),
        "toy_part_a, num_fewshot = 3, limit = 12",
    ),
    'batch_size = 8\nmode = "fast"\ntoken_budget = 300',
)
ROWS = {
    "chat": Row(
        ("toy_sums, num_fewshot = 2", "toy_letters, limit = 16"),
        'batch_size = 8\napply_chat_template = true\nsystem_instruction = "Be brief."',
    ),
    "chat-plain": Row(
        ("toy_sums", "toy_choice, num_fewshot = 2, limit = 12", "toy_talks"),
        "batch_size = 4\napply_chat_template = true\nfewshot_as_multiturn = false",
    ),
    "groups": Row(("toy_nested", "toy_part_a", "toy_group, num_fewshot = 2, limit = 4")),
    "adapter": Row(("toy_choice, limit = 20", "toy_sums"), model={"peft": "adapter"}),
    "code": Row(("local_humaneval", "local_humaneval_instruct", "local_mbpp", "local_mbpp_plus_instruct")),
    "judged": Row(
        options="--suite mt_bench --limit 4 --gen-kwargs max_gen_toks=6 --batch-size 4",
        code=1,  # an answer of the judge lacks
    ),
    "rolling": Row(("toy_pages", "toy_choice, limit = 8"), model={"add_bos_token": True, "max_length": 96}),
    "no-logits-cache": Row(("toy_letters", "toy_mutual"), model={"logits_cache": False}),
    "sampled": Row(("toy_vote",), options="--shards-per-task 3"),
}
SETTINGS = Row(
    (
        "toy_letters, limit = 0.5",
        "toy_sums, batch_size = 3, gen_kwargs = { max_gen_toks = 5 }",
        "toy_choice, batch_size = 3, num_fewshot = 2, limit = 15",
    ),
    "batch_size = 8\nseed = 42",
)
SHARDS = {n: ("--shards-per-task", n) for n in "137"}
RUNS = {  # the golden's name, and what may not change it -> a row, and options
    **{f"exact-{b} {n}": (EXACT, "--batch-size", b, *SHARDS[n]) for b in ("1", "8", "auto") for n in SHARDS},
    **{f"fast {n}": (FAST, *SHARDS[n]) for n in SHARDS},
    **{name: (row,) for name, row in ROWS.items()},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `tiny-7`, `adapter`, `work` and `tasks`; weights are drawn without torch."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made = tmp_path_factory.mktemp("scores")
    model = toys.toy_model(made)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).save_pretrained(made / "adapter")
    for number, file in enumerate(weights(made)):
        draw(file, number)
    shutil.copytree(toys.TASKS, made / "tasks")
    for name, text in TASKS.items():
        (made / "tasks" / f"{name}.yaml").write_text(text)
    return made


def weights(home):
    return [home / "tiny-7" / "model.safetensors", home / "adapter" / "adapter_model.safetensors"]


def draw(file, seed):
    """The same bytes on every machine: torch's own draws depend on the processor's instructions."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    dice, tensors = random.Random(seed), load_file(file)
    for name in sorted(tensors):
        shape = tensors[name].shape
        drawn = [dice.random() - 0.5 if len(shape) > 1 else 1.0 for _ in range(tensors[name].size)]
        tensors[name] = np.array(drawn, "float32").reshape(shape)
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture
def site(home, tmp_path):
    """Settings of its own; model and work folder of the process, so that request sets are built once, and answers are asked
    by each test anew.
    """
    made = sites.local(tmp_path, home / "tiny-7", "--slots", "1")
    made.work = home / "work"
    yield made
    made.end_workers()
    for file in made.work.glob("*/evaluation.json"):
        shutil.rmtree(file.parent)


def asked(site, row, *more):
    """The command of a row; its suite and settings are written."""
    home = site.model.parent
    model = {k: str(home / v) if k == "peft" else v for k, v in row.model.items()}
    for name, table in (("env", KERNELS), ("model_args", model)):
        lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        with (site.folder / "evalspan.toml").open("a") as file:
            file.write("\n".join([f"[trial.{name}]", *lines, ""]))
    split = (task.split(", ") for task in row.tasks)
    tables = [", ".join([f'name = "{name}"', *more]) for name, *more in split]
    head = f'name = "golden"\ninclude_path = ["{home}/tasks"]'
    site.suite.write_text(f"{head}\n{row.suite}\ntask = [{{ {' }, { '.join(tables)} }}]\n")
    return site.evaluate(*row.options.split(), *more)


def evaluated(site, command, code=0):
    """What a user finds after the command, as a golden's table; and the tasks whose answers were used again."""
    done = site.run(command)
    assert done.returncode == code, f"{done.stderr}\n{done.stdout}"
    results = json.loads(done.stdout)
    root = site.work / results["evalspan"]["evaluation_id"]
    written = json.loads((root / "results.json").read_text())
    assert results["results"] == written["results"]
    return table(written, samples(root)), sorted(written["evalspan"]["responses_from"])


def samples(root):
    """TASK_ENTRY -> lines of its sample file, in the folder or in the archive beside it."""
    texts = {file.name: file.read_text() for file in (root / "samples").glob("*.jsonl")}
    if (root / "files.zip").exists():
        with zipfile.ZipFile(root / "files.zip") as archive:
            lines = [name for name in archive.namelist() if name.startswith("samples/")]
            texts |= {name.removeprefix("samples/"): archive.read(name).decode() for name in lines}
    names = {name: name.removeprefix("samples_").removesuffix(".jsonl") for name in texts}
    return {names[name]: [json.loads(line) for line in texts[name].splitlines()] for name in sorted(texts)}


def table(results, lines):
    parts = ("results", "groups", "group_subtasks", "higher_is_better", "n-samples", "n-shot", "versions")
    run = ("status", "mode", "batch_size", "token_budget", "cuts", "failed_entries")
    configs = {
        name: {k: v for k, v in c.items() if k != "metadata"} for name, c in results["configs"].items()
    }
    return {
        **{part: results[part] for part in parts if part in results},
        "configs": {name: brief(config) for name, config in configs.items()},
        "evalspan": {key: results["evalspan"][key] for key in run},
        "unscored": {name: sorted(items) for name, items in results.get("unscored", {}).items()},
        "documents": {name: [document(one) for one in of_task] for name, of_task in lines.items()},
        "first document": {
            name: {key: rows[0][key] for key in ("arguments", "resps", "filtered_resps", "target")}
            for name, rows in lines.items()
        },
        "samples": {name: digest(of_task) for name, of_task in lines.items()},
    }


def document(sample):
    """A line that says which of prompt, responses, filtered answers and metrics differ."""
    asked, said, kept = (digest(sample[key])[:10] for key in ("arguments", "resps", "filtered_resps"))
    scores = brief({name: sample[name] for name in sample["metrics"] if name in sample})
    return (
        f"{sample['doc_id']} {sample['filter']}: prompt {asked} responses {said} filtered {kept} | {scores}"
    )


def brief(values):
    """`key=value …`; what is long by its digest."""
    texts = {key: json.dumps(value, sort_keys=True) for key, value in sorted(values.items())}
    return " ".join(f"{k}={v if len(v) <= 40 else digest(values[k])[:10]}" for k, v in texts.items())


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def test_a_machine_that_computes_other_digits_is_named_here(home, goldens):
    """Versions, weights, tokenizer and a forward pass without evalspan: where this differs, so may all other files."""
    done = subprocess.run(
        [sys.executable, "-c", FORWARD, str(home / "tiny-7")],
        env={**os.environ, **KERNELS},
        capture_output=True,
        text=True,
        check=True,
    )
    files = [*weights(home), home / "tiny-7" / "tokenizer.json"]
    found = {
        "files": {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files},
        "forward pass": done.stdout.strip(),
        "packages": {name: version(name).partition("+")[0] for name in PACKAGES},
    }
    goldens.check("scores/machine.json", found)


@pytest.mark.parametrize("run", RUNS)
def test_scores_and_samples(run, site, goldens):
    """One file a suite, mode and batch size: any number of shards gives these digits."""
    row, *more = RUNS[run]
    with endpoint.serving() as judge:
        judge.handle = rate
        site.env |= {"EVALSPAN_JUDGE_URL": judge.url, "EVALSPAN_JUDGE_MODEL": "judge"}
        found, again = evaluated(site, asked(site, row, *more), row.code)
    assert again == [], "its own trial answered all"
    goldens.check(f"scores/{run.partition(' ')[0]}.json", found)


def rate(request):
    """A judge whose answer is a function of what it is asked; one of the questions it refuses."""
    number = int(hashlib.sha256(request.user.encode()).hexdigest(), 16)
    if "Hawaii" in request.user and "[Question]" in request.user:
        request.error(400, "content policy")
    else:
        request.answer(f"[[{number % 10 + 1}]] [[{'ABC'[number % 3]}]]")


def test_settings_of_tasks_and_answers_used_again(site, goldens):
    """Seed, a share, few-shot, a batch size and generation settings of a task's own. A copy of the checkpoint gets its
    answers without a trial, `--fresh` asks again: the same scores and samples.
    """
    command = asked(site, SETTINGS)
    copy = shutil.copytree(site.model, site.folder / "copy")
    commands = {
        "first": command,
        "copy": [str(copy) if word == str(site.model) else word for word in command],
        "fresh": [*command, "--fresh"],
    }
    again = {}
    for name, words in commands.items():
        found, again[name] = evaluated(site, words)
        goldens.check("scores/settings.json", found)
    goldens.check("scores/again.json", again)
