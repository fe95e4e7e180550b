"""Collects the programs and asks of a task's metric without running or sending them.

Rule: the task's own filters and metric run on its answers, with seams that answer "failed" to
everything. Called from `score`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from evaljobs.errors import one_line
from evaljobs.judges.judgement import Ask, Reply
from evaljobs.lmeval import hooks, replay_model
from evaljobs.lmeval.result_keys import instances_digest
from evaljobs.lmeval.task_errors import TASK_EXCEPTIONS
from evaljobs.sandbox.code_eval import CodeEval
from evaljobs.sandbox.records import Program, Verdict
from evaljobs.scoring.item_deadlines import Items


@dataclass(slots=True)
class RecordedPrograms:
    """Programs by key, asks by document, and documents whose metric raised, with the reason."""

    programs: dict[str, Program] = field(default_factory=dict)
    asks: dict[str, list[Ask]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    document: str = ""  # whose metric runs

    def note(self, programs: list[Program]) -> list[Verdict]:
        self.programs |= {program.id: program for program in programs}
        return [Verdict(id=p.id, verdict="fail", seconds=0.0, isolation="none") for p in programs]

    def note_asks(self, asks: Sequence[Ask]) -> list[Reply]:
        self.asks.setdefault(self.document, []).extend(asks)
        return [Reply(value=None, error="not asked yet") for _ in asks]


def record_programs(
    task: Any, leaf: replay_model.Answers, documents: Sequence[int], items: Items
) -> RecordedPrograms:
    """Run a task's filters and metric on its answers, and record the programs and asks.

    Filters only see the given documents. One that looks across documents may later need other programs; the score job runs
    those.
    """
    if instances_digest(task.instances, leaf.head.follow_up) != leaf.head.digests:
        raise replay_model.OtherPromptsError(leaf.head.task, "it asks other prompts than those answered")
    recorded = RecordedPrograms()
    by_document = _answered(task, leaf, set(documents))
    chosen = [instance for instances in by_document.values() for instance in instances]
    with (
        hooks.SEAM.answering(CodeEval(recorded.note).compute),
        hooks.JUDGES.answering(recorded.note_asks),
    ):
        for ensemble in task._filters:  # noqa: SLF001 (evaluate() does the same on the whole list)
            ensemble.apply(chosen)
        for document, instances in by_document.items():
            recorded.document = str(document)
            instances.sort(key=lambda instance: instance.idx)
            item = (leaf.head.task, document)
            items.take(item)
            for name in instances[0].filtered_resps:
                results = [i.filtered_resps[name] for i in instances]
                metric = functools.partial(task.process_results, instances[0].doc, results)
                try:
                    items.value(item, metric)
                except TASK_EXCEPTIONS as error:  # the score will raise it again, with the real verdicts
                    recorded.failed[str(document)] = one_line(error)
            if item in items.failed:
                recorded.failed[str(document)] = items.failed[item]
        items.clear()
    return recorded


def _answered(task: Any, leaf: replay_model.Answers, documents: Collection[int]) -> dict[int, list[Any]]:
    """Return the given documents' instances with their responses, by document in build order."""
    chosen: dict[int, list[Any]] = {}
    index = 0
    for instance in task.instances:
        places = range(index, index + int(instance.repeats or 1))
        index = places.stop
        if instance.doc_id not in documents:
            continue
        if not all(replay_model.has_answer(leaf.answers, place) for place in places):
            raise replay_model.ReplayError(f"document {instance.doc_id} of {leaf.head.task} lacks responses")
        instance.resps = [leaf.answers[place] for place in places]
        chosen.setdefault(instance.doc_id, []).append(instance)
    return chosen
