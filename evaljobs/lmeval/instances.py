"""Digest of lm-eval's instances, equal if a rebuilt task has the answered prompts.

Rule: a build and a score digest lm-eval's own instances, per kind of request and in build order,
with the later messages of conversations. Called from `requests.build`, `replay_model` and
`scoring.collect_programs`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from evaljobs.errors import OperatorError
from evaljobs.lmeval.conversations import messages_of


def instances_digest(instances: Iterable[Any], follow_up: str = "") -> dict[str, str]:
    """Kind of request -> sha256 over documents, places, repeats and arguments. Repeats count once.

    `follow_up`: the documents' column with the messages after the first answer, digested, too.
    """
    digests: dict[str, Any] = {}
    last: Any = None
    for instance in instances:
        if instance is last:
            continue
        last = instance
        what = [instance.doc_id, instance.idx, instance.repeats, instance.args]
        if follow_up:
            what.append(messages_of(instance.doc, follow_up))
        try:
            line = json.dumps(what, sort_keys=True)
        except TypeError as error:
            raise OperatorError(f"task {instance.task_name} asks with more than text: {error}") from error
        digests.setdefault(instance.request_type, hashlib.sha256()).update(line.encode() + b"\n")
    return {kind: digest.hexdigest() for kind, digest in digests.items()}
