"""Options of Slurm commands from a few settings."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from coordinator.cluster.sbatch_text import SlurmOptions
from coordinator.config.schema import Config

OWN = {field.name for field in fields(SlurmOptions)}


def slurm_options(
    like: SlurmOptions | None = None, slurm: Any = None, nodes: Any = None, borrow: Any = None, **more: Any
) -> SlurmOptions:
    """Other settings for what `like` has beside them.

    `slurm`, `nodes`, `borrow`: those sections. `more`: keys of [cluster], or fields of SlurmOptions.
    """
    own = {key: value for key, value in more.items() if key in OWN}
    cluster = {key: value for key, value in more.items() if key not in OWN}
    sections = {"cluster": cluster, "slurm": slurm or {}, "nodes": nodes or {}, "borrow": borrow or {}}
    return replace(like or SlurmOptions(), settings=Config.model_validate(sections), **own)
