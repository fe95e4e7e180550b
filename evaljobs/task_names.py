"""Which task names lm-eval knows, for a coordinator that does not import it.

Rule: the answer is one line of JSON on stdout, {"known": [...], "unknown": {name: [nearest, …]}, "unfit": {name: why}}.
lm-eval's own tasks, with their YAML files, are cached by its version: its index takes seconds to read.
It does not know: suites, or whether a task's data are there.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from evaljobs import conversations, harness
from evaljobs.files import write_atomic
from evaljobs.paths import shipped_index


def main(include_path: Sequence[str], names: Sequence[str], cache: Path | None, *, chat: bool) -> int:
    harness.quiet_environment(offline=True)
    os.environ["LMEVAL_LOG_LEVEL"] = "ERROR"
    unknown: dict[str, list[str]] = {}
    own: list[str] = []
    unfit: dict[str, str] = {}
    if include_path:
        own = list(harness.folder_names(include_path))
        told = harness.folder_configs(include_path, names)  # only tasks of one's own have turns
        unfit = {name: why for name, said in told.items() if (why := conversations.unfit(said, chat=chat))}
    if any(name not in own for name in names):
        unknown = harness.unknown_tasks(names, [*own, *default_names(cache)])
    answer = {"known": [n for n in names if n not in unknown], "unknown": unknown, "unfit": unfit}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def default_names(cache: Path | None) -> list[str]:
    """Names of lm-eval's own tasks, groups and tags, from the cache folder where it has them for this version."""
    version = importlib.metadata.version("lm_eval")
    place = None if cache is None else shipped_index(cache, version)
    if place is not None and place.exists():
        return list(json.loads(place.read_text()))
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    index = {
        name: [
            str(entry.yaml_path) if entry.yaml_path else None,
            sorted(entry.tags) if not entry.yaml_path else [],
        ]
        for name, entry in TaskManager().task_index.items()
    }
    if place is not None:
        with contextlib.suppress(OSError):  # a full disk: they are read again next time
            write_atomic(place, json.dumps(index).encode())
    return list(index)
