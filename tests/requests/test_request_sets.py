"""Request sets: built once, kept, and refused where they no longer fit."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dev_cluster import procs
from support.exactness.pipeline import TASKS, build_spec

from evaljobs.contract.outcomes import Built, Failed
from evaljobs.contract.paths import batch_index_file, request_set_manifest
from evaljobs.contract.specs import BatchIndex, ModelOptions, RequestSetManifest, SuiteSpec, TaskEntry
from evaljobs.contract.storage import hold_lock, read_record, write_record
from evaljobs.errors import OperatorError
from evaljobs.requests import build
from evaljobs.trial.shard_runner import RequestSet

pytestmark = pytest.mark.model


def spec(model_dir, folder, task="toy_choice", **changes):
    of = {"include_path": (str(TASKS),)} | changes.pop("suite", {})
    suite = SuiteSpec(name="s", tasks=(TaskEntry(name=task),), **of)
    where = {"batch_size": 4, "evaluation_dir": str(folder / "evaluation"), "model": ModelOptions()}
    return build_spec(model_dir, suite, folder / "sets", **(where | changes))


def snapshot(folder):
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("task", ["toy_choice", "toy_letters", "toy_mutual", "toy_sums", "toy_pages"])
def test_batches_hold_every_piece_once_in_length_order(task, model_dir, tmp_path):
    """At any size, batches partition requests and windows, with their costs and documents."""
    built = build.build_request_sets(spec(model_dir, tmp_path, task))
    folder = Path(built.sets[task])
    head, pieces = build.read_requests(folder)
    wanted = sorted((p.index, p.window) for p in pieces)
    for size in (1, 3, 4, 1000):
        build.add_batches(folder, size)
        there = RequestSet(folder, size)
        batches = list(there.batches(0, len(there.index.requests)))
        assert sorted((p.index, p.window) for b in batches for p in b.pieces) == wanted
        assert [len(b.pieces) for b in batches] == list(there.index.requests)
        assert [tuple(sorted({p.document for p in b.pieces})) for b in batches] == list(there.index.documents)
        assert len(there.index.offsets) == len(batches) + 1
        if head.digests.keys() != {"loglikelihood_rolling"}:
            longest = [max(p.length for p in b.pieces) for b in batches]
            assert all(a >= b for a, b in itertools.pairwise(longest))


def manifest(*args, **changes):
    """Of the set that is built of a spec."""
    (place,) = build.build_request_sets(spec(*args, **changes)).sets.values()
    return read_record(request_set_manifest(place), RequestSetManifest)


def test_a_set_is_named_by_its_prompts_and_says_what_they_cost(model_dir, tmp_path):
    """Its key does not depend on where the checkpoint lies; it does on settings that change a prompt, and on the seed of drawn
    answers. Clones for repeats count as requests; the cap on generated tokens is that of the settings."""
    copy = tmp_path / "copy"
    shutil.copytree(model_dir, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    brief = {"system_instruction": "Be brief."}
    here, there, other = (
        manifest(model, tmp_path / str(number), suite=suite).key
        for number, (model, suite) in enumerate([(model_dir, {}), (copy, {}), (model_dir, brief)])
    )
    assert (here == there, here == other) == (True, False)
    asked = [(task, seed) for task in ("toy_sampled", "toy_sums") for seed in (1, 2)]
    made = {
        (task, seed): manifest(model_dir, tmp_path / f"{task}-{seed}", task, suite={"seed": seed})
        for task, seed in (*asked, ("toy_programs", 1))
    }
    assert made["toy_sampled", 1].key != made["toy_sampled", 2].key
    assert made["toy_sums", 1].key == made["toy_sums", 2].key
    programs, sampled = made["toy_programs", 1], made["toy_sampled", 1]
    assert (programs.documents, programs.requests, programs.repeats) == (16, 32, 2)
    assert (programs.executes, programs.sampled) == (True, False)
    assert (sampled.executes, sampled.sampled) == (False, True)


def test_what_is_built_is_kept(model_dir, tmp_path):
    """A second build touches no file and loads no task; a new size adds its batches."""
    auto = build.build_request_sets(spec(model_dir, tmp_path, batch_size="auto"))
    place = Path(auto.sets["toy_choice"])
    assert not list(place.glob("batches-*"))
    before = snapshot(tmp_path / "sets")
    four = build.build_request_sets(spec(model_dir, tmp_path, batch_size=4))
    after = snapshot(tmp_path / "sets")
    assert before.items() <= after.items()
    assert {Path(p).name for p in after.keys() - before.keys()} == {"batches-4.jsonl", "batches-4.index.json"}
    gone = spec(model_dir, tmp_path, batch_size=4).model_copy(update={"model_dir": "/nowhere"})
    again = build.build_request_sets(gone)
    assert again.sets == four.sets == auto.sets
    assert snapshot(tmp_path / "sets") == after


def test_builds_of_an_entry_that_begin_together_build_it_once(model_dir, tmp_path):
    """A backlog of checkpoints asks for the same sets at once: a build that is not the first waits, and takes what it finds."""
    made, late = spec(model_dir, tmp_path / "made"), spec(model_dir, tmp_path)
    build.build_request_sets(made)
    folder, file = Path(late.out_dir), tmp_path / "late.json"
    write_record(file, late.model_copy(update={"name": "late"}))
    with hold_lock(folder / "build.lock"):
        job = subprocess.Popen([sys.executable, "-m", "evaljobs", "build", str(file)])
        opened = Path(f"/proc/{job.pid}/fd")
        assert procs.poll(
            lambda: folder / "build.lock" in {f.resolve() for f in opened.iterdir()}, deadline_s=60
        )
        shutil.copytree(made.out_dir, folder, dirs_exist_ok=True)
        there = snapshot(folder)
    assert job.wait(60) == 0
    built = read_record(tmp_path / "evaluation" / "outcomes" / "late.built.json", Built)
    assert (list(built.sets), snapshot(folder)) == (["toy_choice"], there)


def test_a_set_is_built_again_where_a_file_that_its_build_read_has_changed(model_dir, tmp_path, monkeypatch):
    """A file that no setting names, in the same folder of sets: another checkpoint asks for the same one."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))  # files of temporary folders are no inputs
    tasks, words = tmp_path / "tasks", tmp_path / "outside" / "words.txt"
    for place in (tasks, words.parent, tmp_path / "tmp"):
        place.mkdir()
    words.write_text("the river")
    (tasks / "load.py").write_text(
        "import datasets\n\n\ndef rows(**_):\n"
        f"    return {{'test': datasets.Dataset.from_list([{{'q': open({str(words)!r}).read()}}])}}\n"
    )
    (tasks / "own.yaml").write_text(
        "task: own\ncustom_dataset: !function load.rows\ntest_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: 0\ndoc_to_choice: ['no', 'yes']\nmetric_list: [{metric: acc}]\n"
    )
    own = spec(model_dir, tmp_path / "work" / "sets", "own", suite={"include_path": (str(tasks),)})
    first = build.build_request_sets(own).sets
    assert build.build_request_sets(own).sets == first
    words.write_text("the forest")
    assert build.build_request_sets(own).sets != first


@pytest.mark.parametrize(
    ("model", "task", "says"),
    [
        ("step-1", "toy_choice", "step-1 is gone: the checkpoint was deleted while it was needed"),
        ("", "toy_choise", "nearest: toy_choice"),
        ("", "toy_choice", "toy_choice changed after its evaluation was submitted"),
    ],
)
def test_what_cannot_be_built_is_named(model_dir, tmp_path, model, task, says):
    """A deleted checkpoint is called that, not a model that a hub lacks. Files of another state are another evaluation's."""
    given = spec(tmp_path / model if model else model_dir, tmp_path, task)
    with pytest.raises(OperatorError, match=says):
        build.build_request_sets(
            given.model_copy(update={"source": "of other files"} if "changed" in says else {})
        )


CHOICE = """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: c
doc_to_target: "{{c.index(a)}}"
"""
SCORED = """
output_type: loglikelihood
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
target_delimiter: ""
"""
ANSWERED = CHOICE.replace("multiple_choice", "generate_until") + "generation_kwargs: "
EXAMPLE = "num_fewshot: 1\nfewshot_config: {samples: [{q: q, a: uno, c: [one, two]}]}"
TOO_MANY = "num_fewshot: 9\nfewshot_split: test"
PROCESSED = "process_docs: !function own.process"
DROPPED = "def process(docs):\n    return docs.filter(lambda _: False)"
LONG = json.dumps({"a": 400 * "word "})
RAISED = "def process(docs):\n    raise SystemExit('odd')"
# (lines of the YAML, what differs in document 2, module) -> message
BROKEN = {
    (
        CHOICE,
        '{"a": "uno"}',
        "",
    ): "doc_to_target of document 2 (columns q, a, c): ValueError: 'uno' is not in list",
    (CHOICE, '{"a": "u", "c": []}', ""): "doc_to_target of document 2 (columns q, a, c): ",
    (
        CHOICE + EXAMPLE,
        "",
        "",
    ): "doc_to_target of a few-shot example of document 0 (columns q, a, c): ValueError: ",
    (CHOICE + TOO_MANY, "", ""): "fewshot_context of document 0 (columns q, a, c): ValueError: Sample larger",
    (SCORED, '{"a": ""}', ""): "doc_to_target of document 2 has 0 tokens",
    (SCORED, LONG, ""): "doc_to_target of document 2 has 4",
    (SCORED + PROCESSED, "", DROPPED): "task own has no documents after process_docs",
    (SCORED + PROCESSED, "", RAISED): "process_docs: SystemExit: odd (FOLDER/own.py:2)",
    (SCORED, None, ""): "FOLDER/rows.jsonl (data_files of its dataset_kwargs) has no rows",
    (ANSWERED + "{max_gen_toks: 256}", "", ""): "max_gen_toks 256",
    (ANSWERED + "{do_sample: true, temperature: 0, max_gen_toks: 4}", "", ""): "no temperature above 0",
}


def own_task(model_dir, folder, yaml, change, code):
    """The build of a task of four rows in a file, of which `change` (JSON) differs in the third; None: of no rows."""
    rows = [{"q": f"question {number}", "a": "one", "c": ["one", "two"]} for number in range(4)]
    rows[2] |= json.loads(change or "{}")
    lines = [json.dumps(row) + "\n" for row in rows if change is not None]
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "own.py").write_text(code)
    data = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
    (folder / "own.yaml").write_text(f"task: own\n{data}{yaml}")
    return spec(model_dir, folder / "work" / "sets", "own", suite={"include_path": (str(folder),)})


def test_where_no_data_can_be_kept_the_variable_to_set_is_named(model_dir, tmp_path):
    """A service's home folder often does not exist."""
    write_record(tmp_path / "spec.json", own_task(model_dir, tmp_path, CHOICE, "", ""))
    argv = [sys.executable, "-m", "evaljobs", "build", str(tmp_path / "spec.json")]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))} | {
        "HOME": "/proc/nohome"
    }
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=env)
    assert "set HF_HOME" in done.stdout, done.stderr


@pytest.mark.parametrize("broken", BROKEN)
def test_what_cannot_be_asked_is_refused_with_task_field_and_document(model_dir, tmp_path, broken):
    """What a task's code, data or settings break is the operator's to mend: said at once, and not tried again."""
    given = own_task(model_dir, tmp_path, *broken)
    with pytest.raises(OperatorError, match="task own") as error:
        build.build_request_sets(given)
    assert BROKEN[broken].replace("FOLDER", str(tmp_path)) in str(error.value)


TEMPLATES = [{"name": name, "template": "{{messages}}"} for name in ("default", "rag")]


@pytest.mark.parametrize(
    ("task", "change", "says"),
    [
        ("toy_choice", {"bos_token": None, "eos_token": None}, "neither bos_token nor eos_token"),
        ("toy_sums", {"eos_token": None}, "no eos_token"),
        ("toy_choice", {"chat_template": TEMPLATES}, r"'nosuch' is not available.*\['default', 'rag'\]"),
    ],
)
def test_a_tokenizer_that_cannot_make_the_prompts_is_named(model_dir, tmp_path, task, change, says):
    """lm-eval needs a token to begin with, one that ends an answer, and the template that is asked for."""
    copy = tmp_path / "copy"
    shutil.copytree(model_dir, copy, ignore=shutil.ignore_patterns("*.safetensors", "*.jinja"))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | change))
    chat = {"apply_chat_template": "nosuch"} if "chat_template" in change else {}
    with pytest.raises(OperatorError, match=says):
        build.build_request_sets(
            spec(copy, tmp_path / "work" / "sets", task, suite={"include_path": (str(TASKS),)} | chat)
        )


def test_the_build_command_leaves_an_outcome_of_each_spec_and_no_noise(model_dir, tmp_path):
    """No progress bars. Offline, a Hub data set outside the cache is an operator's error that says to prepare it."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "hub.yaml").write_text(
        "task: toy_hub\ndataset_path: example/has_no_such_data_set\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: a\ndoc_to_choice: ['no', 'yes']\n"
    )
    suite = {"include_path": (str(TASKS), str(tmp_path / "tasks"))}
    evaluation, files = tmp_path / "evaluation", []
    for task in ("toy_hub", "toy_choice", "toy_sums"):
        given = spec(model_dir, tmp_path / task, task, suite=suite, evaluation_dir=str(evaluation))
        files.append(tmp_path / f"{task}.json")
        write_record(files[-1], given.model_copy(update={"name": task}))
    argv = [sys.executable, "-m", "evaljobs", "build", *map(str, files)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "it/s" not in done.stdout + done.stderr
    failed = read_record(evaluation / "outcomes" / "toy_hub.failed.json", Failed)
    assert failed.blame == "operator"
    assert "evalspan prepare" in failed.error
    for task in ("toy_choice", "toy_sums"):
        built = read_record(evaluation / "outcomes" / f"{task}.built.json", Built)
        [place] = built.sets.values()
        assert read_record(batch_index_file(place, 4), BatchIndex).batch_size == 4
