"""Screening on real answers: GPU seconds over a full evaluation, false verdicts, verdicts missed, and what intervals hold.

Answers are those of SmolLM2-135M-Instruct at several noises of its weights (`answers.npz`, made by `scripts/bench/answers.py`). A data
set of N documents of the portfolio is N documents drawn from a real pair of checkpoints, then answers at random turned wrong
(or right) until the drop is the one asked for. The truth is the difference of the full scores; `full` is the verdict of a gate on all
documents. Looks come after each shard, LOOKS of them a data set.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from bench.harness import Options, command, option, row, say, targets
from bench.portfolio import instance_text
from coordinator.decide.planning.instance import parse_instance
from coordinator.decide.verdicts.paired import ALPHA, Paired, confidence_interval
from coordinator.decide.verdicts.screening import EXPECTED_FLIPS, documents_needed, judge_screening
from evaljobs.contract.specs import ScreenOptions

HERE = Path(__file__).parent
DROPS = (0.0, 0.01, 0.02, 0.05)
LOOKS = 20
Rows = Iterator[dict[str, Any]]
# largest share of the portfolio's seconds that screening may take, by drop
GOALS = {0.0: 0.4, 0.05: 0.25}


def pairs_of(file: Path) -> dict[str, Any]:
    """Name -> differences of a pair of checkpoints, by document; the least of each set's pairs is the first."""
    answers = np.load(file)
    found = {}
    for name in answers.files:
        task, noise, _ = name.rsplit("-", 2)
        if float(noise):
            found[f"{task}, noise {noise}"] = answers[name].astype(float) - answers[f"{task}-0-1"]
    return found


def drawn(rng: Any, pair: Any, count: int, drop: float) -> Any:
    """Differences of `count` documents of a real pair, of which as many more are lost or gained as make the drop."""
    values = rng.choice(pair, count)
    missing = round(-drop * count - values.sum())
    same = np.flatnonzero(values == 0)
    values[rng.choice(same, min(abs(missing), len(same)), replace=False)] = np.sign(missing)
    return values


def screened(values: Any, question: ScreenOptions, looks: int) -> tuple[str, int, bool, bool]:
    """(verdict, documents asked, does the interval hold the truth then?, and at each look?) in the order of `values`."""
    count, truth = len(values), values.mean()
    apart = math.ceil(count / looks)
    held, first = True, None
    for asked in [*range(apart, count, apart), count]:
        said = judge_screening(values[:asked], count, question, apart=apart)
        over = said.low - 1e-12 <= truth <= said.high + 1e-12
        held &= over
        if first is None and said.is_settled:
            first = said.verdict, asked, over
    assert first is not None
    return *first, held


def regressed(values: Any, max_drop: float) -> bool:
    """Whether a gate on all documents says "regression"."""
    count, mean = len(values), float(values.mean())
    lost, gained = int((values < 0).sum()), int((values > 0).sum())
    variance = float(values.var(ddof=1)) / count
    one = Paired(count, mean, variance, count - 1.0, 1.0, gained, lost)
    return confidence_interval(one, 1 - ALPHA)[1] < -max_drop


def portfolio(rng: Any, options: Options, pairs: dict[str, Any]) -> Rows:
    """Of all data sets of the portfolio: seconds, false verdicts and missed ones, by drop and by size of set."""
    sets = [(one.docs, one.gpu_seconds) for one in parse_instance(instance_text(8)).datasets]
    question = ScreenOptions(max_drop=options.max_drop)
    for drop in DROPS:
        seconds, total, false, missed, regressions, judged = 0.0, 0.0, 0, 0, 0, 0
        sizes: dict[str, list[float]] = defaultdict(list)
        for _ in range(options.draws):
            for count, gpu_seconds in sets:
                values = drawn(rng, pairs[rng.choice(list(pairs))], count, drop)
                verdict, asked, _, _ = screened(values, question, LOOKS)
                truth = "worse" if values.mean() < -options.max_drop else "not worse"
                seconds += gpu_seconds * asked / count
                total += gpu_seconds
                judged += 1
                false += verdict not in (truth, "open")
                full = regressed(values, options.max_drop)
                regressions += full
                missed += full and verdict != "worse"
                sizes[size_of(count)].append(asked / count)
        say(
            f"drop {drop}: {', '.join(f'{name}: {np.mean(each):.2f}' for name, each in sorted(sizes.items()))}"
        )
        known = {"by_size": {name: float(np.mean(each)) for name, each in sorted(sizes.items())}}
        yield row(f"share of GPU seconds, drop {drop}", seconds / total, GOALS.get(drop, 1.0), **known)
        yield row(f"false verdicts, drop {drop}", false / judged, ALPHA)
        yield row(
            f"regressions of a gate missed, drop {drop}",
            missed / max(1, regressions),
            1 - question.power,
            of=regressions,
        )


def size_of(count: int) -> str:
    """A class of sizes."""
    return next(
        (
            name
            for most, name in ((500, "a to 500"), (2000, "b to 2,000"), (5000, "c to 5,000"))
            if count <= most
        ),
        "d more",
    )


def coverage(rng: Any, options: Options, pairs: dict[str, Any]) -> Rows:
    """How often the 95 % interval holds the full score: of the real sets, in real orders; at each look, and where a screen stops."""
    question = ScreenOptions(max_drop=options.max_drop)
    for name, pair in pairs.items():
        found = [screened(rng.permutation(pair), question, options.looks) for _ in range(options.orders)]
        each = float(np.mean([held for *_, held in found]))
        at_stop = float(np.mean([over for *_, over, _ in found]))
        facts = {"documents": len(pair), "change": float(pair.mean()), "flips": float((pair != 0).mean())}
        slack = 2 * math.sqrt(0.05 * 0.95 / options.orders)
        yield row(
            f"truth in all intervals, {name}", each, 0.95 - slack, at_least=True, at_stop=at_stop, **facts
        )


def small(rng: Any, options: Options) -> Rows:
    """False "worse" of small sets where the model did not change, each document's flip being drawn: by chance of the documents."""
    question = ScreenOptions(max_drop=options.max_drop)
    for count in (100, 164, 500):
        sets = [rng.choice([-1.0, 0.0, 1.0], count, p=[0.06, 0.88, 0.06]) for _ in range(options.orders)]
        false = np.mean([screened(one, question, LOOKS)[0] == "worse" for one in sets])
        lower = np.mean([one.mean() < -options.max_drop for one in sets])
        what = f'"worse" of {count} documents of an unchanged model'
        yield row(what, float(false), 0.05 + 0.01, lower_by_more=float(lower))


def peers(rng: Any, options: Options) -> Rows:
    """Documents that other sequential tests ask until they say "not worse" where nothing changed, 10,042 of which 10 % differ."""
    count, level, edge = 10_042, 0.05, -options.max_drop
    looks = np.append(np.arange(math.ceil(count / LOOKS), count, math.ceil(count / LOOKS)), count)
    question = ScreenOptions(max_drop=options.max_drop)
    boundary = alpha_spending(rng, looks, count, question, level)
    for change, what in ((0.0, "asked where nothing changed"), (edge - 0.0003, "false at the edge")):
        pair = np.repeat(
            [1.0, -1.0, 0.0], [round(count * (0.05 + change / 2)), round(count * (0.05 - change / 2)), count]
        )
        asked: dict[str, list[float]] = defaultdict(list)
        for _ in range(options.orders // 5):
            values = rng.permutation(pair[:count])
            means = np.cumsum(values)[looks - 1] / looks
            errors = np.sqrt(np.maximum(1e-12, np.cumsum(values**2)[looks - 1] / looks - means**2))
            seen = endless(looks, count)
            over = {
                "mixture (ours)": [
                    judge_screening(values[:n], count, question, apart=looks[0]).verdict == "not worse"
                    for n in looks[:-1]
                ],
                "betting": betting(values, edge, looks, level)[:-1],
                "alpha spending": ((means - edge) / errors * np.sqrt(seen) > boundary)[:-1],
            }
            for name, each in over.items():
                at = int(np.argmax(each)) if any(each) else len(looks) - 1
                asked[name].append(looks[at] / count)
        for name, each in asked.items():
            value = float(np.mean(each)) if change == 0 else float(np.mean(np.array(each) < 1))
            yield row(f"{name}: {what}", value, 1.0 if change == 0 else level + 0.02)


def endless(looks: Any, count: int) -> Any:
    """Documents of an endless set that are as good."""
    return looks / np.maximum(1e-9, 1 - looks / count)


def alpha_spending(rng: Any, looks: Any, count: int, question: ScreenOptions, level: float) -> Any:
    """Edges of Lan's and DeMets' spending function of O'Brien and Fleming, one-sided, over as many documents as give the power."""
    seen = endless(looks, count)
    most = 1.05 * documents_needed(question.max_drop, EXPECTED_FLIPS, level=2 * level, power=question.power)
    steps = np.sqrt(np.diff(seen, prepend=0.0))
    sums = np.cumsum(rng.normal(size=(200_000, len(looks))) * steps, 1) / np.sqrt(seen)
    edges, spent, alive = np.full(len(looks), np.inf), 0.0, np.ones(len(sums), bool)
    for k, share in enumerate(np.minimum(1, seen / most)):
        due = 2 * stats.norm.sf(stats.norm.isf(level / 2) / math.sqrt(share)) - spent
        if due * len(sums) >= 1:
            edges[k] = np.quantile(sums[alive, k], 1 - due * len(sums) / alive.sum())
            spent, alive = spent + due, alive & (sums[:, k] <= edges[k])
    return edges


def betting(values: Any, edge: float, looks: Any, level: float) -> Any:
    """At each look: is the capital of Waudby-Smith's and Ramdas' bets (aGRAPA, without replacement) against `edge` large enough?"""
    shares, count = (1 + values) / 2, len(values)
    order = np.arange(1, count + 1)
    before = np.cumsum(shares) - shares
    mean = (0.5 + before) / order
    variance = (0.25 + np.cumsum((shares - mean) ** 2) - (shares - mean) ** 2) / order
    null = np.clip((count * (1 + edge) / 2 - before) / (count - order + 1), 1e-6, 1)
    bets = np.clip((mean - null) / (variance + (mean - null) ** 2), 0, 0.5 / null)
    capital = np.cumsum(np.log1p(bets * (shares - null)))
    return np.maximum.accumulate(capital)[looks - 1] >= math.log(1 / level)


def measure(options: Options) -> tuple[Any, bool]:
    rng = np.random.default_rng(options.seed)
    pairs = pairs_of(Path(options.answers))
    rows = [
        *coverage(rng, options, pairs),
        *small(rng, options),
        *peers(rng, options),
        *portfolio(rng, options, pairs),
    ]
    return targets(rows, **vars(options))


OPTIONS = (
    option("--answers", str(HERE / "answers.npz"), "Answers of checkpoints."),
    option("--max-drop", 0.02),
    option("--draws", 10, "Of the whole portfolio, for each drop."),
    option("--orders", 2000, "In which each real set is asked."),
    option("--looks", LOOKS, "At each real set."),
    option("--seed", 1),
)
if __name__ == "__main__":
    sys.exit(command("bench_screen", __doc__, measure, *OPTIONS))
