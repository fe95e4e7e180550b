"""Sequential test of whether a candidate is worse than its reference, from as few documents as that takes. Pure.

Rule: documents are asked in an order of which each prefix is a stratified random sample, so those asked stand for the others.
Intervals are of the *full score over this set of documents*: n of N documents are worth n / (1 - n / N) documents of an endless
set, and all N leave no error. The test is the normal mixture's confidence sequence (Robbins 1970; Waudby-Smith, Arbour, Sinha,
Kennedy and Ramdas 2021). It holds at all looks at once, so anyone may look after each shard and stop for any reason, and a
verdict once given stands. Differences are candidate minus reference; positive is better.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

from coordinator.decide.verdicts.paired import ALPHA, POWER, compare_paired, confidence_interval
from evaljobs.contract.specs import ScreenOptions

if TYPE_CHECKING:
    from coordinator.decide.verdicts.paired import Values

ScreenVerdict = Literal["worse", "not worse", "open"]

WORST_FLIPS = (
    0.5  # variance of a difference of two 0/1 answers that are independent and right half of the time
)
# expected share of documents whose answer differs between neighbouring checkpoints: it sharpens a screen, and proves nothing
EXPECTED_FLIPS = 0.1
MIN_DOCUMENTS = 30  # documents asked, below which there is no verdict but of the whole set
# documents that differ by `span`, added to those asked and to those left, so that rare flips do not count as none
UNSEEN_DOCUMENTS = 2.0
OVERSHOOT = 0.5826  # standard deviations of a step by which a sum of steps crosses a line, on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer from the documents asked so far."""

    verdict: ScreenVerdict  # "open" of a whole set: its score is lower by more, but no more than by chance of its documents
    asked: int
    documents: int  # of the whole set
    difference: float  # of the full scores, as estimated; NaN where none is asked
    low: float  # 95 % interval of that difference, over all looks; equal to `difference` once all are asked
    high: float

    @property
    def is_settled(self) -> bool:
        """Whether the question is answered, or no document is left."""
        return self.verdict != "open" or self.asked == self.documents


def likely_share(documents: int, question: ScreenOptions) -> float:
    """Return the share of so many documents that a screen is likely to ask if little has changed."""
    needed = _sharpest(question)
    return 1 / (1 + documents / needed)


def asking_order(strata: Sequence[Hashable], seed: int) -> list[int]:
    """Return the documents' numbers in the order in which to ask them, fixed by `strata` and `seed`.

    `strata`: of each document, such as (group, cluster). Within a stratum the order is random, and strata are interleaved: each
    prefix of the order has nearly its share of each stratum's documents.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for number, stratum in enumerate(strata):
        members[stratum].append(number)
    places: list[tuple[float, float, int]] = []
    for numbers in members.values():
        offset = _drawn(seed, "stratum", numbers[0])
        shuffled = sorted((_drawn(seed, "document", number), number) for number in numbers)
        places += [
            ((rank + offset) / len(numbers), drawn, number) for rank, (drawn, number) in enumerate(shuffled)
        ]
    return [number for *_, number in sorted(places)]


def _drawn(seed: int, kind: str, number: int) -> float:
    """Return a uniform number in [0, 1) that is the same on each machine and in each version."""
    digest = blake2b(f"{seed}:{kind}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def judge_screening(
    differences: Values,
    documents: int,
    question: ScreenOptions,
    *,
    apart: int = 1,
    span: float = 1.0,
    clusters: Sequence[Any] | None = None,
) -> Answer:
    """Return the answer that the documents asked so far give to whether the candidate's score is lower than the reference's by
    more than `max_drop`. May be called after each shard.

    `differences`: of the documents asked so far, an array in the asking order, candidate less reference, higher is better (the
    caller turns the sign of a metric whose lower values are better); without NaN. `documents`: of the whole set. `apart`:
    documents between two looks, at least: fewer looks make a narrower interval. `span`: largest difference that one document
    can make, 1 for shares. `clusters`: of the documents asked, where the task has them.

    "not worse": the full score is not lower by more than max_drop. "worse": it is, and by more than chance of the set's
    documents brings about where nothing changed, for which documents (or clusters) are taken as drawn from an endless set.
    ValueError: there are more differences than documents.
    """
    asked, left = len(differences), documents - len(differences)
    if left < 0:
        raise ValueError(f"{asked} differences of {documents} documents")
    if not asked:
        nothing = {"difference": math.nan, "low": -math.inf, "high": math.inf}
        return Answer(verdict="open", asked=0, documents=documents, **nothing)
    mean = float(differences.mean())
    variance = float(((differences - mean) ** 2).mean()) + UNSEEN_DOCUMENTS * span**2 / max(
        1, min(asked, left)
    )
    size, before = (
        count / (1 - count / documents) for count in (min(asked, documents - 1), max(0, asked - apart))
    )
    sharpest = _sharpest(question)

    def reach(alpha: float) -> float:
        return _reach(size, before, alpha, sharpest) * math.sqrt(variance) if left else 0.0

    half, sure = reach(ALPHA), reach(2 * question.level)
    verdict: ScreenVerdict = "open"
    if asked >= MIN_DOCUMENTS or not left:
        if mean - sure >= -question.max_drop:
            verdict = "not worse"
        elif mean + sure < -question.max_drop and _is_no_chance(differences, left, question, apart, clusters):
            verdict = "worse"
    ends = {"difference": mean, "low": mean - half, "high": mean + half}
    return Answer(verdict=verdict, asked=asked, documents=documents, **ends)


def _is_no_chance(
    differences: Values, left: int, question: ScreenOptions, apart: int, clusters: Sequence[Any] | None
) -> bool:
    """Return whether a drop exceeds what the choice of the set's documents explains; for a whole set, as `gate` decides it."""
    one = compare_paired(0 * differences, differences, clusters)
    if isinstance(one, str):
        return False
    if not left:
        return confidence_interval(one, 1 - question.level)[1] < 0
    size = one.documents
    reach = _reach(size, max(0, size - apart), 2 * question.level, _sharpest(question))
    return one.difference + reach * one.stderr * math.sqrt(size) < 0


def _sharpest(question: ScreenOptions) -> float:
    """Return the number of documents at which the sequence is narrowest."""
    return documents_needed(question.max_drop, EXPECTED_FLIPS, level=2 * question.level, power=question.power)


def _reach(size: float, before: float, alpha: float, sharpest: float) -> float:
    """Return half the width of a (1 - alpha) confidence sequence of a mean of unit variance, after `size` documents of an endless
    set. `before`: at the look before; between two looks no sum can cross, for which Siegmund's correction (1985) makes it narrower.
    `sharpest`: size at which it is narrowest for its level; it holds at all.
    """
    wide = math.log(1 / alpha**2)
    prior = sharpest / (wide + math.log(1 + wide))
    edge = math.sqrt((size + prior) * (wide + math.log((size + prior) / prior)))
    return (edge - OVERSHOOT * math.sqrt(size - before)) / size


def documents_needed(
    change: float, flips: float = WORST_FLIPS, *, level: float = ALPHA, power: float = POWER
) -> float:
    """Return how many documents show a true change with `power` in a paired test at the two-sided `level`.

    `flips`: mean square of a document's difference; of a 0/1 metric the share of documents whose answer differs. At least 1.
    """
    variance = max(flips, abs(change)) - change**2  # a change cannot be larger than the share that differs
    return max(1.0, errors_needed(level, power) ** 2 * variance / change**2)


def detectable_change(
    documents: int, flips: float = WORST_FLIPS, *, level: float = ALPHA, power: float = POWER
) -> float:
    """Return the true change that so many documents show: the inverse of `documents_needed`; at most 1."""
    ratio = errors_needed(level, power) ** 2 / documents
    change = math.sqrt(ratio * flips / (1 + ratio))
    return change if change <= flips else ratio / (1 + ratio)


def errors_needed(level: float, power: float) -> float:
    """Return how many standard errors a change has that is seen with `power` at the two-sided `level`."""
    normal = NormalDist()
    return normal.inv_cdf(1 - level / 2) + normal.inv_cdf(power)
