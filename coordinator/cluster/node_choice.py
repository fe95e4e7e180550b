"""Which nodes the settings leave to evalspan, by Slurm hostlist, GPU type and feature. Pure. Called by both Slurm clusters.

Rule: offers and submissions follow one decision. An excluded node is never offered; a job that names no node avoids it
by `--exclude`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.cluster import Job, NodeState

_ENTRY = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")  # of a hostlist; commas in brackets belong to it
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def check_hostlist(text: str) -> str:
    """Return `text`; ValueError where it is no Slurm hostlist, such as "gpu[01-04,7],n1"."""
    if ",".join(_ENTRY.findall(text)) != text or not text:
        raise ValueError(f'Slurm hostlists such as "gpu[01-04],n7" (no hostlist: {text!r})')
    for ranges in re.findall(r"\[(.*?)\]", text):
        for part in ranges.split(","):
            match = _RANGE.fullmatch(part)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise ValueError(
                    f'Slurm hostlists with ranges such as "gpu[01-04,7]" (no hostlist: {text!r})'
                )
    return text


def in_hostlist(name: str, text: str) -> bool:
    """Is the node named by this hostlist? It is matched and not expanded, so that its size costs nothing."""
    return any(_fits(re.split(r"\[(.*?)\]", entry), name) for entry in _ENTRY.findall(text))


def _fits(words: Sequence[str], name: str) -> bool:
    """`words`: an entry's text and ranges in turn."""
    text, *rest = words
    if not rest:
        return name == text
    left = name.removeprefix(text)
    digits = len(left) - len(left.lstrip("0123456789"))
    return name.startswith(text) and any(
        _in_ranges(left[:end], rest[0]) and _fits(rest[1:], left[end:]) for end in range(1, digits + 1)
    )


def _in_ranges(number: str, ranges: str) -> bool:
    """Is the number in ranges such as "08-12,20"? A number has as many digits as the first of its range, or more."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        padded = number == str(int(number)).zfill(len(first))
        if padded and int(first) <= int(number) <= int(last or first):
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChoice:
    """[nodes] of the settings. Empty: no condition."""

    include: tuple[str, ...] = ()  # hostlists
    exclude: tuple[str, ...] = ()  # hostlists
    gpu_types: tuple[str, ...] = ()  # as Gres names them
    features: tuple[str, ...] = ()  # a node has them all

    def excludes(self, node: NodeState) -> str:
        """The setting that keeps evalspan off a node; "" where none does.

        A node without GPUs, as all are that only the CPU partition reaches, is subject to `exclude` alone.
        """
        if any(in_hostlist(node.name, hosts) for hosts in self.exclude):
            return "[nodes] exclude"
        if not node.gpus:
            return ""
        if self.include and not any(in_hostlist(node.name, hosts) for hosts in self.include):
            return "[nodes] include"
        types = {name.lower() for name in node.gpu_type.split("+")}
        if self.gpu_types and not types <= {name.lower() for name in self.gpu_types}:
            return "[nodes] gpu_types"
        return "" if set(self.features) <= set(node.features) else "[nodes] features"


def choose(node: NodeState, choice: NodeChoice, gpu_request: str) -> NodeState:
    """The node as the settings leave it: not usable where they exclude it, with their name as the reason.

    A `gpu_request` with {type} excludes nodes whose Gres names no type, or several.
    """
    setting = choice.excludes(node)
    if not setting and node.gpus and "{type}" in gpu_request and not _one_type(node):
        setting = "[slurm] gpu_request (its {type} needs a Gres with one)"
    return exclude(node, setting) if setting else node


def exclude(node: NodeState, setting: str) -> NodeState:
    """The node as one that this setting keeps evalspan off."""
    return replace(node, usable=False, excluded=setting, reason=node.reason or f"excluded by {setting}")


def _one_type(node: NodeState) -> bool:
    return bool(node.gpu_type) and "+" not in node.gpu_type


def place(job: Job, nodes: Sequence[NodeState]) -> Job:
    """The job with the nodes that the settings exclude, and with the type of its GPUs where that is known.

    A job that names a node goes there alone; one that names none may go to any node of its partition.
    """
    there = [n for n in nodes if job.node in (None, n.name)]
    types = (n.gpu_type for n in there if not n.excluded and n.gpus >= job.gpus and _one_type(n))
    excluded = [n.name for n in nodes if n.excluded] if job.node is None else []
    both = tuple(dict.fromkeys([*job.exclude, *excluded]))
    return replace(job, exclude=both, gpu_type=next(types, "") if job.gpus else "")
