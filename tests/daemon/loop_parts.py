"""A coordinator on a cluster of plain values with a Redis of its own, and a small disk to fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.allocation.allocate import Limits
from coordinator.cluster.fake import FakeCluster
from coordinator.evaluation.job_specs import Site
from coordinator.intake.from_settings import own_version
from coordinator.runtime.detect import Grace
from coordinator.runtime.effects import Performer
from coordinator.runtime.loop import Coordinator, Pace
from coordinator.services.redis_server import RedisServer
from evaljobs.contract.paths import WorkPaths


def small_disk(tmp_path: Path) -> Iterator[Path]:
    """16 MB and 400 names, mounted by root; elsewhere the test is skipped."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=400", "none", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted: {made.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def coordinator_on(work: Path, cluster: FakeCluster) -> Coordinator:
    site = Site(work_dir=str(work), trial_command=("python",), worker_command=("python",))
    return Coordinator(
        performer=Performer(site=site, cluster=cluster, lm_eval_version=own_version, observations=work / "o"),
        cluster=cluster,
        keeper=RedisServer(WorkPaths(work)),
        limits=Limits(),
        pace=Pace(tick=0.0, jobs=0.0, nodes=0.0, redis=0.1),
        grace=Grace(),
    )


def fill(disk: Path) -> Path:
    """A file that leaves not a byte."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def no_room_for_an_event(journal: Path) -> None:
    """Fill a journal's last page with blanks: on a full disk it has no room for an event then."""
    with journal.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b" " * (-journal.stat().st_size % 4096) + b"\n")
