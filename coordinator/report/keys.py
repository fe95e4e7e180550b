"""Compares the request digests and score keys in two results.json: are scores comparable? Pure.

Rule: a group's requests are the same where those of all its tasks are. Results without keys (of
earlier versions) count as comparable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Difference = Literal["", "requests", "score"]
WHAT: Mapping[str, str] = {
    "requests": "was asked with other prompts or settings",
    "score": "was scored in another way (gold answers, filters or metrics)",
}
MARK = "~"  # stands beside a value that is not comparable with its neighbour


def keys_of(results: Mapping[str, Any], task: str) -> tuple[str, str]:
    """(request digest, score key) of a task or group; "" where results.json has none."""
    keys = results.get("evalspan", {}).get("keys", {})
    leaves = sorted(set(_leaves(results.get("group_subtasks", {}), task, frozenset())))
    if not leaves or any(leaf not in keys for leaf in leaves):
        return "", ""
    parts = [(keys[leaf].get("requests", ""), keys[leaf].get("score", "")) for leaf in leaves]
    if len(parts) == 1:
        return parts[0]
    requests, score = ("".join(part) for part in zip(*parts, strict=True))
    return hashlib.sha256(requests.encode()).hexdigest(), hashlib.sha256(score.encode()).hexdigest()


def _leaves(groups: Mapping[str, Any], name: str, seen: frozenset[str]) -> Iterator[str]:
    members = groups.get(name) or ()
    if not members or name in seen:
        yield name
        return
    for member in members:
        yield from _leaves(groups, member, seen | {name})


def difference(before: tuple[str, str], after: tuple[str, str]) -> Difference:
    """What differs between two pairs of keys; None where one is unknown."""
    if before[0] and after[0] and before[0] != after[0]:
        return "requests"
    if before[1] and after[1] and before[1] != after[1]:
        return "score"
    return ""
