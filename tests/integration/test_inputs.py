"""Scores are lm_eval's of now, whatever input was edited, and a GPU runs for new requests and weights alone.

Rule: rows of the table in support/inputs/edits.py that concern different tasks are one step.
"""

import pytest
from support.inputs.asking import Asking, warm
from support.inputs.edits import EDITS
from support.inputs.world import make

pytestmark = pytest.mark.model

BY_NAME = {edit.name: edit for edit in EDITS}
STEPS = {
    "modules, files outside, packages, data": (
        "prompt of a YAML, size and mtime kept", "module imported by process_docs' map, size and mtime kept",
        "file outside read by a generator of rows", "file outside read by a module, size and mtime kept",
        "package of a prompt installed again, version kept", "editable package",
        "last row of a file over 1 MiB, size and mtime kept", "row of the data, size and mtime kept", "link moved",
        "file that a glob finds anew", "far place of a large file read by a module, size and mtime kept",
        "data set of the Hub: main moves", "file read by a forked child of a map",
    ),
    "what no answer depends on, scorers, and a file opened for reading and writing": (
        "file opened for reading and writing",
        "the same data touched afterwards", "comment of an included YAML", "comment of an imported module",
        "Hub's token by the prologue", "Hub's progress bars in [trial] env", "checkpoint touched",
        "package of a scorer 1.0 -> 2.0", "file outside that a scorer reads, size and mtime kept",
        "variable in [trial] env that a scorer reads", "gold answer, size and mtime kept", "aggregation by a module",
    ),
    "a filter, alone: another environment would have all scored again": ("filter of a YAML", "missing file that a module tried to open"),
    "folders' files, a variable, and a Hub's cache that the prologue names": (
        "file that appears in a folder listed by a module", "YAML that appears in a listed folder", "variable in [trial] env read by a module",
        "HF_HOME by the prologue, the same content", "data set in the prologue's HF_HOME: main moves",
    ),
    "an adapter": ("an adapter",),
    "the adapter trained again, a tokenizer": (
        "adapter trained again into its folder, size and mtime kept", "another tokenizer",
    ),
    "revisions of the Hub": ("adapter of the Hub: main moves", "tokenizer of the Hub: main moves"),
    "the checkpoint's files": (
        "config.json, size and mtime kept", "one tensor reversed, size and mtime kept",
        "another version of transformers",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    with warm(folder) as runner:
        yield Asking(make(folder / "world"), runner)


def right(asking, edits):
    """Ask both; a GPU may answer for the tasks of `edits`."""
    for edit in edits:
        edit.do(asking.world)
    theirs, ours = asking.plain(), asking.ours()
    assert ours.differs(theirs) == ""
    assert ours.ran <= {task for edit in edits for task in edit.gpu}


@pytest.mark.timeout(900)  # ten questions to both
def test_after_each_edit_the_score_is_lm_evals_of_now(asking):
    """One step after the other, in one work folder: what earlier steps built and answered is at hand. Asked again without an
    edit, nothing is run; with `--fresh`, all.
    """
    first = asking.ours()
    assert first.differs(asking.plain()) == ""
    again = asking.ours()
    assert (again.differs(first), again.jobs) == ("", frozenset())
    assert "from the same inputs; nothing was run" in again.said
    wrong = []
    for step, names in STEPS.items():
        try:
            right(asking, tuple(BY_NAME[name] for name in names))
        except AssertionError as error:
            wrong.append(f"{step}: {str(error)[:600]}")
            asking.fresh()
            asking.ours()
    assert not wrong, "\n".join(wrong)
    assert asking.ours("--fresh").jobs >= {"build", "trial", "metric"}


def test_after_what_broke_a_build_is_mended_the_same_command_runs_again(asking):
    """Until then it says that nothing was run."""
    asking.world.entries = {"probed": {}}
    forked = asking.world.path("outside/forked.txt")
    text = forked.read_text()
    forked.unlink()
    assert str(forked) in asking.ours().said
    again = asking.ours()
    assert (again.jobs, "nothing was run" in again.said) == (frozenset(), True)
    forked.write_text(text)
    assert asking.ours().differs(asking.plain()) == ""
