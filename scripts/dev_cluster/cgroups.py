"""What Slurm's cgroup plugins leave on the machine when their nodes are ended by SIGKILL."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def remove(nodes: Sequence[str]) -> None:
    """Remove the groups of these nodes, those inside first. A group with a living process stays."""
    for node in nodes:
        for top in [
            *ROOT.glob(f"*/slurm_{node}"),
            *ROOT.glob(f"slurm_{node}"),
            *ROOT.glob(f"*/{node}_slurmstepd.scope"),
        ]:
            for folder in sorted([top, *(f for f in top.rglob("*") if f.is_dir())], reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
