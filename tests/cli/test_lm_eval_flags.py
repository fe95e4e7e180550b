"""Laws of lm_eval's own command line given to `evalspan eval`: it means the same, or is refused by name."""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from lm_eval._cli.run import Run
from lm_eval._cli.utils import key_val_to_dict
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.utils import (
    get_file_task_name,
    get_latest_filename,
    get_results_filenames,
    get_sample_results_filenames,
    make_table,
)
from support import commands
from support.toys import TASKS

from coordinator.errors import OperatorError
from coordinator.intake import suites
from coordinator.interface.cli import app
from coordinator.interface.cli.lm_eval_flags import (
    REDUNDANT,
    SHORT_FLAGS,
    UNSUPPORTED_FLAGS,
    checkpoint_argument,
    parse_pairs,
    translate_options,
    trial_settings,
)
from coordinator.interface.cli.suite_options import SuiteCommand

EVAL = typer.main.get_command(app).commands["eval"]


def lm_eval_parser():
    parser = argparse.ArgumentParser()
    Run(parser.add_subparsers())
    (subparsers,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return subparsers.choices["run"]


LM_EVAL = lm_eval_parser()


def test_every_option_of_lm_eval_is_understood_or_refused_by_name():
    """Of the lm_eval that is installed; a new option of a later version fails here."""
    own = {option for parameter in EVAL.params for option in parameter.opts}
    for action in LM_EVAL._actions:
        long = next(o for o in action.option_strings if o.startswith("--")).replace("_", "-")
        assert [long in own, long in UNSUPPORTED_FLAGS, long in REDUNDANT].count(
            True
        ) == 1 or long == "--help", long
        for short in (o for o in action.option_strings if not o.startswith("--")):
            # -s is the suite, -h the help, -v its log level
            assert SHORT_FLAGS.get(short) == long or short in ("-s", "-h", "-v"), short


def test_each_refused_option_names_what_to_do_instead():
    """And none of them is silently taken by the command."""
    for option, instead in UNSUPPORTED_FLAGS.items():
        with pytest.raises(OperatorError, match=re.escape(f"{option}: {instead}")):
            translate_options([option], VALUED)


def test_the_remote_code_flag_is_the_model_argument_that_lm_eval_makes_of_it():
    """`submit` and `prepare`, which take no model arguments, refuse it by name."""
    words = ["--trust_remote_code", "--tasks", "a", "--model_args", "pretrained=/m"]
    assert read(*words)["model_args"] == {"trust_remote_code": True}
    with pytest.raises(OperatorError, match="--trust-remote-code: say --model-args"):
        translate_options(words, VALUED)


YAML = """model: hf
model_args: {pretrained: /m, dtype: float32}
tasks: [a, b]
num_fewshot: 0
limit: 10
gen_kwargs: {temperature: 0.5}
apply_chat_template: true
fewshot_as_multiturn: false
log_samples: true
use_cache: null
seed: [7, 7, 7, 7]
"""


def test_the_yaml_of_lm_eval_means_what_it_means_to_lm_eval(tmp_path):
    """`--config FILE.yaml`, or -C; an option on the command line counts before the file's value; false and null ask for nothing."""
    file = tmp_path / "lm.yaml"
    file.write_text(YAML)
    theirs = EvaluatorConfig.load_yaml_config(str(file))
    found = read("--config", str(file), "--limit", "3")
    assert found == {
        "checkpoint": theirs["model_args"]["pretrained"],
        "model_args": {"dtype": "float32"},
        "tasks": theirs["tasks"],
        "num_fewshot": 0,
        "limit": 3.0,
        "gen_kwargs": theirs["gen_kwargs"],
        "apply_chat_template": True,
        "fewshot_as_multiturn": False,
        "seed": 7,
    }
    assert read(f"-C={file}")["limit"] == theirs["limit"]
    file.write_text("- a\n")
    for wrong, why in ((file, "KEY: VALUE"), (tmp_path / "none.yaml", "cannot be read: No such file")):
        with pytest.raises(OperatorError, match=why):
            read("--config", str(wrong))
    file.write_text("tasks: [a]\npredict_only: true\n")
    with pytest.raises(OperatorError, match="--predict-only"):
        read("M", "--config", str(file))


def suite_of(found):
    """The suite that a command line asks for."""
    return suites.suite_of({key: found[key] for key in found.keys() - {"checkpoint", "model_args"}})


def read(*words):
    """What `evalspan eval` makes of a command line."""
    with EVAL.make_context("eval", list(words)) as context:
        p = context.params
    pretrained, trial = trial_settings(p["model"], p["model_args"], p["device"])
    chosen = SuiteCommand(**p).chosen
    return {
        "checkpoint": checkpoint_argument(p["checkpoint"], pretrained),
        "model_args": {k.removeprefix("trial.model_args."): v for k, v in trial.items() if "args" in k},
        **chosen,
    }


LINES = [
    "--model hf --model_args pretrained=/m --tasks a,b",
    "--model hf --model_args pretrained=/m,dtype=float32,x=True,y=1e-3,z=[1,2] --tasks a b --limit 10",
    "--model_args pretrained=/m dtype=float32 --tasks a --num_fewshot 5 --batch_size 8",
    "--tasks a b -a pretrained=/m -L 0.5 -f 2 -b auto",
    '--tasks a --model_args {"pretrained":"/m","dtype":"auto"} --apply_chat_template',
    "--tasks a --apply_chat_template tool_use --fewshot_as_multiturn false --model_args pretrained=/m",
    "--tasks a --apply_chat_template --fewshot_as_multiturn --model_args pretrained=/m",
    "--gen_kwargs temperature=0.8,top_p=0.95 do_sample=True --tasks a --model_args pretrained=/m",
    "--gen_kwargs max_gen_toks=5 until=['a','b'] --tasks a --model_args pretrained=/m --seed 42",
    '--tasks a --model_args pretrained=/m --samples {"a":[5,0],"b":[1]} --metadata x=1,y=[2] z=w',
    '--tasks a --model_args pretrained=/m --metadata {"x":{"y":[1]}}',
    "--tasks a --model_args pretrained=/m --system_instruction Answer. --include_path /t",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_means_to_evalspan_what_it_means_to_lm_eval(line):
    """Parsed by lm_eval's own parser, and by this one: the same tasks, arguments and settings; with dashes, too."""
    words = line.split()
    theirs = vars(LM_EVAL.parse_args(words))
    arguments = dict(theirs["model_args"])
    expected = {
        "checkpoint": arguments.pop("pretrained"),
        "tasks": theirs["tasks"],
        "model_args": arguments,
        "limit": theirs["limit"],
        "num_fewshot": theirs["num_fewshot"],
        "batch_size": theirs.get("batch_size"),
        "gen_kwargs": theirs["gen_kwargs"],
        "samples": theirs["samples"],
        "metadata": theirs["metadata"],
        "include_path": [theirs["include_path"]] if theirs["include_path"] else None,
        "apply_chat_template": theirs.get("apply_chat_template"),
        "system_instruction": theirs["system_instruction"],
        "fewshot_as_multiturn": theirs.get("fewshot_as_multiturn"),
        "seed": theirs["seed"][0] if theirs["seed"] else None,
    }
    expected = {key: value for key, value in expected.items() if value is not None}
    assert read(*words) == expected
    assert read(*(w.replace("_", "-") if w.startswith("--") else w for w in words)) == expected


def test_samples_are_a_json_object_or_a_file_of_it_and_stand_in_order_for_all_documents(tmp_path):
    """lm_eval asks in the data set's order, whatever the list's. Beside a limit, or as anything else, they are refused."""
    file = tmp_path / "samples.json"
    file.write_text('{"a": [5, 0, 5]}')
    for typed in (f"--samples={file}", "-E", f"--samples={file.read_text()}"):
        words = [typed, str(file)] if typed == "-E" else [typed]
        assert suite_of(read("M", "--tasks", "a", *words)).tasks[0].samples == {"a": (0, 5)}
    for wrong, why in {
        "[1]": "neither a JSON object",
        "{a: 1}": "neither a JSON object",
        '{"a": []}': r"samples of \[\[task\]\] 1 should be a list of at least 1 item",
        '{"a": [-1]}': "--samples",
    }.items():
        with pytest.raises(OperatorError, match=why):
            suite_of(read("M", "--tasks", "a", "--samples", wrong))
    with pytest.raises(OperatorError, match="--samples: samples name the documents: omit limit"):
        suite_of(read("M", "--tasks", "a", "--samples", str(file), "--limit", "2"))


VALUED = {"--limit", "--suite", "-s"}


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("M --tasks a b --limit 3", "M --tasks=a,b --limit 3"),
        ("--tasks a b M --limit 3", "--tasks=a,b --limit 3 M"),
        ("--tasks a,b M", "--tasks=a,b M"),
        ("--apply_chat_template M --tasks a", "--apply-chat-template=true --tasks=a M"),
        ("M --apply_chat_template chatml", "M --apply-chat-template=chatml"),
        ("--tasks=a M", "--tasks=a M"),
        ("-s core M", "-s core M"),
        ("--limit=3 --tasks a -- M", "--limit=3 --tasks=a -- M"),
        ("--model_args pretrained=M --tasks a b", "--model-args=pretrained=M --tasks=a,b"),
        ("--gen_kwargs a=1 b=2 M --tasks x", "--gen-kwargs=a=1 --gen-kwargs=b=2 M --tasks=x"),
    ],
)
def test_the_checkpoint_is_found_beside_options_of_several_words(line, made):
    """It is the word of its own, or the last word of `--tasks a b M` where nothing else names it."""
    assert translate_options(line.split(), VALUED) == made.split()


def test_a_command_without_a_checkpoint_of_its_own_has_all_words_of_tasks():
    """`prepare` names its checkpoint by --tokenizer."""
    words = ["--tasks", "a", "b", "--tokenizer", "M", "--gen_kwargs", "x=1"]
    made = ["--tasks=a,b", "--tokenizer", "M", "--gen-kwargs=x=1"]
    assert translate_options(words, {*VALUED, "--tokenizer"}, checkpoint=False) == made
    command = typer.main.get_command(app).commands["prepare"]
    with command.make_context("prepare", words) as context:
        assert context.params["tasks"] == "a,b"


def test_a_flag_that_asks_for_what_is_so_is_left_out_with_a_line(capsys):
    """Of both spellings; the last word is still the checkpoint."""
    needless = []
    flags = ["--log_samples", "-w", "--show-config", "--confirm_run_unsafe_code"]
    assert translate_options([*flags, "--tasks", "a", "M"], VALUED, needless) == ["--tasks=a", "M"]
    assert sorted(needless) == sorted(REDUNDANT)
    EVAL.make_context("eval", ["M", "--log_samples", "--limit", "1"])
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "--log-samples: samples are always kept" in told.err


@pytest.mark.parametrize("revision", ["step3000", "0012345", "12e4567"])
def test_a_revision_names_the_checkpoint_and_is_no_model_argument(revision):
    """So its weights are fetched; a hash of digits stays as it is typed."""
    assert trial_settings(None, [f"pretrained=lab/m,revision={revision},x=1"], None) == (
        f"lab/m@{revision}",
        {"trial.model_args.x": 1},
    )


def test_a_digit_that_is_no_number_is_text():
    assert parse_pairs(["x=²"]) == {"x": "²"}


def same(one, other):
    return repr(one) == repr(other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


WORDS = st.text("ab1.-e'\"[](){},:_ ", max_size=12) | st.sampled_from(["true", "None", "1e3", "-1", "nan"])


@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=3), WORDS), max_size=4))
def test_values_are_read_as_lm_eval_reads_them(items):
    """Numbers, texts in quotes, lists, and what is none of these."""
    text = ",".join(f"{key}={value}" for key, value in items)
    try:
        theirs = key_val_to_dict(text)
    except (ValueError, MemoryError):
        return
    ours = parse_pairs([text])
    assert ours.keys() == theirs.keys()
    assert all(same(ours[key], theirs[key]) for key in theirs)


METRIC = """from lm_eval.api.registry import register_metric

@register_metric(metric="own_metric", higher_is_better=True, output_type="generate_until", aggregation="mean")
def own_metric(*_, **__):
    return 7.0

def text(doc):
    return doc["x"]
"""
OWN_TASK = """task: own
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: !function utils.text
doc_to_target: "{{x}}"
generation_kwargs: {max_gen_toks: 2, until: ["x"]}
metric_list: [{metric: own_metric, aggregation: mean, higher_is_better: true}]
"""


def read_as_visualizers_do(folder):
    """lm_eval's table, and by task what scripts/zeno_visualize.py of its repository reads: prompts, labels, answers, metrics."""
    files = [path.as_posix() for path in folder.rglob("*.json*")]
    results = json.loads(Path(get_latest_filename(get_results_filenames(files))).read_text())
    assert results["config"]["model_args"]
    read = {}
    for task, config in results["configs"].items():
        samples = [f for f in get_sample_results_filenames(files) if get_file_task_name(Path(f).name) == task]
        rows = [json.loads(line) for line in Path(get_latest_filename(samples)).read_text().splitlines()]
        metrics = [metric["metric"] for metric in config["metric_list"]]
        read[task.rpartition("/")[2], config["output_type"]] = [
            (row["doc_id"], row["target"], row["arguments"], row["filtered_resps"], [row[m] for m in metrics])
            for row in sorted(rows, key=lambda row: row["doc_id"])
        ]
    return sorted(make_table(results).splitlines()), read


@pytest.mark.model
def test_the_same_command_line_gives_the_digits_of_lm_eval(toy_model, tmp_path, warm):
    """To the last digit, by the programs themselves, also of a YAML file with a metric of its own, typed relative to the current
    folder, which has a comma in its name; the second `eval` runs nothing."""
    folder = tmp_path / "a, b"
    folder.mkdir()
    (folder / "data.jsonl").write_text('{"x": "one"}\n' * 6)
    (folder / "utils.py").write_text(METRIC)
    (folder / "my.yaml").write_text(OWN_TASK)
    line = (
        f"--model hf --model_args pretrained={toy_model},dtype=float32 --device cpu --include_path {TASKS} "
        "--tasks toy_choice toy_sums ./my.yaml --num_fewshot 2 --limit 12 --batch_size 4 --gen_kwargs max_gen_toks=5 --seed 7"
    ).split()
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "EVALSPAN_TRIAL_THREADS": "1", "OMP_NUM_THREADS": "1"}
    env["EVALSPAN_TRIAL_PROLOGUE"] = warm

    def run(*words):
        argv = [sys.executable, "-m", *words]
        done = subprocess.run(
            argv, cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("lm_eval", "run", *line, "--log_samples", "--output_path", str(tmp_path / "lm_eval"))
    (written,) = (tmp_path / "lm_eval").rglob("results_*.json")
    theirs = json.loads(written.read_text())["results"]
    ours = json.loads(run("evalspan", "eval", *line, "--json", "--output_path", str(tmp_path / "ours")))[
        "results"
    ]
    (written,) = (tmp_path / "ours").rglob("results_*.json")
    assert json.loads(written.read_text())["results"] == ours
    assert written.parent.name == next((tmp_path / "lm_eval").iterdir()).name
    assert len(theirs) == len(ours) == 3

    def digits(found):
        return {key: value for key, value in found.items() if isinstance(value, float)}

    assert sorted(map(digits, ours.values()), key=str) == sorted(map(digits, theirs.values()), key=str)
    assert any(7.0 in found.values() for found in ours.values())
    assert read_as_visualizers_do(tmp_path / "ours") == read_as_visualizers_do(tmp_path / "lm_eval")
    assert "from the same inputs; nothing was run" in run(
        "evalspan", "eval", *line, "-o", str(tmp_path / "own.json")
    )
    assert len([*tmp_path.glob("own_*.json")]) == len([*tmp_path.glob("samples_toy_sums_*.jsonl")]) == 1


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--device", "gpu", "--device gpu .*: name one of torch's, cuda, cpu"),
        ("--output-path", "file/out", "file/out cannot be written: .*file is not a folder"),
        ("--output-path", "file/own.json", "file cannot be written: .*is not a folder"),
    ],
)
def test_what_would_fail_once_the_scores_are_there_is_refused_first(
    tmp_path, monkeypatch, option, value, said
):
    """Nothing is built or submitted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    words = ["eval", tmp_path, "--tasks", "x", "--cluster", "local", "--work-dir", tmp_path / "work"]
    assert re.search(said, str(commands.typed(*words, option, value, code=1).exception))
    assert not [*tmp_path.glob("work/*/journal.jsonl")]
