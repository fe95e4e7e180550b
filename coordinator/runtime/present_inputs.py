"""Which evaluation a checkpoint and its settings mean now, given the inputs that earlier evaluations used.

Rule: what is known before a build names an evaluation. An ended evaluation of that name is current only if nothing has
changed that its builds or its scoring used; otherwise its scores are of other inputs, and the new evaluation's name includes
what has changed. An open one continues. Called from `coordinator.api` and `runtime.service`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping

from coordinator.base.listing import entries_with_prefix
from coordinator.decide.evaluation.job_specs import Site
from coordinator.decide.evaluation.records import EvaluationRecord, Inputs, evaluation_id
from coordinator.intake import resubmit
from coordinator.intake.source_keys import Present
from coordinator.runtime.screens import with_reference
from coordinator.runtime.summary import read_ended_summary, read_evaluation
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.lmeval.shown_inputs import rows_in_words

Shown = Mapping[str, Mapping[str, str]]  # "build" and "score" -> rows


def record_as_of_now(record: EvaluationRecord, site: Site) -> EvaluationRecord:
    """Return the record under the id that its inputs have now. Raise RetryError if the trials' interpreter does not answer."""
    record, present = with_reference(record, site.paths), Present(site)
    seen: dict[str, set[str]] = {"build": set(), "score": set()}
    while True:
        shown = _shown_by(site.paths.evaluation(record.evaluation_id))
        if shown is None or not _changed(shown, present):
            return record
        for part in seen:
            seen[part] |= shown.get(part, {}).keys()
        now = {p: present.digests(sorted(paths), of_build=p == "build") for p, paths in seen.items()}
        digest = hashlib.sha256(json.dumps(now, sort_keys=True).encode()).hexdigest()[:16]
        named = _named(record, record.inputs.model_copy(update={"shown": digest}))
        if named.evaluation_id == record.evaluation_id:
            return record  # it was made for exactly this state; a node sees some file differently
        record = named


def without_reuse(record: EvaluationRecord, site: Site) -> EvaluationRecord:
    """Return the record of an evaluation that reuses nothing."""
    record = with_reference(record, site.paths)
    return _named(record, record.inputs.model_copy(update={"fresh": f"{record.accepted_at:.3f}"}))


def _named(record: EvaluationRecord, inputs: Inputs) -> EvaluationRecord:
    name = evaluation_id(record.checkpoint, record.suite, record.model, record.judge, inputs)
    return record.model_copy(update={"inputs": inputs, "evaluation_id": name})


def changed_since(record: EvaluationRecord, site: Site) -> str:
    """Return what has changed since the last evaluation of this checkpoint's folder on this suite; "" if nothing."""
    work, name = site.paths, record.evaluation_id.rpartition("-")[0]
    records = (
        read_evaluation(EvaluationPaths(folder)) for folder in entries_with_prefix(work.root, f"{name}-")
    )
    place, suite = record.checkpoint.announced, record.suite.name
    alike = [r for r in records if r is not None and (r.checkpoint.announced, r.suite.name) == (place, suite)]
    if not alike:
        return ""
    before = max(alike, key=lambda r: r.accepted_at)
    shown = _shown_by(work.evaluation(before.evaluation_id)) or {}
    return resubmit.remade_message(before, record, list(map(rows_in_words, _changed(shown, Present(site)))))


def _shown_by(paths: EvaluationPaths) -> Shown | None:
    """Return what an ended evaluation used; None if it is open or missing."""
    if read_ended_summary(paths) is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        found: Shown = json.loads(paths.results.read_bytes()).get("evalspan", {}).get("shown", {})
        return found
    return None


def _changed(shown: Shown, present: Present) -> list[str]:
    return [p for part, rows in shown.items() for p in present.changed(rows, of_build=part == "build")]
