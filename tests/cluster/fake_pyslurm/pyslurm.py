"""pyslurm 25.11.2 as far as evalspan calls it, on this machine's processes instead of a Slurm: its names, types and faults.

`test_pyslurm_names.py` compares it with the real module where that imports. FAKE_SLURM: the
folder of its jobs.
"""

from __future__ import annotations

import os
import signal as signals
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from coordinator.cluster import Job as LocalJob
from coordinator.cluster import JobState, RefusedError
from coordinator.cluster.local import LocalCluster

__version__ = "25.11.2"
GPUS = 2
MEMBERS = 1000  # ids from one array to the next
UNLIMITED = "UNLIMITED"  # pyslurm.constants

_cluster = LocalCluster(Path(os.environ["FAKE_SLURM"]), slots=GPUS, gpus=[])
_submitted: dict[str, JobSubmitDescription] = {}  # LocalCluster's id -> what was submitted


class PyslurmError(Exception):
    """The base of pyslurm's errors."""


class RPCError(PyslurmError):
    """A call of Slurm's library failed."""


class JobSubmitDescription:
    """As submission.pxd: other attributes do not exist, and none is checked before `submit`."""

    __slots__ = tuple(
        """name account user_id group_id priority site_factor wckey array batch_constraints begin_time clusters
        cluster_constraints comment admin_comment requires_contiguous_nodes cores_reserved_for_system
        threads_reserved_for_system working_directory cpu_frequency nodes deadline delay_boot_time dependencies
        excluded_nodes required_nodes constraints kill_on_node_fail licenses mail_user mail_types mcs_label
        memory_per_cpu memory_per_node memory_per_gpu network nice log_files_open_mode overcommit partitions
        profile_types accounting_gather_frequency qos requires_node_reboot is_requeueable reservations script
        script_args environment resource_sharing distribution time_limit time_limit_min container container_id
        cpus_per_task cpus_per_gpu sockets_per_node cores_per_socket threads_per_core gpus gpus_per_socket
        gpus_per_task gres_per_node gpu_binding ntasks ntasks_per_node ntasks_per_socket ntasks_per_core
        ntasks_per_gpu switches signal standard_in standard_output standard_error kill_on_invalid_dependency
        spreads_over_nodes use_min_nodes gres_binding gres_tasks_per_sharing temporary_disk_per_node
        get_user_environment min_cpus_per_node wait_all_nodes selinux_context segment_size reserved_ports
        extra""".split()  # noqa: SIM905
    )

    def __init__(self, **fields: Any) -> None:
        for name in self.__slots__:
            setattr(self, name, None)
        for name, value in fields.items():
            setattr(self, name, value)

    def submit(self) -> int:
        if isinstance(self.time_limit, str) and self.time_limit.isdigit():
            raise TypeError("an integer is required")  # timestr_to_mins returns the text
        if self.signal and (name := self.signal.rpartition(":")[2].partition("@")[0]) not in dir(signals):
            raise ValueError(f"Invalid Signal: {name}.")
        if not self.script.startswith("#!"):
            raise ValueError("Not a valid Batch script.")
        count = int(self.array.partition("-")[2]) + 1 if self.array else 1
        member = 'SLURM_ARRAY_TASK_ID="$EVALSPAN_INDEX" ' if self.array else ""
        slurms = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
        variables = [f"{name}={value}" for name, value in (slurms | self.environment).items()]
        job = LocalJob(
            name=self.name,
            argv=("bash", "-c", f'exec env -i {member}"$@"', "x", *variables, "bash", "-c", self.script),
            log=self.standard_output.replace("%a", "%i").replace("%%", "%"),
            count=count,
            node=self.required_nodes,
            gpus=_gpus(self.gres_per_node),
        )
        try:
            job_id = _cluster.submit(job)
        except RefusedError as error:
            raise RPCError("Requested node configuration is not available") from error
        _submitted[job_id] = self
        return int(job_id) * MEMBERS


class Job:
    """A job as Slurm lists it; of an array, a member that has started, or all those that wait."""

    def __init__(self, job_id: int) -> None:
        self.id = job_id

    @staticmethod
    def listed(state: JobState, waiting: list[int]) -> Job:
        description, array_id = _submitted[state.job_id], int(state.job_id) * MEMBERS
        array = description.array is not None
        job = Job(array_id if waiting or not array else array_id + state.index + 1)
        job.__dict__ |= {
            "allocated_nodes": state.node,
            "array_id": array_id if array else None,
            # u32_parse takes 0 for "no value"
            "array_task_id": (state.index or None) if array and not waiting else None,
            "array_tasks_waiting": ",".join(map(str, waiting)) or None,
            "comment": description.comment,
            "end_time": None,
            "name": state.name,
            "start_time": int(state.started_at) if state.started_at else None,
            "state": state.state,
            "state_reason": state.reason or None,
            "submit_time": int(state.submitted_at or 0),
            "user_id": os.getuid(),
            "gpus": _gpus(description.gres_per_node),
        }
        return job

    def cancel(self) -> None:
        array, member = divmod(self.id, MEMBERS)
        _cluster.cancel([f"{array}_{member - 1}" if member else str(array)])

    def get_resource_layout_per_node(self) -> dict[str, dict[str, Any]]:
        gres = {"gpu:a100": {"count": self.gpus, "indexes": "0"}} if self.gpus else {}
        return {self.allocated_nodes: {"cpu_ids": "0", "gres": gres, "memory": 100}}


class Jobs(dict[int, Job]):
    """All jobs by their ids."""

    @staticmethod
    def load() -> Jobs:
        states = _cluster.jobs()
        waits = [s for s in states if _submitted[s.job_id].array and s.phase == "pending"]
        found = [Job.listed(s, []) for s in states if s not in waits]
        for job_id in {s.job_id for s in waits}:
            rest = [s for s in waits if s.job_id == job_id]
            found.append(Job.listed(rest[0], [s.index for s in rest]))
        return Jobs({job.id: job for job in found})


class Nodes(dict[str, SimpleNamespace]):
    """All nodes by their names: this machine."""

    @staticmethod
    def load() -> Nodes:
        (node,) = _cluster.nodes()
        there = SimpleNamespace(
            active_features=[],
            allocated_cpus=node.cpus - node.cpus_free,
            allocated_memory=0,
            allocated_tres={"cpu": node.cpus},
            available_features=[],
            configured_gres={"gpu:a100": node.gpus},
            idle_cpus=node.cpus_free,
            name=node.name,
            partitions=["gpu"],
            real_memory=node.memory_mb,
            reason=None,
            state="IDLE",
            total_cpus=node.cpus,
        )
        return Nodes({node.name: there})


class Partitions(dict[str, SimpleNamespace]):
    """All partitions by their names."""

    @staticmethod
    def load() -> Partitions:
        return Partitions(gpu=SimpleNamespace(is_default=True, max_time=UNLIMITED, name="gpu", state="UP"))


class _Config(SimpleNamespace):
    @staticmethod
    def load() -> _Config:
        tres = ["cpu", "mem", "energy", "node", "billing", "fs/disk", "vmem", "pages"]
        return _Config(accounting_storage_tres=tres, private_data=[])


slurmctld = SimpleNamespace(Config=_Config)


def _gpus(gres: str | None) -> int:
    return int(gres.rpartition(":")[2]) if gres else 0
