"""How an ordinary user comes to see a repository, a venv and its interpreter that lie below 0700 folders.

Rule: pure. A venv's interpreter often lies in /root/.pyenv, a fresh clone in a `mktemp -d`: both 0700. Opening those
would change the machine. Instead each node, and the submit side, has a mount namespace in which the closed folder is
covered by an empty tmpfs that holds bind mounts of the needed paths alone, at their own names. So shebangs, run paths of
shared libraries and `sys.executable` hold unchanged, and no process outside the cluster sees a difference.
Groups and ACLs are not looked at: a folder counts as open when every user may enter it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """`source` shall be visible to every user at `target` (both absolute, without links)."""

    source: Path
    target: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """One bind mount; `by_entry` where the folder itself is closed, so its entries are bound one by one."""

    source: Path
    target: Path
    by_entry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewPlan:
    masks: tuple[Path, ...]
    binds: tuple[Bind, ...]


def closed_ancestor(path: Path, is_open: Callable[[Path], bool]) -> Path | None:
    """The topmost of `path` and its parents that some user may not enter."""
    return next((folder for folder in [*reversed(path.parents), path] if not is_open(folder)), None)


def plan_view(exposures: Iterable[Exposure], is_open: Callable[[Path], bool]) -> ViewPlan:
    """Masks and binds that make every exposure visible; empty where all is visible already.

    A path below a mask that some other exposure needs is bound too, because the mask would hide it.
    """
    wanted = sorted(set(exposures), key=lambda e: (len(e.target.parts), str(e.target)))
    masks = {mask for e in wanted if (mask := closed_ancestor(e.target, is_open)) is not None}
    # A mask below another mask would cover what the upper one has shown.
    top = {mask for mask in masks if masks.isdisjoint(mask.parents)}
    binds = [
        Bind(source=e.source, target=e.target, by_entry=not is_open(e.source))
        for e in wanted
        if e.source != e.target or not top.isdisjoint([e.target, *e.target.parents])
    ]
    return ViewPlan(masks=tuple(sorted(top)), binds=tuple(binds))
