"""How well run times are predicted, replayed on synthetic histories, as JSON on stdout.

A history is 20 checkpoints of 60 tasks; a task is off its cold prediction by a factor drawn once (sigma of log 0.4), and
each run of it by another (0.1). Two spreads are shown: of the predicted medians around the tasks' own medians, which
is what scheduling uses and learning can bring to zero, and of single runs around their predictions, which no
predictor brings below 0.1 * sqrt(1 + 1/n) after n runs, nor below sqrt(0.4**2 + 0.1**2) before any.
"""

from __future__ import annotations

import sys
from math import exp, log, sqrt
from random import Random
from statistics import median
from typing import Any

from bench.harness import Options, command, option, row, targets
from priors.estimate import Features, Learnt, predict_batches
from priors.table import Observation

CHECKPOINTS, TASKS = 20, 60
BETWEEN, WITHIN = 0.4, 0.1
SITE: dict[str, Any] = {"hardware": "a100", "engine": "hf", "batch_size": 8}
TARGETS = {0: 0.40, 1: 0.15, 3: 0.11}


def replay(seed: int) -> list[tuple[float, float, float]]:
    """By checkpoint: spread of medians, spread of single runs, mean stated spread."""
    random = Random(seed)
    own = [random.gauss(0, BETWEEN) for _ in range(TASKS)]

    def batch() -> tuple[int, int]:
        return random.randint(500, 20_000), random.choice([0, 0, 512, 4096])

    tokens = [[batch() for _ in range(random.randint(5, 60))] for _ in range(TASKS)]
    history: list[Observation] = []
    rows = []
    cold: list[float] = []
    for checkpoint in range(CHECKPOINTS):
        learnt = Learnt(history)
        medians, runs, stated = [], [], []
        for task in range(TASKS):
            features = Features(task=f"synthetic{task}", model_parameters=7_000_000_000, **SITE)
            prefill, caps = zip(*tokens[task], strict=True)
            predicted = predict_batches(features, prefill, caps, learnt)
            seconds = sum(predicted.seconds)
            if checkpoint == 0:
                cold.append(seconds)
            run = cold[task] * exp(own[task] + random.gauss(0, WITHIN))
            medians.append(log(seconds / cold[task]) - own[task])
            runs.append(log(seconds / run))
            stated.append(predicted.sigma)
            history.append(
                Observation(
                    task=features.task,
                    key="k",
                    model_parameters=features.model_parameters,
                    **SITE,
                    prefill_tokens=sum(prefill),
                    generated_tokens=sum(caps),
                    documents=8 * len(prefill),
                    inference_seconds=run,
                    metric_seconds=0.0,
                    load_seconds=None,
                    at=float(checkpoint),
                )
            )
        rows.append((rms(medians), rms(runs), sum(stated) / TASKS))
    return rows


def rms(values: list[float]) -> float:
    return sqrt(sum(value * value for value in values) / len(values))


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    """`floor` of a row: what no predictor is below, but by the luck of the draw."""
    histories = [replay(seed) for seed in range(options.histories)]
    rows = []
    for seen, target in TARGETS.items():
        medians, runs, stated = (median(history[seen][i] for history in histories) for i in range(3))
        floor = 1 / sqrt(1 / BETWEEN**2 + seen / WITHIN**2)
        rows.append(row(f"sigma(log), medians after {seen} checkpoints", medians, target, floor=floor))
        floor = WITHIN * sqrt(1 + 1 / seen) if seen else sqrt(BETWEEN**2 + WITHIN**2)
        later = median(rms([run for _, run, _ in history[seen:]]) for history in histories)
        what = f"sigma(log), single runs after {seen} checkpoints"
        rows.append(row(what, runs, target, floor=floor, stated=stated, from_then_on=later))
    return targets(rows)


if __name__ == "__main__":
    sys.exit(command("bench_priors", __doc__, measure, option("--histories", 20)))
