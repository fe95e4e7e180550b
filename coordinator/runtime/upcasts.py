"""What makes an event of an earlier journal format one of the next, so that an upgrade goes on with open evaluations.

Rule: a change of `JOURNAL_FORMAT` from N to N + 1 adds the function for N, and a history of N stays in
tests/golden/histories. The function takes an event of any kind as the JSON object that N wrote, and returns that of N + 1;
where fields with a default were added, `keep_unchanged` is enough. A release reads what the release before it wrote; functions
for earlier formats may go. Called from: `journal`, which alone sets `journal_format`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Line = dict[str, Any]


def keep_unchanged(event: Line) -> Line:
    return event


UPCASTS: Mapping[int, Callable[[Line], Line]] = {
    9: keep_unchanged,  # 10: pauses, priorities that fall, tasks that are asked at some checkpoints alone, screens, samples
}
