"""Nodes that the settings allow, by Slurm hostlist, GPU type and feature; and descriptions of unusable ones. Pure.

Rule: offers and submissions follow one decision. An excluded node is never offered; a job that names no node avoids it by
`--exclude`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from coordinator.base.words import first_of
from coordinator.site.cluster import Job, NodeState, nodes_of
from coordinator.site.config.checks import HOSTLIST_ENTRY
from coordinator.site.config.schema import Config, NodesConfig

MOST_NODES = 8  # named per state


def in_hostlist(name: str, text: str) -> bool:
    """Return whether this hostlist names the node. It is matched, not expanded, so that its size costs nothing."""
    return any(_fits(re.split(r"\[(.*?)\]", entry), name) for entry in HOSTLIST_ENTRY.findall(text))


def _fits(words: Sequence[str], name: str) -> bool:
    """Match a name against an entry's text and ranges, alternating in `words`."""
    text, *rest = words
    if not rest:
        return name == text
    left = name.removeprefix(text)
    digits = len(left) - len(left.lstrip("0123456789"))
    return name.startswith(text) and any(
        _in_ranges(left[:end], rest[0]) and _fits(rest[1:], left[end:]) for end in range(1, digits + 1)
    )


def _in_ranges(number: str, ranges: str) -> bool:
    """Return whether a number is in ranges such as "08-12,20". It has at least as many digits as the first of its range."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        padded = number == str(int(number)).zfill(len(first))
        if padded and int(first) <= int(number) <= int(last or first):
            return True
    return False


def _excluding(node: NodeState, nodes: NodesConfig) -> str:
    """Return the setting that keeps evalspan off a node; "" if none does.

    Only `exclude_node` applies to nodes without GPUs, including all that only the CPU partition reaches.
    """
    if any(in_hostlist(node.name, hosts) for hosts in nodes.exclude):
        return "[nodes] exclude"
    if not node.gpus:
        return ""
    if nodes.include and not any(in_hostlist(node.name, hosts) for hosts in nodes.include):
        return "[nodes] include"
    types = {name.lower() for name in node.gpu_type.split("+")}
    if nodes.gpu_types and not types <= {name.lower() for name in nodes.gpu_types}:
        return "[nodes] gpu_types"
    return "" if set(nodes.features) <= set(node.features) else "[nodes] features"


def apply_node_settings(node: NodeState, settings: Config) -> NodeState:
    """Return the node as the settings leave it: unusable if they exclude it, with their name as the reason.

    A GPU request with {type} excludes nodes whose Gres names no type, or several.
    """
    setting = _excluding(node, settings.nodes)
    if not setting and node.gpus and "{type}" in settings.slurm.gpu_request and not _one_type(node):
        setting = "[slurm] gpu_request (its {type} needs a Gres with one)"
    return exclude_node(node, setting) if setting else node


def exclude_node(node: NodeState, setting: str) -> NodeState:
    return replace(node, usable=False, excluded=setting, reason=node.reason or f"excluded by {setting}")


def _one_type(node: NodeState) -> bool:
    return bool(node.gpu_type) and "+" not in node.gpu_type


def place_job(job: Job, nodes: Sequence[NodeState]) -> Job:
    """Return the job without the nodes that the settings exclude, and with its GPU type if known.

    A job that names a node only runs there; one that names none may run on any node of its partition.
    """
    named = nodes_of(job)
    there = [n for n in nodes if n.name in named or not named]
    types = (n.gpu_type for n in there if not n.excluded and n.gpus >= job.gpus and _one_type(n))
    excluded = [n.name for n in nodes if n.excluded] if not named else []
    both = tuple(dict.fromkeys([*job.exclude, *excluded]))
    return replace(job, exclude=both, gpu_type=next(types, "") if job.gpus else "")


# --- descriptions for `status`, `doctor` and refusals
# ------------------------------------------------------------------------


def describe_unusable(nodes: Sequence[NodeState]) -> str:
    """Describe the nodes that accept no job, by state and the admin's reason: "n1, n2 are drained (new driver)"."""
    found: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if not node.usable:
            found.setdefault((node.state, node.reason), []).append(node.name)
    said = []
    for (state, reason), names in found.items():
        shown, verb = first_of(names, MOST_NODES), "are" if len(names) > 1 else "is"
        said.append(f"{shown} {verb} {state}{f' ({reason})' if reason else ''}")
    return "; ".join(said)


def none_left(nodes: Sequence[NodeState]) -> str:
    """Return the settings that exclude every node with GPUs, and what those nodes have; "" if a node is left."""
    nodes = [n for n in nodes if n.gpus]
    if not nodes or not all(n.excluded for n in nodes):
        return ""
    settings = list(dict.fromkeys(n.excluded for n in nodes))
    has = [f"{n.name} ({', '.join((n.gpu_type or 'a Gres without type', *n.features))})" for n in nodes]
    verb = "leave" if len(settings) > 1 else "leaves"
    return f"{' and '.join(settings)} {verb} no node with GPUs; the cluster has {first_of(has, MOST_NODES)}"


def none_usable(nodes: Sequence[NodeState]) -> str:
    """Return why no job can start on a GPU now; "" if a node with GPUs accepts jobs."""
    gpu_nodes = [n for n in nodes if n.gpus]
    if not gpu_nodes or any(n.usable for n in gpu_nodes):
        return ""
    return f"no node with GPUs can be used now: {describe_unusable(gpu_nodes)}"


def gpus_in_words(nodes: Sequence[NodeState], own: int) -> str:
    """Return why no GPU is free: unusable nodes, and used GPUs. "" if no node has GPUs.

    `own`: GPUs used by this work folder's trials.
    """
    nodes = [n for n in nodes if n.gpus]
    total = sum(n.gpus for n in nodes if n.usable)
    used = total - sum(n.gpus_free for n in nodes if n.usable)
    of_ours = f", {own} of them by evalspan" if own else ""
    said = (f"{used} of {total} GPUs are used{of_ours}" if total else "", describe_unusable(nodes))
    return "; ".join(filter(None, said))
