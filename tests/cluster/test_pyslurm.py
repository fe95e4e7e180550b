"""Laws of pyslurm's listings: they are the records that squeue and sinfo give, and a pyslurm that fails gives one line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slurm_options import slurm_options

from coordinator.cluster import ClusterError, NodeState, RefusedError
from coordinator.cluster import slurm_parse as text
from coordinator.cluster.pyslurm_queries import members
from coordinator.cluster.sbatch_text import SlurmOptions
from coordinator.cluster.slurm_pyslurm import SlurmApi

RECORDED = Path(__file__).parent / "recorded"
PYSLURM = importlib.util.find_spec("pyslurm")
SAME = (RECORDED / "pyslurm.json").read_text()
# pyslurm 25.11.2 as far as evalspan asks it: objects of a file, with the names that the real module has.
MODULE = """
import json, os, sys, time
from types import SimpleNamespace
__version__ = "25.11.2"
class PyslurmError(Exception): pass
SITE = json.loads(os.environ["SITE"])
def collection(name):
    def load():
        if "says" in SITE: raise PyslurmError(SITE["says"])
        time.sleep(SITE.get("sleeps", 0))
        rows = [SimpleNamespace(**{"user_id": os.getuid(), **row}) for row in SITE[name]]
        return SimpleNamespace(values=lambda: rows)
    return SimpleNamespace(load=load)
Jobs, Nodes, Partitions = map(collection, ("jobs", "nodes", "partitions"))
slurmctld = SimpleNamespace(Config=SimpleNamespace(load=lambda: SimpleNamespace(accounting_storage_tres=SITE["tres"])))
"""


def site(
    folder: Path, *, source: str = MODULE, version: str = "25.11.7", sinfo: str = "", **more: object
) -> SlurmOptions:
    """A site whose pyslurm is this source, with `sinfo` as its only command."""
    (folder / "pyslurm.py").write_text(source)
    (folder / "listing").write_text(sinfo)
    command = f'#!/bin/sh\n[ "$1" = --version ] && exec echo slurm {version}\nexec cat {folder}/listing\n'
    (folder / "sinfo").write_text(command)
    (folder / "sinfo").chmod(0o755)
    env = {"PYTHONPATH": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}
    options = {"token": "t", "env": {**env, "SITE": SAME}, "command_prefix": ("env", f"PATH={env['PATH']}")}
    return slurm_options(**{**options, **more})


def used(node: NodeState) -> NodeState:
    """The node less what only pyslurm says: that CPUs of a drained node are idle."""
    return node if node.usable else replace(node, cpus_free=0)


def test_pyslurm_gives_the_records_that_the_commands_give(tmp_path: Path) -> None:
    """Of one site: members of arrays that wait, nodes in several partitions, and their limits."""
    slurm = SlurmApi(site(tmp_path))
    by_command = text.parse_queue((RECORDED / "squeue.txt").read_text(), "t")
    assert sorted(slurm.jobs(), key=str) == sorted(by_command, key=str)
    rows = text.parse_sinfo((RECORDED / "sinfo.txt").read_text())
    assert list(map(used, slurm.nodes())) == list(map(used, text.nodes_of(rows, slurm.options)))


def test_nodes_come_from_sinfo_where_slurm_does_not_account_gpus(tmp_path: Path) -> None:
    """Else those in use would read as free; `doctor` names it."""
    listing = (RECORDED / "sinfo.txt").read_text()
    options = site(tmp_path, sinfo=listing)
    slurm = SlurmApi(
        site(tmp_path, sinfo=listing, env={**options.env, "SITE": json.dumps({"tres": ["cpu"]})})
    )
    assert "sinfo" not in slurm.by_commands
    assert slurm.nodes() == text.nodes_of(text.parse_sinfo(listing), options)
    assert "sinfo" in slurm.by_commands


MISSING = "raise ModuleNotFoundError(\"No module named 'pyslurm'\", name='pyslurm')"
NO_CONF = "import sys; sys.exit('fatal: no configuration source')"


def test_a_pyslurm_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    """Slurm's library ends its process without slurm.conf; the coordinator lives on."""
    unusable = {
        "pip install": {"source": MISSING},
        "no configuration source": {"source": NO_CONF},
        "(24.11.5)": {"version": "24.11.5"},
    }
    for named, changes in unusable.items():
        with pytest.raises(RefusedError) as caught:
            SlurmApi(site(tmp_path, **changes))
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_query_that_fails_is_no_news(tmp_path: Path) -> None:
    """It ends in time, too; never "no jobs"."""
    options = site(tmp_path)
    slurm = SlurmApi(options)
    for answer, named, seconds in (  # a busy machine needs some to start Python
        ({"sleeps": 600}, "timed out", 2.0),
        ({"says": "Incompatible versions of client and server code"}, '[cluster] api = "cli"', 90.0),
        ({"jobs": [{"comment": "t"}]}, "AttributeError", 90.0),
    ):
        env = {**options.env, "SITE": json.dumps(answer)}
        slurm.options = site(tmp_path, env=env, timeout_seconds=seconds)
        with pytest.raises(ClusterError) as caught:
            slurm.jobs()
        assert named in str(caught.value)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_the_members_of_a_waiting_array_are_read_in_each_form(indexes: set[int]) -> None:
    ordered = sorted(indexes)
    assert members(None, ",".join(map(str, ordered))) == ordered
    last = max(indexes)
    assert members(None, f"0-{2 * last}:2") == list(range(0, 2 * last + 1, 2))


NAMES = """
import json, pyslurm
assert issubclass(pyslurm.RPCError, pyslurm.PyslurmError)
for collection in (pyslurm.Jobs, pyslurm.Nodes, pyslurm.Partitions, pyslurm.slurmctld.Config):
    collection.load
print(json.dumps({name: dir(getattr(pyslurm, name)) for name in ("Job", "Node", "Partition")}))
"""


@pytest.mark.skipif(PYSLURM is None, reason="pyslurm is not installed: it builds on Slurm 25.11 alone")
def test_the_recorded_objects_have_the_names_of_the_real_module() -> None:
    """Where pyslurm is installed; no slurm.conf is needed."""
    env = {**os.environ, "PYSLURM_DISABLE_AUTO_INIT": "1", "SLURM_CONF": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", NAMES], env=env, capture_output=True, text=True, check=True)
    names, recorded = json.loads(done.stdout), json.loads(SAME)
    for kind, rows in (("Job", "jobs"), ("Node", "nodes"), ("Partition", "partitions")):
        assert {name for row in recorded[rows] for name in row} <= set(names[kind])
