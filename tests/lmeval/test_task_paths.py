"""Laws of paths in a task's YAML: the same files from any folder, or a plain refusal."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evaljobs.errors import OperatorError
from evaljobs.lmeval import catalogue, quiet_environment, run, source_files, task_paths, task_yaml

pytestmark = pytest.mark.model

RIGHT, WRONG = ["of the suite", "of the suite, too"], ["of the current folder"]
YAML = 'task: own\noutput_type: generate_until\ndoc_to_text: "{{x}}"\ndoc_to_target: "{{x}}"\n'
LOADER = """import json
import datasets

def load(data_files, **_):
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in open(data_files["test"])])}

def same(rows):
    return rows
"""
JSON, FILES = "dataset_path: json\ndataset_kwargs: ", "dataset_path: json\ndataset_kwargs: {data_files: "
# how a YAML may name its data: (its lines, the split that they become)
SHAPES = {
    "a string": (FILES + "data/test.jsonl}", "train"),
    "a list": (FILES + "[data/test.jsonl]}", "train"),
    "a dict": (FILES + "{test: data/test.jsonl}}", "test"),
    "a dict of lists": (FILES + "{test: [data/test.jsonl]}}", "test"),
    "splits with paths": (FILES + "[{split: test, path: data/test.jsonl}]}", "test"),
    "a pattern": (FILES + '{test: "data/*.jsonl"}}', "test"),
    "a deep pattern": (FILES + '{test: "**/t?st.jsonl"}}', "test"),
    "from the folder above": (FILES + "{test: ../tasks/data/test.jsonl}}", "test"),
    "a folder of data": (JSON + "{data_dir: data}", "test"),
    "files in a folder": (JSON + "{data_dir: data, data_files: {test: test.jsonl}}", "test"),
    "a local data set": ("dataset_path: data", "test"),
    "a local data set's files": ("dataset_path: ./data\ndataset_kwargs: {data_files: {test: test.jsonl}}", "test"),
    "a function's argument": ("custom_dataset: !function own.load\ndataset_kwargs: {data_files: {test: data/test.jsonl}}", "test"),
}  # fmt: skip


def rows(place, texts):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(json.dumps({"x": text}) + "\n" for text in texts))


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A suite's folder with data. The current folder has other data at the same relative paths."""
    import datasets

    quiet_environment(offline=True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "Süße Aufgaben" / "tasks"
    rows(folder / "data" / "test.jsonl", RIGHT)
    (folder / "own.py").write_text(LOADER)
    for decoy in ("here", "there/tasks"):
        rows(tmp_path / decoy / "data" / "test.jsonl", WRONG)
    monkeypatch.chdir(tmp_path / "here")
    return folder


def write(folder, lines, split="test", name="own.yaml"):
    place = folder / name
    place.write_text(f"{YAML}{lines}\ntest_split: {split}\n")
    return place


def load(folder, name="own"):
    return run.Tasks(run.task_manager([str(folder)], name)).load([name])["tasks"]["own"]


def texts(task):
    return [document["x"] for document in task.test_docs()]


def source_key(folder, name="own"):
    return source_files.files_named_by([str(folder)], name, source_files.Digests()).key()


def ask(folder, *names):
    return catalogue.resolve_names([str(folder)], names or ["own"])


@pytest.mark.parametrize("shape", SHAPES)
def test_data_are_the_suites_from_any_folder(shape, tasks, tmp_path, monkeypatch):
    """From every current folder the documents are those beside the YAML, and an edit of them changes the source key."""
    write(tasks, *SHAPES[shape])
    keys = {source_key(tasks)}
    for place in (tmp_path / "here", tmp_path / "there" / "tasks", Path("/"), tasks):
        monkeypatch.chdir(place)
        assert texts(load(tasks)) == RIGHT
        keys.add(source_key(tasks))
        answer = ask(tasks)
        assert (answer.unfit, answer.uncached) == ({}, {})
        assert answer.files
        assert all(Path(file).is_relative_to(tasks) for file in answer.files)
    assert len(keys) == 1
    rows(tasks / "data" / "test.jsonl", [*RIGHT, "one more"])
    assert source_key(tasks) not in keys


@pytest.mark.parametrize("command", [False, True])
def test_a_yaml_file_is_a_name(tasks, command):
    """Outside every folder of a suite, a task or a group, also with a comma in its path; its faults are found."""
    folder = tasks.parent / "a, b"
    tasks.rename(folder)
    good, group = write(folder, *SHAPES["a dict"]), folder / "group.yaml"
    group.write_text(f"group: two\ntask: [{{task: own, include: {good.name}}}]\n")
    bad = write(folder, FILES + "{test: no.jsonl}}", name="bad.yaml")
    names = [str(good), str(bad), str(group)]
    if command:
        argv = [sys.executable, "-m", "evaljobs", "tasks", json.dumps({"include_path": [], "names": names})]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        answer = catalogue.ResolvedNames(**json.loads(done.stdout.splitlines()[-1]))
    else:
        answer = catalogue.resolve_names([], names)
    assert answer.unknown == {}
    assert list(answer.unfit) == [str(bad)]
    assert answer.files == [str(folder / "data" / "test.jsonl")]


@pytest.mark.parametrize("shape", ["a dict", "a pattern", "a local data set", "a function's argument"])
def test_documents_and_configs_are_lm_evals_own(shape, tasks, monkeypatch):
    """Equal to lm-eval's own from the suite's folder; the config keeps the path as written."""
    from lm_eval.tasks import TaskManager

    write(tasks, *SHAPES[shape])
    task = load(tasks)
    monkeypatch.chdir(tasks)
    own = TaskManager(include_path=str(tasks), include_defaults=False).load(["own"])["tasks"]["own"]
    assert texts(task) == texts(own)
    assert json.dumps(task.dump_config(), default=str) == json.dumps(own.dump_config(), default=str)


DATA = "dataset_path: json\ntest_split: test\ndataset_kwargs: {data_files: {test: PLACE}}\n"
INCLUDED, MEMBER = (
    "include: base/_base\ntask: own\n",
    "{task: own, dataset_kwargs: {data_files: {test: data/rows.jsonl}}}",
)
# where the data lie -> YAMLs by place below the suite's folder, the name that is loaded, and the data's place
PLACES = {
    "a full path": ({"own.yaml": YAML + DATA.replace("PLACE", "BELOW/deep/rows.jsonl")}, "own", "deep/rows.jsonl"),
    "the home folder": ({"own.yaml": YAML + DATA.replace("PLACE", "~/mine/rows.jsonl")}, "own", "mine/rows.jsonl"),
    "beside the YAML that is included": (
        {"base/_base": YAML + DATA.replace("PLACE", "rows.jsonl"), "own.yaml": INCLUDED}, "own", "base/rows.jsonl"),
    "beside a group's YAML": (
        {"own.yaml": YAML + DATA.replace("PLACE", "data/test.jsonl"), "groups/all.yaml": f"group: all\ntask: [{MEMBER}]\n"},
        "all", "groups/data/rows.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize("where", PLACES)
def test_data_lie_where_the_yaml_that_names_them_says(where, tasks, monkeypatch):
    """A full path wherever the YAML lies; else beside the YAML that has the line, whatever lies beside another one. What is
    loaded is what counts, however its path is written.
    """
    monkeypatch.setenv("HOME", str(tasks))
    yamls, name, place = PLACES[where]
    for yaml, text in yamls.items():
        (tasks / yaml).parent.mkdir(exist_ok=True)
        (tasks / yaml).write_text(text.replace("BELOW", str(tasks)))
    rows(tasks / "rows.jsonl", WRONG)
    keys = set()
    for documents in (["of that place"], RIGHT):
        rows(tasks / place, documents)
        assert texts(load(tasks, name)) == documents
        assert ask(tasks, name).files == [str(tasks / place)]
        keys.add(source_key(tasks, name))
    assert len(keys) == 2


# a wrong YAML: (its lines, the key that is named, what is named relative to the YAML)
WRONG_LINES = {
    "a file": (FILES + "{test: [data/test.jsonl, only.jsonl]}}", "data_files", "only.jsonl"),
    "a pattern": (FILES + '"only*.jsonl"}', "data_files", "only*.jsonl"),
    "a folder of data": (JSON + "{data_dir: only}", "data_dir", "only"),
    "a local data set": ("dataset_path: ./only", "dataset_path", "only"),
    "a deep data set": ("dataset_path: only/a/b", "dataset_path", "only/a/b"),
    "a module": ("dataset_path: data\nprocess_docs: !function only_module.same", "process_docs", "only_module.py"),
    "an include": ("include: only.yml\ndataset_path: data", "include", "only.yml"),
    "no file at all": ("dataset_path: json", "data_files", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_LINES)
def test_what_is_not_beside_the_yaml_is_refused(what, tasks):
    """Before a submission and in a job, in one line with YAML, key and full path, even if the current folder has it.
    lm-eval is itself again after the failure.
    """
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import _yaml_loader

    lines, key, name = WRONG_LINES[what]
    here = Path.cwd()
    rows(here / "only.jsonl", WRONG)
    rows(here / "only" / "a" / "b" / "test.jsonl", WRONG)
    (here / "only.yml").write_text("repeats: 1\n")
    (here / "only_module.py").write_text(LOADER)
    place = write(tasks, lines)
    (why,) = ask(tasks).unfit.values()
    assert "\n" not in why
    assert all(text in why for text in (str(place), key, str(tasks / name)))
    before = _yaml_loader._make_loader, ConfigurableTask.download
    if what != "an include":  # lm-eval defines no task for it
        with pytest.raises(OperatorError) as refused:
            load(tasks)
        assert str(tasks) in str(refused.value)
    assert (_yaml_loader._make_loader, ConfigurableTask.download) == before
    with task_paths.relative_to_yaml():
        assert (_yaml_loader._make_loader, ConfigurableTask.download) != before


METRIC, MODULE = FILES + "{test: data/test.jsonl}}\n", "dataset_path: data\nprocess_docs: !function own.same"
# a YAML's lines, and what is said of the task; "" where it is taken
SCORED = [
    ("metric_list: [{metric: acccc}]", "lm-eval has no metric 'acccc' (nearest: acc)"),
    ("metric_list: [{metric: qqqqq}]", "no metric 'qqqqq'; one of"),
    ("metric_list: [{aggregation: mean}]", "an entry names no metric"),
    ("output_type: multiple_chois", "output_type 'multiple_chois' should be loglikelihood, "),
    ("metric_list: [{metric: wer, hf_evaluate: true}]", ""),
    ("metric_list: [{metric: acc, aggregation: mean}]", ""),
    ("metric_list: [{metric: mine}]\nprocess_results: !function own.same", ""),
    ("metric_list: [{metric: !function own.same, aggregation: mean}]", ""),
    ("metric_list: [{metric: there}]\nprocess_docs: !function own.same", ""),
]


@pytest.mark.parametrize(("lines", "says"), SCORED)
def test_a_task_that_lm_eval_cannot_score_is_refused(lines, says, tasks):
    """Before a submission; metrics of lm-eval, of a function and of the evaluate library pass."""
    place = write(tasks, METRIC + lines)
    if "output_type" in lines:
        place.write_text(place.read_text().replace("output_type: generate_until\n", "", 1))
    unfit = ask(tasks).unfit
    assert bool(unfit) == bool(says)
    assert says in "".join(unfit.values())


# what a task's folder holds: (the YAML's lines, a file, its text, what the job that loads the task says)
UNREADABLE = [
    ((FILES + "{test: torn.csv}}").replace("json", "csv"), "torn.csv", "x\na\nb,c,d\n",
     r"cannot be read: ParserError: .*Expected 1 fields in line 3"),
    (FILES + "{test: half.jsonl}}", "half.jsonl", '{"x": "a"}\n\n{"x": "b\n{"x": "c"}\n', "cannot be read: "),
    (MODULE, "own.py", "def same(rows):\n    return (\n", r"not load: SyntaxError: .* never closed \(own.py, line 2"),
    (MODULE, "own.py", "import deeper\n", r"not load: .* 'deeper' \(lm-eval puts no task's folder on sys.path"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "file", "text", "says"), UNREADABLE)
def test_what_cannot_be_read_is_refused_with_the_cause(lines, file, text, says, tasks):
    """In one line, by the job that builds the requests. The words of `datasets` alone name no cause."""
    (tasks / file).write_text(text)
    (tasks / "deeper.py").write_text("x = 1\n")
    write(tasks, lines)
    with pytest.raises(OperatorError, match=says):
        load(tasks)


def test_a_yaml_that_holds_itself_is_refused(tasks):
    """An alias within its own value never ends a walk over it."""
    write(tasks, METRIC + "metadata: &x\n  - *x")
    assert task_yaml.unreadable_reason(tasks / "own.yaml") == "an alias in it contains itself"
    assert task_yaml.parse_yaml(tasks / "own.yaml") == {}


@pytest.mark.parametrize("text", [None, "doc_to_text: [\n"])
def test_a_member_that_lm_eval_would_pass_over_is_refused(tasks, text):
    """A tag or group never loses a member silently because that member's YAML includes a file that is missing, or cannot
    be read.
    """
    write(tasks, "dataset_path: data\ntag: both")
    write(tasks, "dataset_path: data\ntag: both\ninclude: gone.yml\ntask: other", name="other.yaml")
    (tasks / "all.yaml").write_text("group: all\ntask: [own, other]\n")
    if text is not None:
        (tasks / "gone.yml").write_text(text)
    for name in ("both", "all"):
        (why,) = set(ask(tasks, name).unfit.values())
        assert str(tasks / "gone.yml") in why
    assert ask(tasks, "own").unfit == {}


def test_names_are_those_of_lm_evals_own_index(tasks, tmp_path):
    """Tasks, groups, tags and their YAMLs; the first of two files in a folder, the later of two folders."""
    from lm_eval.tasks._index import TaskIndex

    other = tmp_path / "other"
    other.mkdir()
    write(tasks, "tag: [a, b]\ninclude: base.yml")
    (tasks / "base.yml").write_text("tag: c\nrepeats: 2\n")
    write(tasks, "tag: a\ntask: second", name="second.yaml")
    write(tasks, "tag: d", name="x_same_name.yaml")
    write(other, "tag: a")
    (tasks / "group.yaml").write_text("group: all\ntask: [own, second]\ntag: [a, of_groups]\n")
    (tasks / "class.yaml").write_text("task: coded\nclass: !function own.Task\n")
    (tasks / "no_dict.yaml").write_text("- 1\n")
    folders = [tasks, other]
    theirs = {
        name: (entry.yaml_path, sorted(entry.tags) if entry.kind.name == "TAG" else [])
        for name, entry in TaskIndex.build(folders).items()
    }
    ours = {
        name: (Path(one.yaml) if one.yaml else None, [] if one.yaml else sorted(one.members))
        for name, one in task_yaml.index_of(map(str, folders)).items()
    }
    assert ours == theirs


def test_lm_evals_own_tasks_are_looked_up_by_their_yaml(tasks, tmp_path):
    """A group of lm-eval's own, from the list that another process left: each leaf's data. `gsm8k` has the tag
    `math_word_problems`: a fault of another task of that tag concerns no suite with gsm8k.
    """
    first, again = (catalogue.resolve_names([], ["arc_easy", "glue"], str(tmp_path)) for _ in range(2))
    assert first == again
    assert first.uncached["arc_easy"] == "allenai/ai2_arc"
    assert len(first.uncached) > 5
    assert list(tmp_path.glob("lm_eval-*-catalogue.json"))
    assert task_yaml.reachable_names(catalogue.own_tasks(tmp_path), ["gsm8k"]) == {"gsm8k"}


@pytest.fixture
def hub(tasks, tmp_path):
    """A hub data set that has been fetched, as it lies in the cache."""
    import datasets

    builder = datasets.load_dataset_builder(
        "json",
        data_files={"test": str(tmp_path / "there/tasks/data/test.jsonl")},
        cache_dir=str(tmp_path / "made"),
    )
    builder.download_and_prepare()
    made = Path(builder.cache_dir)
    place = Path(datasets.config.HF_DATASETS_CACHE) / "lab___rows" / "default" / Path(*made.parts[-2:])
    shutil.copytree(made, place)
    (place / "json-test.arrow").rename(place / "rows-test.arrow")
    info = place / "dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"config_name": "default"}))
    return "lab/rows"


def test_a_fetched_data_set_is_read_from_the_cache(hub, tasks):
    """Also if the current folder has a folder of its name, which `datasets` would prefer."""
    rows(Path.cwd() / "lab" / "rows" / "test.jsonl", ["of the current folder's own"])
    write(tasks, f"dataset_path: {hub}")
    assert ask(tasks).uncached == {}
    assert texts(load(tasks)) == WRONG


@pytest.mark.parametrize(
    "lines", ["", "\ndataset_name: other", "\ndataset_kwargs: {data_files: {test: data/test.jsonl}}"]
)
def test_a_data_set_that_was_not_fetched_is_named(hub, tasks, lines):
    """Another data set, subset or file than those in the cache is named. A hub id's data_files are
    never the suite's.
    """
    write(tasks, f"dataset_path: {hub if lines else 'lab/others'}{lines}")
    answer = ask(tasks)
    assert answer.uncached.keys() == {"own"}
    assert (answer.files, answer.unfit) == ([], {})
    assert str(tasks / "lab") in answer.uncached["own"], "a folder beside the YAML may have been meant"


@pytest.mark.parametrize(
    "line", ["task: 123", "task:", "group: 2.5\ntask: [own]", "task: other\ntag: [marked, 7]"]
)
def test_a_name_that_is_no_text_is_refused_with_its_file(tmp_path, line):
    """lm-eval would fail each task of the folder as it sorts their names."""
    (tmp_path / "own.yaml").write_text("task: own\ntag: marked\n")
    odd = tmp_path / "odd.yaml"
    odd.write_text(f"{line}\n")
    with pytest.raises(OperatorError, match=f"{odd}: (task|group|tag): (123|null|2.5|7) is not text"):
        ask(tmp_path)
    catalogue.folder_index.cache_clear()
    odd.unlink()
    assert ask(tmp_path).unknown == {}
