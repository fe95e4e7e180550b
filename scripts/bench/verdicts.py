"""Verdicts on drawn checkpoints: how often one is false, what they find, and what a large comparison costs.

`false` is the share of pairs without an effect that are rejected at 5 %, before the correction. `power`: the share of true
changes as large as the stated detectable one that are found, among so many scores of which no other has changed. `passes`:
the share of checkpoints that a gate with max_drop 0.02 passes though they are worse by more. `covers`: by the 95 % interval
of `compare`. Of trainings and of single series: how many have a false "worse since" in any task, and how soon and how well a
lasting drop is dated.
"""

from __future__ import annotations

import math
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from bench.harness import Options, command, option, row, targets
from coordinator import hook
from coordinator.decide.verdicts.gate import Policy, judge_rows, outcome_of
from coordinator.decide.verdicts.paired import (
    POWER,
    Paired,
    adjusted_verdicts,
    compare_paired,
    confidence_interval,
)
from coordinator.decide.verdicts.series import ALPHA, cusum_heights, find_worse
from coordinator.results.report.comparisons import comparison_rows
from coordinator.results.report.load_series import make_evaluation
from coordinator.results.report.pairs import Evaluated, compare_evaluated
from coordinator.results.report.row_verdicts import add_verdicts
from coordinator.results.report.stored_documents import read_documents as documents_of
from evaljobs.contract.columns import pack_columns
from evaljobs.contract.paths import EvaluationPaths

CORRELATION = 0.7  # of two checkpoints' answers
CURVES, HORIZON, PART = 40, 60, 50  # tasks and checkpoints of a drawn training; trainings drawn at a time
LONG, SETTING = 200, 100  # checkpoints of a long series, and the horizon of the settings
SIZES = (18, 40, 100, 164, 250, 500, 1000, 14_000)  # documents of a task that a gate judges
DETECTABLE = float(stats.norm.ppf(1 - 0.05 / 2) + stats.norm.ppf(POWER))  # in standard errors
TASKS, DOCUMENTS, LAYERS = 60, 14_000, 20  # of the large comparison; of the model in the hook
Kind = tuple[int, int | None, int | None, bool]
# name -> (documents, expected flips of a 0/1 metric or None, clusters or None, is 5 % exact there)
KINDS: dict[str, Kind] = {
    "0/1, 500 documents, 25 flips": (500, 25, None, True),
    "0/1, 2,000 documents, 100 flips": (2000, 100, None, True),
    "0/1, 2,000 documents, 400 flips": (2000, 400, None, True),
    "0/1, 500 documents, 6 flips": (500, 6, None, False),
    "0/1, 18 documents, 6 flips": (18, 6, None, False),
    "real, 500 documents": (500, None, None, True),
    "real, 100 clusters": (1000, None, 100, True),
    "real, 30 clusters": (600, None, 30, False),
    "real, 12 clusters": (300, None, 12, False),
}
Rows = Iterator[dict[str, Any]]


def drawn(rng: Any, kind: Kind, effect: float = 0.0) -> tuple[Any, Any, Any]:
    """(values before, after, clusters) of one pair of checkpoints whose true difference is `effect`."""
    count, flips, groups, _ = kind
    if flips is not None:
        moved = rng.random(count) < flips / count
        up = rng.random(count) < 0.5 + effect * count / flips / 2
        before = np.where(moved, ~up, rng.random(count) < 0.6)
        return before.astype(float), np.where(moved, up, before).astype(float), None
    before = rng.normal(size=count)
    after = CORRELATION * before + math.sqrt(1 - CORRELATION**2) * rng.normal(size=count) + effect
    names = None if groups is None else rng.integers(0, groups, count)
    return before, after if groups is None else after + rng.normal(size=groups)[names], names


def compared(pair: tuple[Any, Any, Any]) -> Paired:
    found = compare_paired(*pair)
    assert isinstance(found, Paired)
    return found


def pairs(rng: Any, options: Options) -> Rows:
    """False verdicts of each kind, and of some the power; how much less than two independent errors a pair needs."""

    def rejected(kind: Kind, count: int, effect: float = 0.0) -> float:
        return sum(compared(drawn(rng, kind, effect)).p < 0.05 for _ in range(count)) / count

    slack = 3 * math.sqrt(0.05 * 0.95 / options.pairs)  # 10,000 pairs: 0.65 %
    for name, kind in KINDS.items():
        share = rejected(kind, options.pairs)
        yield row(f"false, {name}", share, 0.05 + max(slack, 0.007))
        if kind[3]:
            yield row(f"false at least, {name}", share, 0.05 - max(slack, 0.007), at_least=True)
    for name in ("0/1, 2,000 documents, 400 flips", "real, 500 documents", "real, 100 clusters"):
        kind = KINDS[name]
        some = [compared(drawn(rng, kind)) for _ in range(200)]
        for count in (1, 5, 20, 60):
            stated = np.mean([adjusted_verdicts([(one, True)] * count)[0][2] for one in some])
            others = rng.random((options.pairs // 4, count - 1))
            alone = [compared(drawn(rng, kind, float(stated))).p for _ in others]
            adjusted = stats.false_discovery_control(np.column_stack([alone, others]), axis=1)[:, 0]
            what = f"power is off 80 %, {name}, among {count}"
            yield row(what, abs(float((adjusted < 0.05).mean()) - 0.8), 0.02 + slack)
    ratios = []
    for _ in range(200):
        before, after, _ = drawn(rng, KINDS["real, 500 documents"])
        one = compared((before, after, None))
        ratios.append(math.sqrt((before.var(ddof=1) + after.var(ddof=1)) / len(before)) / one.stderr)
    what = "off 1.83 times smaller a change than independent errors"
    yield row(what, abs(float(np.mean(ratios)) - 1.83), 0.05)


def estimates(rng: Any, count: int, gained: float, lost: float, draws: int) -> list[tuple[Paired, int]]:
    """Unlike estimates of checkpoints whose documents flip with these probabilities, each with how often it was drawn."""
    flips = rng.multinomial(count, (gained, lost, 1 - gained - lost), draws)[:, :2]
    found = []
    for (up, down), times in zip(*np.unique(flips, axis=0, return_counts=True), strict=True):
        change = (up - down) / count
        variance = ((up + down) / count - change**2) / (count - 1)
        found.append((Paired(count, change, variance, count - 1, 1.0, int(up), int(down)), int(times)))
    return found


def gates(rng: Any, options: Options) -> Rows:
    """False passes and false regressions of a gate, and how often an interval of few documents holds the truth."""
    for drop in (0.021, 0.05):
        for gained in (0.0, 0.02, 0.1):
            for count in SIZES:
                found = estimates(rng, count, gained, gained + drop, options.pairs)
                passed = sum(times for one, times in found if confidence_interval(one, 0.95)[0] >= -0.02)
                what = f"passes, {count} documents, {gained:.0%} gained, drop {drop:.1%}"
                yield row(what, passed / options.pairs, 0.06)
    for gained, lost in ((0.025, 0.025), (0.0, 0.05), (0.04, 0.01)):
        ends = [
            (*confidence_interval(one, 0.975), times)
            for one, times in estimates(rng, 18, gained, lost, options.pairs)
        ]
        held = sum(times for low, high, times in ends if low <= gained - lost <= high)
        what = f"covers, 18 documents, {gained:.1%} gained, {lost:.1%} lost"
        yield row(what, held / options.pairs, 0.93, at_least=True)
    draws = options.pairs // 40
    for limit in (0.0, 0.01, 0.02):
        policy = Policy.model_validate({"rule": [{"task": "*", "max_drop": limit}]})
        share = sum(outcome_of(judge_rows(policy, equal(rng))) == "regression" for _ in range(draws)) / draws
        yield row(
            f"false regression of {TASKS} tasks, max_drop {limit}",
            share,
            0.05 + 2 * math.sqrt(0.05 * 0.95 / draws),
        )
    for share in (0.1, 0.33, 0.49):
        names = np.where(np.arange(600) < share * 600, 0, 1 + np.arange(600) % 56)
        moves = rng.normal(size=(options.pairs // 5, 57))[:, names] + rng.normal(
            size=(options.pairs // 5, 600)
        )
        false = np.mean([compared((np.zeros(600), one, names)).p < 0.05 for one in moves])
        yield row(f"false, 57 clusters of which one holds {share:.0%}", float(false), 0.07)
    yield row(
        "compared, one cluster holds 67 %",
        float(isinstance(compare_paired(names, names, np.arange(600) < 400), Paired)),
        0,
    )


def equal(rng: Any) -> list[dict[str, Any]]:
    """Rows of two checkpoints that are equally good at TASKS of 500 documents, of which 100 flip."""
    rows: list[dict[str, Any]] = []
    for i in range(TASKS):
        ((one, _),) = estimates(rng, 500, 0.1, 0.1, 1)
        values = [0.6, 0.6 + one.difference]
        facts = {"task": str(i), "metric": "acc,none", "higher_is_better": True, "leaves": ()}
        rows.append(facts | {"values": values, "documents": [500, 500], "verdicts": [one.facts()]})
    return rows


def large(rng: Any, folder: Path) -> Rows:
    """CPU seconds and peak memory of reading and comparing two checkpoints over TASKS x DOCUMENTS, in this process."""
    paths = [EvaluationPaths(folder / name) for name in "ab"]
    scores: list[dict[str, Any]] = [{}, {}]
    for place, means in zip(paths, scores, strict=True):
        place.scores.mkdir(parents=True)
        parts = {}
        for i in range(TASKS):
            values = (rng.random(DOCUMENTS) < 0.5).astype(float)
            means[f"task{i:02d}"] = {"acc,none": float(values.mean())}
            made = {"doc_id": np.arange(DOCUMENTS), "doc_hash": np.arange(DOCUMENTS), "acc,none": values}
            parts[i, f"task{i:02d}"] = made | {"margin": rng.normal(size=DOCUMENTS)}
        place.documents.write_bytes(pack_columns(parts))
    started = time.process_time()
    each = [
        Evaluated(
            make_evaluation({"evaluation_id": place.root.name}, {"results": means}, None), documents_of(place)
        )
        for place, means in zip(paths, scores, strict=True)
    ]
    rows = comparison_rows([one.evaluation for one in each])
    add_verdicts(rows, [compare_evaluated(*each)])
    seconds = time.process_time() - started
    assert all("p" in one["verdicts"][0] for one in rows)
    yield row("CPU seconds of comparing 2 x 60 tasks x 14,000 documents", seconds, 3.0)
    yield row("MB of it", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 500)


def hooked(folder: Path) -> Rows:
    """CPU ms of the training thread in 50 calls of the hook with a model of nine tensors and 101 MB a layer; caches are cold."""
    import torch  # noqa: PLC0415 (seconds)

    shapes = {"q": (1536, 1536), "k": (512, 1536), "v": (512, 1536), "o": (1536, 1536), "norm": (1536,)}
    shapes |= {"gate": (4096, 1536), "up": (4096, 1536), "down": (1536, 4096), "norm2": (1536,)}
    layer = [{name: torch.ones(shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    model = torch.nn.ModuleList(map(torch.nn.ParameterDict, layer))
    caches, taken = np.zeros(64 << 20, dtype=np.uint8), []
    for step in range(50):
        caches += 1
        started = time.thread_time()
        hook.notify("/checkpoint", step, work_dir=folder, rank=0, fingerprint=model)
        taken.append(1000 * (time.thread_time() - started))
    assert hook.flush(60)
    yield row("ms of the training thread in the hook with a model, median", sorted(taken)[25], 5.0)
    yield row("worst of 50 calls", max(taken), 5.0)


def trainings(rng: Any, count: int, alike: float = 0.0) -> tuple[Any, Any, Any]:
    """(scores, paired variances, standard errors of a difference) of `count` trainings x CURVES tasks x HORIZON checkpoints.

    A score is a rising curve, and jitter of the checkpoint, of which half is all tasks', and what its documents add.
    `alike`: correlation of a checkpoint's jitter with that of the one before.
    """
    shape = (count, CURVES, HORIZON)
    documents = rng.uniform(0.003, 0.02, (count, CURVES, 1))
    jitter = documents * rng.uniform(0.3, 3, (count, CURVES, 1))
    moved = sum(autoregression(rng, of, alike) for of in ((count, 1, HORIZON), shape)) / math.sqrt(2)
    times = np.arange(HORIZON) / rng.uniform(5, 40, (count, CURVES, 1))
    rise = rng.uniform(0, 0.3, (count, CURVES, 1)) * (1 - np.exp(-times))
    sampling = 2 * documents**2 * rng.chisquare(200, shape) / 200
    error = np.sqrt(2 * (documents**2 + (1 - alike) * jitter**2))[..., 0]
    return rise + jitter * moved + documents * rng.normal(size=shape), sampling, error


def along(rng: Any, count: int) -> Rows:
    """False verdicts of trainings without a drop, and what is found of a lasting drop of two detectable differences."""
    level = ALPHA / CURVES / HORIZON
    false = dict.fromkeys((0.0, 0.3), 0)
    found = near = 0
    for part in range(0, count, PART):
        size = min(PART, count - part)
        for alike in false:
            values, sampling, errors = trainings(rng, size, alike)
            false[alike] += int((cusum_heights(values, sampling, level) > 1).any((1, 2)).sum())
        at = 15 + part // PART * 7 % 41
        values, sampling, errors = (made[:, 0] for made in trainings(rng, size))
        values[:, at:] -= 2 * DETECTABLE * errors[:, None]
        dated = [said[0] for said in find_worse(values[:, : at + 3], sampling[:, : at + 3], level) if said]
        found += sum(one.found >= at for one in dated)
        near += sum(one.found >= at and abs(one.since - at) <= 1 for one in dated)
    bound = float(stats.beta(false[0.0] + 1, count - false[0.0]).ppf(0.95))  # by Clopper and Pearson
    yield row("false in a training, upper bound", bound, 0.06)
    yield row("false in a training, checkpoints alike by 0.3", false[0.3] / count, 0.1)
    yield row("lasting drops found by the second checkpoint after", found / count, 0.8, at_least=True)
    yield row("of all drops, change point within one checkpoint", near / count, 0.7, at_least=True)


def autoregression(rng: Any, shape: tuple[int, ...], alike: float) -> Any:
    """Standard normal values whose neighbours along the last axis correlate by `alike`."""
    moved = rng.normal(size=shape)
    for i in range(1, shape[-1] if alike else 0):
        moved[..., i] = alike * moved[..., i - 1] + math.sqrt(1 - alike**2) * moved[..., i]
    return moved


def lasting(rng: Any, count: int) -> Rows:
    """False verdicts of long series at the horizon of the settings, and what is found of a drop of 0.13 in 40 documents."""
    for alike in (0.0, 0.6):
        for documents in (0.0, 0.5, 0.75):
            values = math.sqrt(1 - documents) * autoregression(rng, (count, LONG), alike)
            values += 3 * (1 - np.exp(-np.arange(LONG) / 8)) + math.sqrt(documents) * rng.normal(
                size=values.shape
            )
            sampling = np.full_like(values, 2 * documents)
            false = float((cusum_heights(values, sampling, ALPHA / SETTING) > 1).any(-1).mean())
            what = (
                f"false in {LONG} checkpoints, alike by {alike}, {documents:.0%} of the variance documents'"
            )
            yield row(what, false, 0.05 + 2 * math.sqrt(0.05 * 0.95 / count))
    for at in (75, 85):
        values, sampling = planted(rng, 200, at)
        said = find_worse(values, sampling, ALPHA / TASKS / SETTING)
        right = [[one for one in all_of_it if one.found >= at] for all_of_it in said]
        yield row(
            f"drops of 0.13 at checkpoint {at} that are found",
            sum(map(bool, right)) / 200,
            0.95,
            at_least=True,
        )
        near = sum(bool(found) and found[0].low <= at <= found[0].high for found in right) / 200
        yield row("of them, inside the stated interval", near, 0.8, at_least=True)
    started = time.process_time()
    find_worse(*planted(rng, TASKS, LONG), ALPHA / TASKS / SETTING)
    yield row(f"CPU seconds of {LONG} x {TASKS} series", time.process_time() - started, 2.0)


def planted(rng: Any, count: int, at: int) -> tuple[Any, Any]:
    """(scores, paired variances) of series of LONG checkpoints over 40 documents each, worse by 0.13 from `at` on."""
    skill = 0.65 - 0.3 * np.exp(-np.arange(LONG) / 15) - 0.373 * (np.arange(LONG) >= at)
    noise = 0.25 * rng.normal(size=(count, LONG, 40))
    right = (rng.normal(size=(count, 1, 40)) + skill[:, None] + noise > 0).astype(float)
    flips = np.diff(right, axis=1).var(-1, ddof=1) / 40
    return right.mean(-1), np.concatenate([np.zeros((count, 1)), flips], 1)


def measure(options: Options) -> tuple[Any, bool]:
    rng = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        rows = [*large(rng, Path(folder)), *hooked(Path(folder)), *pairs(rng, options), *gates(rng, options)]
    rows += along(np.random.default_rng(options.seed), options.trainings)
    rows += lasting(np.random.default_rng(options.seed), options.trainings)
    return targets(rows, **vars(options))


OPTIONS = (option("--pairs", 10_000), option("--trainings", 1000), option("--seed", 1))
if __name__ == "__main__":
    sys.exit(command("bench_verdicts", __doc__, measure, *OPTIONS))
