"""Laws of commands of Slurm that fail, which are first in PATH and run for real, and of pyslurm: its listings are the records that
squeue and sinfo give, and where it fails it gives one line.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from dev_cluster import procs
from dev_cluster.testing import wait_until
from hypothesis import given
from hypothesis import strategies as st
from support.slurm_options import slurm_options

from coordinator.site.cluster import ClusterError, Job, LimitError, RefusedError
from coordinator.site.cluster import slurm_parse as text
from coordinator.site.cluster.pyslurm_queries import array_members
from coordinator.site.cluster.slurm_cli import SlurmApi, SlurmCli
from coordinator.site.cluster.slurm_parse import NODE_FIELDS

# the header alone of what `sinfo` is asked for
NO_NODES = "\\037".join(NODE_FIELDS) + "\\036\\n"
JOB = Job(name="es-fault", argv=("true",), log="/dev/null", memory_mb=50, time_limit_seconds=600)
FAILED = "echo 'sbatch: error: Batch job submission failed: {}' >&2; exit 1"
KILL_ERROR = "echo 'scancel: error: Kill job error on job id 1: {}' >&2; exit 1"
LIMIT = f"echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; {FAILED.format('Job violates accounting/QOS policy')}"


def wrapped(folder, seconds=60.0, **commands):
    """A SlurmCli whose commands are these scripts; the site has no nodes and no accounting where they say nothing of it."""
    quiet = {
        "sinfo": f"printf '{NO_NODES}'",
        "scontrol": "echo AccountingStorageType = accounting_storage/none",
    }
    for name, script in (quiet | commands).items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:/usr/bin:/bin"
    prefix = ("env", f"PATH={path}")
    return SlurmCli(slurm_options(env={"PATH": path}, command_prefix=prefix, timeout_seconds=seconds))


def raised(call):
    with pytest.raises(ClusterError) as caught:
        call()
    return caught.value


def test_a_command_that_hangs_is_ended_and_is_a_cluster_error(tmp_path):
    """With the whole of its process group; no caller waits longer than the time limit for it."""
    place = tmp_path / "pid"
    place.touch()
    for seconds in (0.5, 5.0, 50.0):  # longer where this machine was too slow to let it begin
        slurm = wrapped(tmp_path, seconds, sbatch=f"sh -c 'echo $$ > {place}; exec sleep 600'")
        error = raised(lambda slurm=slurm: slurm.submit(JOB))
        assert type(error) is ClusterError
        assert "timed out" in str(error)
        if place.read_text():
            break
    wait_until(lambda: not procs.identify(int(place.read_text())), "it is gone", 60)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (FAILED.format("Socket timed out on send/recv operation"), ClusterError),
        (FAILED.format("Unable to contact slurm controller (connect failure)"), ClusterError),
        (FAILED.format("Invalid qos specification"), RefusedError),
        (LIMIT, LimitError),
        ("exit 1", ClusterError),
        ("kill -9 $$", ClusterError),
        ("echo what is this", ClusterError),
        ("true", ClusterError),
    ],
)
def test_only_slurms_own_words_refuse_a_submission_or_name_a_limit(tmp_path, script, kind):
    """Any other failure is a ClusterError: the job is looked up by its name before it is submitted again."""
    assert type(raised(lambda: wrapped(tmp_path, sbatch=script).submit(JOB))) is kind


@pytest.mark.parametrize(
    "script",
    [
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
        "exit 1",
        "true",
        "echo what is this",
        "head -c 4096 /dev/urandom",
        "printf 'ARRAY_JOB_ID\\037ARRAY'",
        "exec sleep 600",
    ],
)
def test_a_listing_that_fails_is_no_news(tmp_path, script):
    """Whether it says so, prints garbage, half of an answer or nothing, or hangs: never "no jobs", never "no nodes"."""
    slurm = wrapped(tmp_path, 1.0, squeue=script, sinfo=script)
    assert type(raised(slurm.jobs)) is ClusterError
    assert type(raised(slurm.nodes)) is ClusterError


def test_a_missing_command_is_told_by_name(tmp_path):
    slurm = SlurmCli(slurm_options(command_prefix=(str(tmp_path / "missing"),)))
    for call in (slurm.jobs, slurm.nodes, lambda: slurm.cancel(["1"]), lambda: slurm.check(JOB)):
        assert "missing cannot be run" in str(raised(call))


def test_cancelling_that_fails_says_so(tmp_path):
    """Ids that are gone are no failure; a thousand ids are one command."""
    calls = tmp_path / "calls"
    gone = wrapped(tmp_path, scancel=f"echo x >> {calls}; {KILL_ERROR.format('Invalid job id specified')}")
    gone.cancel([str(i) for i in range(1000)])
    gone.cancel([])
    assert calls.read_text() == "x\n"
    away = wrapped(tmp_path, scancel=KILL_ERROR.format("Unable to contact slurm controller"))
    assert "contact" in str(raised(lambda: away.cancel(["1"])))


def test_limits_are_asked_for_once_in_a_while_and_hold_while_accounting_is_away(tmp_path):
    """MaxTime cuts a job though sacctmgr fails, and the next job asks neither again. Nothing is submitted before MaxTime
    is known: unknown is no freedom.
    """
    calls = f"echo x >> {tmp_path}/calls"
    slurm = wrapped(tmp_path, scontrol="echo 'slurm_load_partitions error: Socket timed out' >&2; exit 1")
    assert "Socket timed out" in str(raised(lambda: slurm.within_limits(JOB)))
    config, partition = (
        "AccountingStorageType = accounting_storage/slurmdbd",
        "PartitionName=gpu Default=YES MaxTime=05:00",
    )
    shown = f'{calls}; case "$*" in *config) echo {config};; *) echo {partition};; esac'
    wrapped(tmp_path, scontrol=shown, sacctmgr=f"{calls}; echo 'error: Connection refused' >&2; exit 1")
    assert [slurm.within_limits(JOB).time_limit_seconds for _ in range(2)] == [300, 300]
    assert (tmp_path / "calls").read_text() == "x\n" * 4


# --- pyslurm -----------------------------------------------------------------------------------------------------------


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
"""


def site(folder, *, source=MODULE, version="25.11.7", sinfo="", tres="cpu,mem,gres/gpu", **more):
    """A site whose pyslurm is this source, with `sinfo`, and `scontrol` that tells what is accounted."""
    (folder / "pyslurm.py").write_text(source)
    (folder / "listing").write_text(sinfo)
    command = f'#!/bin/sh\n[ "$1" = --version ] && exec echo slurm {version}\nexec cat {folder}/listing\n'
    for name, script in {
        "sinfo": command,
        "scontrol": f"#!/bin/sh\necho AccountingStorageTRES = {tres}\n",
    }.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    env = {"PYTHONPATH": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}
    options = {"token": "t", "env": {**env, "SITE": SAME}, "command_prefix": ("env", f"PATH={env['PATH']}")}
    return slurm_options(**{**options, **more})


def used(node):
    """The node less what only pyslurm says: that CPUs of a drained node are idle."""
    return node if node.usable else replace(node, cpus_free=0)


def test_pyslurm_gives_the_records_that_the_commands_give(tmp_path):
    """Of one site: members of arrays that wait, nodes in several partitions, and their limits."""
    slurm = SlurmApi(site(tmp_path))
    by_command = text.parse_queue((RECORDED / "squeue.txt").read_text(), "t")
    assert sorted(slurm.jobs(), key=str) == sorted(by_command, key=str)
    assert "sinfo" not in slurm.by_commands
    rows = text.parse_sinfo((RECORDED / "sinfo.txt").read_text())
    assert list(map(used, slurm.nodes())) == list(map(used, text.nodes_of(rows, slurm.options)))


def test_nodes_come_from_sinfo_where_slurm_does_not_account_gpus(tmp_path):
    """Else those in use would read as free; `doctor` names it."""
    listing = (RECORDED / "sinfo.txt").read_text()
    slurm = SlurmApi(site(tmp_path, sinfo=listing, tres="cpu,mem,gres/gpu:a100"))
    assert slurm.nodes() == text.nodes_of(text.parse_sinfo(listing), slurm.options)
    assert "sinfo" in slurm.by_commands


MISSING = "raise ModuleNotFoundError(\"No module named 'pyslurm'\", name='pyslurm')"
NO_CONF = "import sys; sys.exit('fatal: no configuration source')"


def test_a_pyslurm_that_cannot_be_used_is_refused_in_one_line(tmp_path):
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


def test_a_query_that_fails_is_no_news(tmp_path):
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
def test_the_members_of_a_waiting_array_are_read_in_each_form(indexes):
    ordered = sorted(indexes)
    assert array_members(None, ",".join(map(str, ordered))) == ordered
    last = max(indexes)
    assert array_members(None, f"0-{2 * last}:2") == list(range(0, 2 * last + 1, 2))


NAMES = """
import json, pyslurm
assert issubclass(pyslurm.RPCError, pyslurm.PyslurmError)
for collection in (pyslurm.Jobs, pyslurm.Nodes, pyslurm.Partitions):
    collection.load
print(json.dumps({name: dir(getattr(pyslurm, name)) for name in ("Job", "Node", "Partition")}))
"""


@pytest.mark.skipif(PYSLURM is None, reason="pyslurm is not installed: it builds on Slurm 25.11 alone")
def test_the_recorded_objects_have_the_names_of_the_real_module():
    """Where pyslurm is installed; no slurm.conf is needed."""
    env = {**os.environ, "PYSLURM_DISABLE_AUTO_INIT": "1", "SLURM_CONF": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", NAMES], env=env, capture_output=True, text=True, check=True)
    names, recorded = json.loads(done.stdout), json.loads(SAME)
    for kind, rows in (("Job", "jobs"), ("Node", "nodes"), ("Partition", "partitions")):
        assert {name for row in recorded[rows] for name in row} <= set(names[kind])
