"""What a suite's tasks hold on this machine: documents, few-shot examples, data."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import OperatorError
from coordinator.intake import catalogue, from_settings
from evaljobs.contract.specs import SuiteSpec, TaskEntry
from evaljobs.lmeval.catalogue import TaskDescription

LOCAL = """task: local
dataset_path: json
dataset_kwargs: {data_files: {train: data/none.jsonl, test: data/*.jsonl}}
test_split: test
output_type: multiple_choice
metric_list: [{metric: acc}, {metric: !function own.score}]
"""
HUB = "task: hub\ndataset_path: lab/MyRows\ndataset_name: easy\nvalidation_split: dev\nnum_fewshot: 3\ntag: [both]\n"
GROUP = "group: all\ntask: [local, {task: hub, num_fewshot: 1}, {group: inner, task: [both]}]\n"


@pytest.fixture
def folder(tmp_path):
    """Local data of 7 documents in two files, a Hub data set, a tag and a group."""
    texts = {"local.yaml": LOCAL, "hub.yaml": HUB, "all.yaml": GROUP}
    texts |= {"data/a.jsonl": '{"x": 1}\n' * 4, "data/b.jsonl": '{"x": 1}\n' * 2 + '\n{"x": 2}'}
    for name, text in texts.items():
        (tmp_path / "tasks" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tasks" / name).write_text(text)
    return tmp_path / "tasks"


def held(folder, *entries):
    suite = SuiteSpec(name="s", include_path=(str(folder),), tasks=entries)
    return catalogue.suite_holdings(suite, {}, {"HF_HOME": str(folder.parent / "hf")})


JSON, HUB_FILES = "dataset_path: json\ndataset_kwargs: ", "dataset_path: lab/MyRows\ndataset_kwargs: "


@pytest.mark.parametrize(
    ("lines", "data", "documents"),
    [
        (JSON + "{data_dir: data}", "local", None),
        (JSON + "{data_dir: data, data_files: {test: b.jsonl}}", "local", 3),
        (JSON + "{data_files: [{split: test, path: data/a.jsonl}]}", "local", 4),
        (JSON + "{data_files: {test: [data/a.jsonl, data/b.jsonl]}}", "local", 7),
        (JSON + "{data_files: {train: data/none.jsonl, test: data/*.jsonl}}", "local", 7),
        (JSON + "{data_files: {test: data/none*.jsonl}}", "data/none*.jsonl", None),
        ("dataset_path: ./data\ndataset_kwargs: {data_files: {test: a.jsonl}}", "local", 4),
        ("dataset_path: data", "local", None),
        (
            HUB_FILES + "{data_files: {test: data/a.jsonl}}",
            "lab/MyRows",
            None,
        ),  # files inside it are not local ones
    ],
)
def test_data_that_are_here_are_counted_and_others_are_named(folder, lines, data, documents):
    """However the YAML names them: lines of the scored split's files. Another data set of the same loader gives no count."""
    other = folder.parent / "hf" / "datasets" / "json" / "default-1" / "0.0.0" / "abc"
    other.mkdir(parents=True)
    (other / "dataset_info.json").write_text(json.dumps({"splits": {"test": {"num_examples": 99}}}))
    (folder / "own.yaml").write_text(f"task: own\n{lines}\ntest_split: test\n")
    (one,) = held(folder, TaskEntry(name="own"))
    there = data == "local"
    missing = () if there else (str(folder / data) if data.startswith("data/") else data,)
    assert (one.data, one.missing, one.documents) == ("local" if there else "missing", missing, documents)


def test_documents_that_a_suite_names_are_counted_once(folder):
    """As lm_eval asks them, whatever else there is."""
    (one,) = held(folder, TaskEntry(name="local", samples={"local": (4, 1, 4)}))
    assert (one.documents, one.at_most) == (2, False)


def test_a_limit_counts_as_lm_eval_counts_it(folder):
    shares = [{"limit": 3, "num_fewshot": 2}, {"limit": 0.5}]
    whole, some, share = held(folder, *(TaskEntry(name="local", **each) for each in ({}, *shares)))
    assert (whole.documents, some.documents, share.documents) == (7, 3, math.ceil(7 * 0.5))
    assert (whole.num_fewshot, some.num_fewshot) == (0, 2)
    assert (whole.kinds, whole.metrics) == (("multiple_choice",), ("acc", "score"))
    assert (whole.data, whole.missing, whole.at_most) == ("local", (), False)


def test_a_hub_data_set_is_here_once_it_is_prepared(folder):
    (before,) = held(folder, TaskEntry(name="hub"))
    assert (before.data, before.documents, before.missing) == ("missing", None, ("lab/MyRows",))
    assert (before.num_fewshot, before.metrics) == (3, ("exact_match",))
    place = folder.parent / "hf" / "datasets" / "lab___my_rows" / "easy" / "0.0.0" / "abc"
    place.mkdir(parents=True)
    (place / "dataset_info.json").write_text(json.dumps({"splits": {"dev": {"num_examples": 31}}}))
    (after,) = held(folder, TaskEntry(name="hub"))
    assert (after.data, after.missing, after.documents) == ("cached", (), 31)


def test_a_list_of_tasks_needs_no_torch(monkeypatch):
    """YAML files are read by lm_eval alone; a trial needs both."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert from_settings.own_version(("lm_eval",))
    with pytest.raises(OperatorError, match="has no torch"):
        from_settings.own_version()


def test_a_group_holds_its_leaf_tasks_once(folder):
    """Through nested groups and tags; where few-shot examples differ, none is claimed."""
    (one,) = held(folder, TaskEntry(name="all"))
    assert one.tasks == 2
    assert one.num_fewshot is None
    assert one.missing == ("lab/MyRows",)
    (unknown,) = held(folder, TaskEntry(name="nowhere"))
    assert (unknown.tasks, unknown.documents, unknown.data) == (1, None, "unknown")


NAMES = st.text("abc_XY[?", min_size=1, max_size=6)


@given(st.lists(NAMES, unique=True), NAMES)
def test_a_part_of_a_name_selects_it(names, part):
    """Upper and lower case are one; a glob selects what it matches as a whole."""
    if not set(part) & set("*?["):
        assert set(catalogue.matching_names(part, names)) == {n for n in names if part.lower() in n.lower()}
    assert set(catalogue.matching_names("*", names)) == set(names)
    assert catalogue.matching_names("a*c", ["abc", "Ac", "abcd"]) == ["abc", "Ac"]


@given(st.dictionaries(NAMES, st.lists(NAMES, max_size=4), max_size=6), NAMES)
def test_leaves_end_for_any_groups(groups, name):
    """Also for a group that holds itself; no group is a leaf."""
    known = {
        group: TaskDescription(kind="group", members=tuple(members)) for group, members in groups.items()
    }
    found = catalogue.leaf_tasks(name, known)
    assert not set(found) & known.keys()
    assert len(found) == len(set(found))
