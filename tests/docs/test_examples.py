"""Laws of the examples: what a page tells a reader to type is run, and does what the page says.

CONTRIBUTING.md, "Change the documentation", has the conventions; examples.toml says where each page runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from dev_cluster.api import Cluster
from support import sites
from support.examples.pages import ROOT, blocks, pages, table
from support.examples.run import Page, Place

from .given import Given, environment

TABLE = table()
PAGES = pages()
NEWCOMERS = ("README.md", "tutorial.md", "site/first-cluster.md")  # what a plain run of the tests types


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return Given(tmp_path_factory.mktemp("given"))


@pytest.fixture(scope="session")
def site() -> Iterator[Cluster]:
    """An ordinary site for all pages that need a Slurm."""
    with sites.cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8) as made:
        yield made


def _on(name: str) -> object:
    marks = [pytest.mark.slurm] if TABLE[name].on == "slurm" else []
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.timeout(1800)  # the tutorial trains a model and evaluates five checkpoints
@pytest.mark.parametrize("name", [_on(name) for name in TABLE])
def test_the_examples_of_a_page_do_what_it_says(name, given, tmp_path, request):
    """Each block in the page's order; see `support.examples.run`."""
    entry = TABLE[name]
    if name not in NEWCOMERS and "EVERY_PAGE" not in os.environ:
        pytest.skip("no page of a newcomer: scripts/check --deep runs it")
    for module in entry.needs:
        pytest.importorskip(module)
    if entry.on == "slurm":
        place = _user(request.getfixturevalue("site"), name)
    else:
        (folder := tmp_path / "home").mkdir()
        place = Place(folder=folder, env=environment(folder))
    words = given.put(entry.given, place.folder)
    for path in place.folder.rglob("*"):
        place.written(path)
    Page(entry, place, words).run([block for block in blocks(PAGES[name]) if block.run_here])


def _user(cluster: Cluster, name: str) -> Place:
    """A folder of the ordinary user's, who types there. Jobs have no GPU in truth, and little memory."""
    folder = Path(cluster.user_dir) / name.replace("/", "-").removesuffix(".md")
    folder.mkdir()
    owner = Path(cluster.user_dir).stat()

    def written(path: Path) -> None:
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)

    written(folder)
    env = environment(folder) | cluster.user_env | {"HOME": str(folder)}
    env |= {"EVALSPAN_TRIAL_DEVICE": "cpu", "EVALSPAN_TRIAL_MEMORY_MB": "2000", "EVALSPAN_TRIAL_THREADS": "1"}
    env |= {
        "EVALSPAN_METRIC_MEMORY_MB": "2000",
        "EVALSPAN_METRIC_WORKERS": "1",
        "EVALSPAN_CLUSTER_POLL_SECONDS": "1",
    }
    return Place(
        folder=folder,
        env=env,
        argv=lambda line: cluster.user_argv(line, cwd=folder),
        written=written,
        ended=lambda: cluster.run_as_user(["scancel", "--user", cluster.user]) and None,
    )


@pytest.mark.parametrize("name", PAGES)
def test_every_example_is_run_or_says_why_not(name):
    """A page's blocks have languages. Those that a reader types run here, in the test that is named, or not, with a reason; a
    page of the table has some to run.
    """
    found = list(blocks(PAGES[name]))
    assert [b.place for b in found if b.run_by and not (ROOT / b.run_by).is_file()] == []
    left = [block.place for block in found if block.run_here]
    assert bool(left) == (name in TABLE), f"{left}: not marked, and the page is not in examples.toml"


def test_the_table_of_pages_is_in_order_and_has_those_of_a_newcomer():
    assert list(TABLE) == sorted(TABLE)
    assert set(NEWCOMERS) <= TABLE.keys() <= PAGES.keys()
