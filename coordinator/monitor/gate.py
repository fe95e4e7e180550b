"""Holds an evaluation against the rules of a policy file: for `evalspan gate`, and for the daemon's news of an end."""

from __future__ import annotations

from pathlib import Path

from coordinator.config import toml
from coordinator.config.schema import Config
from coordinator.report.baselines import baseline_of
from coordinator.report.learning_curves import ScoreValue
from coordinator.report.sampling import compared
from coordinator.runtime.summaries import find_record
from coordinator.verdicts.gate import Policy, Ruling, is_named, judge
from evaljobs.contract.columns import SIGNALS


def read_policy(file: Path) -> Policy:
    """OperatorError where it is no policy."""
    data, text = toml.read(file)
    return toml.check(Policy, data, toml.in_file(file, text))


def gate(
    settings: Config, evaluation: str, policy: Policy, baseline: str | None = None, *, mixed: bool = False
) -> tuple[list[Ruling], list[str]]:
    """Rulings, and the ids of baseline and evaluation. `baseline`: in place of the policy's.

    OperatorError where there is none, or a rule names no score.
    """
    record, _ = find_record(settings, evaluation)

    def counts(score: ScoreValue) -> bool:
        return any(is_named(rule, score.task, f"{score.metric},{score.filter}") for rule in policy.rule)

    dense = any((rule.metric or "").partition(",")[0] in SIGNALS for rule in policy.rule)
    against = baseline_of(settings.work_dir, record, baseline or policy.baseline, counts, dense=dense)
    ids = [find_record(settings, name)[0].evaluation_id for name in (against, evaluation)]
    _, rows, _ = compared(settings.work_dir, ids, mixed=mixed, dense=dense)
    return judge(policy, rows), ids
