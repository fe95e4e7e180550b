"""Whether two evaluations asked and scored a task alike: by the request digests and score keys that results.json carries. Pure.

Rule: a group is asked alike where all of its tasks are. Results of versions that kept no keys are taken as alike.
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
MARK = "~"  # beside a value that is not comparable with the one that it stands next to


def keys_of(results: Mapping[str, Any], task: str) -> tuple[str, str]:
    """(requests, score) of a task or group; empty where there are none."""
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
    """What differs between two pairs of keys; nothing where one is not known."""
    if before[0] and after[0] and before[0] != after[0]:
        return "requests"
    if before[1] and after[1] and before[1] != after[1]:
        return "score"
    return ""
