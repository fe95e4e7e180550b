"""Laws of the pyslurm side: one description of a job, one reading of a listing, and what happens where pyslurm fails."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slurm_options import slurm_options

from coordinator.cluster import ClusterError, Job, RefusedError
from coordinator.cluster import slurm_parse as text
from coordinator.cluster.pyslurm_server import answer, gpus_of, nodes
from coordinator.cluster.pyslurm_text import (
    FIELDS,
    SHORT,
    description,
    environment,
    members,
    nodes_text,
    queue_text,
    state_long,
)
from coordinator.cluster.sbatch_text import SlurmOptions, sbatch_arguments
from coordinator.cluster.slurm_pyslurm import SlurmApi, of_another_version

FAKE = Path(__file__).parent / "fake_pyslurm"
EVERYTHING = Job(
    name="es-a",
    argv=("true",),
    log="/w/l.%i",
    count=3,
    gpus=2,
    node="n1",
    memory_mb=100,
    time_limit_seconds=600,
)
OPTIONS = slurm_options(
    partition="gpu", account="lab", qos="high", nice=5, reservation="r", chdir="/w", token="t"  # noqa: S106
)  # fmt: skip


def test_a_submission_has_one_description_for_sbatch_and_for_pyslurm() -> None:
    """Each of sbatch's arguments becomes an attribute of pyslurm's."""
    assert description(sbatch_arguments(EVERYTHING, OPTIONS)) == {
        "account": "lab", "array": "0-2", "comment": "t", "cpus_per_task": "1", "environment": "ALL",
        "gres_per_node": "gpu:2", "is_requeueable": False, "log_files_open_mode": "append",
        "memory_per_node": "100M", "name": "es-a", "nice": 5, "nodes": "1", "ntasks": 1, "partitions": "gpu",
        "profile_types": "none",
        "qos": "high", "required_nodes": "n1", "reservations": "r", "signal": "B:SIGTERM@60",
        "standard_output": "/w/l.%a", "time_limit": 10, "working_directory": "/w",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "field", "value"),
    [
        (["--constraint=a100&ib"], "constraints", "a100&ib"),
        (["-C", "a100"], "constraints", "a100"),
        (["-xn1,n2"], "excluded_nodes", "n1,n2"),
        (["--exclusive"], "resource_sharing", "no"),
        (["--time", "1-0"], "time_limit", "1-0"),
        (["--gpus-per-node=a100:2"], "gres_per_node", "gpu:a100:2"),
        (["--gres=gpu:a100,nvme:2"], "gres_per_node", "gpu:a100:1,nvme:2"),
        (["--signal=10@30"], "signal", "10@30"),
        (["--nice"], "nice", 100),
    ],
)
def test_a_users_own_arguments_win_in_each_form_that_sbatch_takes(
    extra: list[str], field: str, value: object
) -> None:
    assert description([*sbatch_arguments(EVERYTHING, OPTIONS), *extra])[field] == value


@pytest.mark.parametrize("argument", ["--hint=nomultithread", "--gpu", "--bb=x", "stray", "-Z", "--mem=0"])
def test_an_argument_that_pyslurm_cannot_express_is_refused_by_its_name(argument: str) -> None:
    with pytest.raises(RefusedError, match=r"cluster\] api") as caught:
        description(["--mem=1M", argument])
    assert argument.lstrip("-").partition("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_translation_names_an_attribute_of_pyslurm() -> None:
    """And every short option is one of the long ones."""
    source = (FAKE / "pyslurm.py").read_text()
    names = set(re.search(r'"""(name account .*?)"""', source, re.DOTALL)[1].split())  # type: ignore[index]
    assert {field for field, _ in FIELDS.values()} <= names
    assert {long for long in SHORT.values() if long not in FIELDS} == {"quiet", "verbose"}


def test_export_gives_a_job_the_variables_that_sbatch_would() -> None:
    present = {"A": "1", "B": "2"}
    assert environment("ALL", present | {"BYTES": "\udcff"}) == {"environment": present}
    assert environment("ALL,C=3", present) == {"environment": {"A": "1", "B": "2", "C": "3"}}
    assert environment("A,C=3", present) == {
        "environment": {"A": "1", "C": "3"},
        "get_user_environment": True,
    }
    assert environment("NONE", present) == {"environment": {}, "get_user_environment": True}
    assert environment("NIL", present) == {"environment": {}}


JOB: dict[str, Any] = {
    "id": 7, "name": "es-a", "state": "PENDING", "allocated_nodes": None, "state_reason": "Priority", "comment": "t",
    "submit_time": 5, "start_time": 9, "end_time": 99, "array_id": 7, "array_task_id": None, "array_tasks_waiting": "1-2",
}  # fmt: skip


def test_an_array_that_waits_as_a_whole_is_all_of_its_members() -> None:
    """And a member that was split off is one."""
    split = JOB | {
        "id": 8,
        "array_task_id": None,
        "array_tasks_waiting": None,
        "state": "RUNNING",
        "allocated_nodes": "n1",
    }
    alone = JOB | {"id": 9, "array_id": None, "array_tasks_waiting": None}
    listed = text.parse_queue(queue_text([JOB, split, alone]), "t")
    assert [(s.job_id, s.index, s.phase, s.node, s.started_at) for s in listed] == [
        ("7", 1, "pending", None, None),
        ("7", 2, "pending", None, None),
        ("7", 0, "running", "n1", 9.0),
        ("9", 0, "pending", None, None),
    ]
    assert {s.reason for s in listed} == {"Priority"}


@given(st.sets(st.integers(0, 40), min_size=1))
def test_the_members_of_a_waiting_array_are_read_in_each_form(indexes: set[int]) -> None:
    ordered = sorted(indexes)
    assert members(JOB | {"array_tasks_waiting": ",".join(map(str, ordered))}) == ordered
    last = max(indexes)
    assert members(JOB | {"array_tasks_waiting": f"0-{2 * last}:2"}) == list(range(0, 2 * last + 1, 2))


NODE: dict[str, Any] = {
    "name": "n1", "state": "MIXED", "configured_gres": {"gpu:a100": 4, "nvme": 1}, "reason": None,
    "total_cpus": 8, "idle_cpus": 6, "allocated_cpus": 2, "real_memory": 1000, "allocated_memory": 100,
    "partitions": ["gpu", "spare"], "available_features": ["ib"], "active_features": ["ib"],
}  # fmt: skip
PARTITIONS = [
    {"name": "gpu", "state": "UP", "is_default": True, "max_time": 90},
    {"name": "spare", "state": "DOWN", "is_default": False, "max_time": "UNLIMITED"},
]


def test_nodes_and_their_limits_are_read_as_from_sinfo() -> None:
    said = nodes_text([NODE], PARTITIONS, {"n1": 3})
    (node,) = text.parse_nodes(said, slurm_options())
    assert (node.gpus, node.gpus_free, node.gpu_type, node.cpus_free, node.memory_free_mb) == (
        4,
        1,
        "a100",
        6,
        900,
    )
    assert (node.usable, node.partitions, node.reason) == (True, ("gpu", "spare"), "")
    assert text.parse_limits(said) == {"gpu": 5400, None: 5400}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("IDLE", "idle"), ("MIXED+PLANNED", "mixed"), ("IDLE+PLANNED", "planned"), ("IDLE+DRAIN", "drained"),
        ("MIXED+DRAIN", "draining"), ("DOWN+NOT_RESPONDING", "down*"), ("IDLE+CLOUD+POWERED_DOWN", "idle~"),
        ("IDLE+MAINTENANCE+RESERVED", "maint"), ("IDLE+RESERVED", "reserved"), ("ALLOCATED+MAINTENANCE", "allocated$"),
        ("IDLE+COMPLETING", "completing"), ("DOWN+DRAIN+NOT_RESPONDING", "drained*"), ("IDLE+INVALID_REG", "inval"),
    ],
)  # fmt: skip
def test_a_nodes_state_reads_as_sinfo_says_it(state: str, said: str) -> None:
    assert state_long(state) == said


class Layout:
    """A job of another user that holds GPUs, or waits for some."""

    def __init__(self, state: str, gres: dict[str, Any]) -> None:
        self.state, self.gres = state, gres

    def get_resource_layout_per_node(self) -> dict[str, Any]:
        return {"n1": {"gres": self.gres}}


def test_gpus_in_use_are_those_of_all_running_jobs() -> None:
    held = [Layout("RUNNING", {"gpu:a100": {"count": 2, "indexes": "0-1"}}), Layout("RUNNING", {"gpu": 1})]
    assert gpus_of([*held, Layout("COMPLETED", {"gpu": 1}), Layout("RUNNING", {"nvme": 1})]) == {"n1": 3}


class Site:
    """A pyslurm that shows what one node and its jobs use."""

    def __init__(self, tres: list[str], private: list[str]) -> None:
        node = SimpleNamespace(**NODE, allocated_tres={"cpu": 2, "gres/gpu": 2, "gres/gpu:a100": 2})
        held = Layout("RUNNING", {"gpu:a100": {"count": 2, "indexes": "0-1"}})
        config = SimpleNamespace(accounting_storage_tres=tres, private_data=private)
        self.Nodes = SimpleNamespace(load=lambda: {"n1": node})
        self.Jobs = SimpleNamespace(load=lambda: {1: held})
        self.Partitions = SimpleNamespace(load=lambda: {p["name"]: SimpleNamespace(**p) for p in PARTITIONS})
        self.slurmctld = SimpleNamespace(Config=SimpleNamespace(load=lambda: config))


def test_gpus_in_use_come_from_accounting_or_jobs_and_are_unknown_where_both_are_hidden() -> None:
    assert nodes(Site(["cpu", "gres/gpu"], ["jobs"]))["used"] == {"n1": 2}
    assert nodes(Site(["cpu"], []))["used"] == {"n1": 2}
    assert nodes(Site(["cpu"], ["jobs", "users"]))["used"] is None


class Module:
    """As much of pyslurm as one answer needs."""

    class PyslurmError(Exception): ...

    class JobSubmitDescription:
        __slots__ = ("name",)

        def __init__(self, **fields: Any) -> None:
            for name, value in fields.items():
                setattr(self, name, value)


def test_a_field_that_this_pyslurm_lacks_is_no_crash() -> None:
    said = answer(Module, {"call": "submit", "arguments": [{"name": "x", "gpus_per_moon": 1}]})
    assert "gpus_per_moon" in said["invalid"]


# --- the process -----------------------------------------------------------------------------------------------------


def options(folder: Path, source: str, **more: Any) -> SlurmOptions:
    """A site whose pyslurm is this source."""
    (folder / "pyslurm.py").write_text(source)
    env = {"PYTHONPATH": str(folder), "FAKE_SLURM": str(folder)}
    return slurm_options(command_prefix=(str(FAKE / "commands"),), env=env, **more)


def test_without_pyslurm_one_line_names_the_setting_to_change(tmp_path: Path) -> None:
    here = options(tmp_path, "raise ModuleNotFoundError(\"No module named 'pyslurm'\", name='pyslurm')")
    with pytest.raises(RefusedError, match=r'^pyslurm is not installed.*api = "cli"$'):
        SlurmApi(here)


def test_a_library_that_ends_its_process_is_an_error_in_one_line(tmp_path: Path) -> None:
    """As Slurm's does without slurm.conf."""
    here = options(
        tmp_path,
        "import sys\nsys.stderr.write('fatal: Could not establish a configuration source\\n')\nsys.exit(1)",
    )
    with pytest.raises(RefusedError, match=r"^pyslurm cannot be used here .*configuration source[^\n]*$"):
        SlurmApi(here)


SILENT = """
import os, time
__version__ = "25.11.2"
class PyslurmError(Exception): pass
class Jobs:
    @staticmethod
    def load():
        if not os.path.exists(os.environ["FAKE_SLURM"] + "/awake"):
            time.sleep(600)
        return {}
"""


def test_a_call_that_slurm_does_not_answer_ends_in_time_and_the_next_one_is_asked_anew(
    tmp_path: Path,
) -> None:
    cluster = SlurmApi(options(tmp_path, SILENT, timeout_seconds=1.0))
    with pytest.raises(ClusterError, match="no answer within 1 s"):
        cluster.jobs()
    (tmp_path / "awake").touch()
    assert cluster.jobs() == []
    cluster.close()


SLOW = """
import time
__version__ = "25.11.2"
class PyslurmError(Exception): pass
class Job:
    def __init__(self, job_id): pass
    def cancel(self): time.sleep(600)
"""


def test_many_jobs_are_cancelled_by_one_command_and_not_one_by_one(tmp_path: Path) -> None:
    cluster = SlurmApi(options(tmp_path, SLOW, timeout_seconds=1.0))
    with pytest.raises(ClusterError, match="no answer"):
        cluster.cancel(["1"])
    cluster.cancel([str(i) for i in range(1, 200)])
    cluster.close()


OTHER = """
__version__ = "25.11.2"
class PyslurmError(Exception): pass
class Jobs:
    @staticmethod
    def load():
        raise PyslurmError("Incompatible versions of client and server code")
"""


def test_a_slurm_of_another_version_is_named_with_the_setting_to_change(tmp_path: Path) -> None:
    """From the version of its commands; and where only the controller's differs, from its answer."""
    assert of_another_version("25.11.2", "slurm 25.11.7") == ""
    assert "another version than this Slurm (22.05.8)" in of_another_version("25.11.2", "slurm 22.05.8")
    with pytest.raises(RefusedError, match=r'24\.11\.2.*another version.*\(25\.11\.7\).*api = "cli"'):
        SlurmApi(options(tmp_path, '__version__ = "24.11.2"'))
    cluster = SlurmApi(options(tmp_path, OTHER))
    with pytest.raises(ClusterError, match=r'another version.*\[cluster\] api = "cli"'):
        cluster.jobs()
    cluster.close()


def test_a_job_gets_none_of_the_coordinators_own_slurm_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator may run in a job itself; pyslurm hands on every SLURM_ variable of its process."""
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "7")
    monkeypatch.setenv("OWN_PATH", "kept")
    here = slurm_options(
        command_prefix=(str(FAKE / "commands"),),
        env={"PYTHONPATH": str(FAKE), "FAKE_SLURM": str(tmp_path / "jobs")},
    )
    cluster = SlurmApi(here)
    log = tmp_path / "log.0"
    script = "import os, json; print(json.dumps(dict(os.environ)))"
    work = Job(name="es-env", argv=(sys.executable, "-c", script), log=str(tmp_path / "log.%i"))
    cluster.submit(work)
    while not all(job.phase == "ended" for job in cluster.jobs()):
        os.sched_yield()
    cluster.close()
    seen = json.loads(log.read_text())
    assert (seen["OWN_PATH"], seen["SLURM_CPUS_PER_TASK"]) == ("kept", "1")
    assert not {"SLURM_NTASKS_PER_NODE", "SLURM_BITSTR_LEN"} & set(seen)


def test_pyslurms_process_ends_with_its_coordinator(tmp_path: Path) -> None:
    """Also after `kill -9`."""
    source = "from test_slurm_api import *; import time; c = SlurmApi(options(Path({!r}), SILENT)); print(c._process._child.pid, flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", source.format(str(tmp_path))],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
    ) as coordinator:
        assert coordinator.stdout is not None
        server = int(coordinator.stdout.readline())
        pidfd = os.pidfd_open(server)
        coordinator.kill()
        assert select.select([pidfd], [], [], 60)[0], "it lives on"
        os.close(pidfd)
