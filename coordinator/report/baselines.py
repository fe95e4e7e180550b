"""Which evaluation a gate compares with: the checkpoint before, the best one so far, or a named one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from coordinator.errors import OperatorError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.report.learning_curves import Point, ScoreValue, make_series
from coordinator.report.load_series import find_series


def baseline_of(
    work_dir: Path, record: EvaluationRecord, name: str, counts: Callable[[ScoreValue], bool], *, dense: bool
) -> str:
    """The id of the baseline `name`: "previous" or "best" of the earlier checkpoints of the training, or an id itself.

    `counts`: whether a score counts for "best", the highest mean; `dense`: dense signals are asked, too. OperatorError where
    there is no earlier checkpoint.
    """
    if name not in ("previous", "best"):
        return name
    folder = str(Path(record.checkpoint.announced).parent)
    dense = dense and name == "best"
    points = make_series(find_series(work_dir, folder, record.suite.name, mixed=True, dense=dense)).points
    earlier = _before(points, record.evaluation_id)
    if not earlier:
        raise OperatorError(
            f"{record.evaluation_id} is the first checkpoint of {folder} with scores, so it has no {name} one: "
            "name a baseline by --baseline ID"
        )
    return (earlier[-1] if name == "previous" else max(earlier, key=lambda p: _mean(p, counts))).evaluation_id


def _before(points: Sequence[Point], evaluation_id: str) -> list[Point]:
    names = [point.evaluation_id for point in points]
    place = names.index(evaluation_id) if evaluation_id in names else 0
    return [point for point in points[:place] if point.scores]


def _mean(point: Point, counts: Callable[[ScoreValue], bool]) -> float:
    return fmean([s.value if s.higher_is_better else -s.value for s in point.scores if counts(s)] or [0.0])
