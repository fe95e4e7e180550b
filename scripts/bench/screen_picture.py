"""docs/pictures/screen.svg: one task's interval as it closes over its documents, of real answers.

    PYTHONPATH=scripts:. python scripts/bench/screen_picture.py > docs/pictures/screen.svg

The task is ARC-Easy's test set, answered by SmolLM2-135M-Instruct and by the same model with noise in its weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coordinator.decide.verdicts.screening import Answer, asking_order, judge_screening
from evaljobs.contract.specs import ScreenOptions

HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "docs" / "pictures"
REFERENCE, CANDIDATE = "arc_easy_test-0-1", "arc_easy_test-0.02-1"
LOOKS, MAX_DROP, SEED = 40, 0.02, 1
WIDTH, HEIGHT, LEFT, TOP, WIDE, HIGH = 560, 300, 64, 40, 470, 200
REACH = 0.08  # of the axis of differences


def answers_of(differences: np.ndarray, question: ScreenOptions) -> list[Answer]:
    """At each look, in the asking order."""
    count, order = len(differences), asking_order([0] * len(differences), SEED)
    apart = math.ceil(count / LOOKS)
    looks = [*range(apart, count, apart), count]
    return [judge_screening(differences[order[:asked]], count, question, apart=apart) for asked in looks]


def draw(said: Sequence[Answer], reference: float, style: str) -> str:
    count = said[-1].documents
    stop = next(one for one in said if one.is_settled)

    def x(asked: float) -> float:
        return LEFT + WIDE * asked / count

    def y(value: float) -> float:
        return TOP + HIGH * (REACH - min(REACH, max(-REACH, value))) / (2 * REACH)

    def line(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x(asked):.1f},{y(value):.1f}" for asked, value in points)

    band = [(one.asked, one.high) for one in said] + [(one.asked, one.low) for one in reversed(said)]
    half = (stop.high - stop.low) / 2
    score = f"{reference + stop.difference:.3f} ± {half:.3f} (screen, {stop.asked:,} of {count:,})"
    title = "One task's interval closes as its documents are asked"
    told = (
        f"ARC-Easy, {count:,} documents, max_drop {MAX_DROP}: after {stop.asked:,} documents the lower end of the interval is above "
        f"-{MAX_DROP}, so the answer is {stop.verdict}; asked further, the interval closes on the difference of the full scores, "
        f"{said[-1].difference:+.4f}."
    )
    ticks = "".join(
        f'<text class="s" x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:+.2f}</text>'
        for value in (0.08, 0.04, 0.0, -0.02, -0.04, -0.08)
    ) + "".join(
        f'<text class="s" x="{x(asked):.1f}" y="{TOP + HIGH + 18}" text-anchor="middle">{asked:,}</text>'
        for asked in (0, 500, 1000, 1500, 2000, count)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">
<title id="t">{title}</title>
<desc id="d">{told}</desc>
{style}
<rect x="0" y="0" width="{WIDTH}" height="{HEIGHT}" fill="var(--bg)"/>
<text class="h" x="{LEFT}" y="22">Candidate less reference, accuracy</text>
<rect x="{LEFT}" y="{TOP}" width="{WIDE}" height="{HIGH}" fill="var(--panel)"/>
<polygon points="{line(band)}" fill="var(--blue)" opacity="0.45"/>
<polyline points="{line([(one.asked, one.difference) for one in said])}" style="fill:none;stroke:var(--blue-ink);stroke-width:2"/>
<line x1="{LEFT}" x2="{LEFT + WIDE}" y1="{y(0):.1f}" y2="{y(0):.1f}" class="rim"/>
<line x1="{LEFT}" x2="{LEFT + WIDE}" y1="{y(-MAX_DROP):.1f}" y2="{y(-MAX_DROP):.1f}" class="dash strong"/>
<text class="s" x="{LEFT + WIDE - 6}" y="{y(-MAX_DROP) + 15:.1f}" text-anchor="end">lower by max_drop</text>
<line x1="{x(stop.asked):.1f}" x2="{x(stop.asked):.1f}" y1="{TOP}" y2="{TOP + HIGH}" class="dash"/>
<text class="s b" x="{x(stop.asked) + 6:.1f}" y="{TOP + 18}">settled: {stop.verdict}</text>
<text class="s" x="{x(stop.asked) + 6:.1f}" y="{TOP + 34}">{score}</text>
{ticks}
<text class="s" x="{LEFT + WIDE / 2}" y="{HEIGHT - 14}" text-anchor="middle">documents asked, in an order fixed by the seed</text>
</svg>"""


def main() -> None:
    answers = np.load(HERE / "answers.npz")
    reference = answers[REFERENCE].astype(float)
    said = answers_of(answers[CANDIDATE] - reference, ScreenOptions(max_drop=MAX_DROP))
    style = re.search(r"<style>.*?</style>", (PICTURES / "time.svg").read_text(), re.DOTALL)
    assert style is not None
    print(draw(said, float(reference.mean()), style[0]))


if __name__ == "__main__":
    main()
