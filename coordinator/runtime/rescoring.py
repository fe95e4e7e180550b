"""Scoring stored answers again: the record of an evaluation without a model, and the checks before it begins.

Rule: the answers are those of an ended evaluation, the parent. Checkpoint, model options and cuts are the parent's; suite,
data and judge are current. A leaf task is scored again only if its request digest equals the parent's and all of its answers
exist. The checkpoint may be gone: only its tokenizer and config are read. Called from `coordinator.api`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from coordinator.base.words import first_of
from coordinator.decide.evaluation.records import EvaluationRecord, Inputs, cut_of, cut_on_disk, evaluation_id
from coordinator.errors import OperatorError
from coordinator.intake import from_settings, request_sets
from coordinator.intake.checkpoint import CheckpointError, inspect_checkpoint
from coordinator.runtime.reuse import EarlierEvaluation, answered_leaf
from coordinator.site.config.schema import Config
from evaljobs.contract.specs import ModelOptions, RequestSetManifest, SuiteSpec, TaskEntry

# settings of tasks and suites that decide the requests
OF_TASKS = ("num_fewshot", "limit", "gen_kwargs", "samples", "metadata")
OF_SUITES = ("seed", "apply_chat_template", "system_instruction", "fewshot_as_multiturn")


def rescoring_record(
    settings: Config,
    parent: EarlierEvaluation,
    suite: SuiteSpec | None,
    inputs: Callable[[SuiteSpec, ModelOptions], Inputs],
    tokenizer: str | None,
) -> EvaluationRecord:
    """Return the evaluation that scores the answers of `parent` with `suite`, by default its own. Raise OperatorError.

    `tokenizer`: folder with the checkpoint's config and tokenizer; None: the checkpoint's own.
    """
    before = parent.record
    if before.screening is not None:
        raise OperatorError(
            f"{before.evaluation_id} is a screen evaluation: not all of its documents have answers to score again"
        )
    try:
        files = inspect_checkpoint(tokenizer or before.checkpoint.source, weights=False)
    except CheckpointError as error:
        more = "" if tokenizer else "; --tokenizer names a folder with the same config and tokenizer"
        raise OperatorError(f"{error}{more}") from error
    announced = before.checkpoint.announced
    converted = announced if announced != files.source else None
    checkpoint = before.checkpoint.model_copy(
        update={"source": files.source, "files": files.files, "converted_from": converted}
    )
    suite = suite or before.suite
    sizes = {task.name: task.batch_size for task in before.suite.tasks}
    tasks = tuple(t.model_copy(update={"batch_size": sizes.get(t.name)}) for t in suite.tasks)
    cut = {key: parent.said.get(key) for key in ("batch_size", "token_budget")}
    suite = suite.model_copy(update={"tasks": tasks, "mode": before.suite.mode, "screen": None, **cut})
    judge = from_settings.judge_for(settings, suite)
    made_of = inputs(suite, before.model).model_copy(update={"parent": before.evaluation_id})
    return EvaluationRecord(
        evaluation_id=evaluation_id(checkpoint, suite, before.model, judge, made_of),
        checkpoint=checkpoint,
        suite=suite,
        model=before.model,
        options=from_settings.run_options(settings).model_copy(update={"max_trials": 0}),
        inputs=made_of,
        judge=judge,
        not_asked=tuple(task.name for task in suite.tasks if task.name in before.not_asked),
        accepted_at=time.time(),
    )


def check_answers(suite: SuiteSpec, parent: EarlierEvaluation, sets: Mapping[str, Mapping[str, str]]) -> None:
    """Raise OperatorError if `parent` has no answers to a request set. `sets`: entry -> {leaf task: folder}."""
    parent.read()
    why = {}
    for index, task in enumerate(suite.tasks):
        if task.name in parent.record.not_asked:
            continue
        cut = cut_of(suite, index, suite.batch_size, suite.token_budget)
        on_disk = dict.fromkeys(sets[task.name], cut_on_disk(cut, suite.batch_size))
        for leaf, (manifest, batches) in request_sets.read_request_sets(sets[task.name], on_disk).items():
            if answered_leaf(parent, manifest, batches, cut) is None:
                why[leaf] = _why(suite, task, manifest, parent)
    if why:
        leaf = min(why)
        also = f" (also refused: {first_of(sorted(why.keys() - {leaf}))})" if len(why) > 1 else ""
        raise OperatorError(f"{leaf}: {why[leaf]}{also}; `evalspan eval` asks the model")


def _why(suite: SuiteSpec, task: TaskEntry, manifest: RequestSetManifest, parent: EarlierEvaluation) -> str:
    """Return which key of a leaf task differs, and the settings that make it differ."""
    name, its = parent.record.evaluation_id, parent.said["keys"].get(manifest.task)
    if its is None:
        return f"{name} did not ask it; it asked {first_of(sorted(parent.said['keys']))}"
    if its.get("requests") == manifest.key:
        return f"its answers in {name} are not whole, or were removed"
    if its.get("asks") == manifest.asks:
        return f"its request digest is not that of {name}: other versions of the engine, or another tokenizer"
    before = next((t for t in parent.record.suite.tasks if t.name == task.name), None)
    pairs = [(key, getattr(before, key, None), getattr(task, key)) for key in OF_TASKS]
    pairs += [(key, getattr(parent.record.suite, key), getattr(suite, key)) for key in OF_SUITES]
    changed = [f"{key} is {now!r}, not {was!r}" for key, was, now in pairs if was != now]
    return f"its requests are not those of {name} ({', '.join(changed) or 'other prompts or documents'})"
