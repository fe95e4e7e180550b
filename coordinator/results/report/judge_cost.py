"""Judgements, tokens and cost of a judge, by task. Pure. Called by `finalize` for the report.

Rule: sums over the judgements on disk. A judgement that another evaluation paid for costs nothing here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from evaljobs.contract.specs import JudgeConfig, Record
from evaljobs.judges.judgement import Judgement

MILLION = 1e6


class JudgeTask(Record):
    """Judgements of one task. Tokens: reported by the endpoint for this evaluation's requests."""

    judgements: int = 0
    missing: int = 0  # items without a judgement
    reused: int = 0  # judgements paid for by another evaluation
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0  # in the currency of the prices


class JudgeUse(Record):
    """The judge of an evaluation. `cost` is 0 if the settings give no prices."""

    model: str
    priced: bool
    cost: float
    max_cost: float | None
    tasks: dict[str, JudgeTask]


def judge_use(
    options: JudgeConfig, judgements: Iterable[Judgement], task_of: Mapping[str, str], evaluation: str
) -> JudgeUse:
    """Sum up a judge's work. `task_of`: metric job -> task. Judgements of unknown jobs count as "other"."""
    by_task: defaultdict[str, list[Judgement]] = defaultdict(list)
    for judgement in judgements:
        by_task[task_of.get(judgement.job, "other")].append(judgement)
    tasks = {task: _sum(by_task[task], evaluation) for task in sorted(by_task)}
    return JudgeUse(
        model=options.model,
        priced=bool(options.price_per_million_prompt_tokens or options.price_per_million_completion_tokens),
        cost=sum(task.cost for task in tasks.values()),
        max_cost=options.max_cost,
        tasks=tasks,
    )


def _sum(judgements: Iterable[Judgement], evaluation: str) -> JudgeTask:
    all_of_it = list(judgements)
    own = [j for j in all_of_it if j.evaluation == evaluation]
    return JudgeTask(
        judgements=sum(j.answer is not None for j in all_of_it),
        missing=sum(j.answer is None for j in all_of_it),
        reused=len(all_of_it) - len(own),
        prompt_tokens=sum(j.prompt_tokens or 0 for j in own),
        completion_tokens=sum(j.completion_tokens or 0 for j in own),
        cost=sum(j.cost_millionths for j in own) / MILLION,
    )
