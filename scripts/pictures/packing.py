"""The picture of packing.md: one instance's plans on 8 GPUs by three policies, at one scale of time.

Rule: every bar is one of the simulator's own spans, with predictions that are right (sigma 0).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation import baselines, simulate
from simulation.sampled_times import Predicted, Truth

from coordinator.planning.instance import Instance, parse_instance
from coordinator.planning.planner import PLANNERS
from pictures.svg import EDGE, WIDTH, Picture

INSTANCE = Path(__file__).parents[1] / "bench" / "portfolio63_8gpus.instance.json"
MARKED = {
    "bbh_3shot_cot": "green",
    "alpacaeval": "purple",
}  # the longest set, and the one with the longest metric
LANE, GAP = 10.0, 2.0  # height of a lane and of the space below it
Bar = tuple[int, float, float, str]
"""(lane, begin and end in seconds, class)"""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One policy's run. `end`: seconds until the last score; `busy`: share of the held seconds that infer."""

    bars: Sequence[Bar]
    end: float
    busy: float
    loads: int
    pieces: Mapping[str, int]  # of each data set

    @property
    def lane_ends(self) -> list[float]:
        ends: dict[int, float] = {}
        for lane, _, end, _ in self.bars:
            ends[lane] = max(ends.get(lane, 0.0), end)
        return [ends[lane] for lane in sorted(ends)]


def planned(instance: Instance, policy: str, truth: Truth, *, tokenises: bool) -> Panel:
    """A plan of real evaluations, run by the simulator. `tokenises`: each trial makes its requests itself."""
    costs: dict[str, Any] = {
        "load_seconds": instance.load_seconds,
        "shard_overhead_seconds": instance.shard_overhead_seconds,
        "cpu_slots": instance.cpu_slots,
        "stage_seconds": instance.staging_seconds,
    }
    lanes = instance.lanes()
    made = PLANNERS[policy](instance.sets(), lanes, **costs)
    before = instance.preprocess_seconds if tokenises else 0.0
    run = simulate.simulate(
        made, lanes, truth, **costs, steal=policy == "evalspan", preprocess_seconds=before
    )
    number = {lane.name: place for place, lane in enumerate(lanes)}
    bars = [(number[s.lane], s.start, s.end, MARKED.get(s.shard.set, "blue")) for s in run.spans]
    begin, first = instance.staging_seconds, instance.staging_seconds + before + instance.load_seconds
    bars += [(lane, begin, first, "orange") for lane in sorted({bar[0] for bar in bars})]
    pieces = Counter(s.shard.set for s in run.spans)
    return Panel(bars=bars, end=run.makespan_seconds, busy=run.busy_fraction, loads=len(lanes), pieces=pieces)


def job_a_set(instance: Instance, truth: Truth) -> Panel:
    """One job a data set, which loads from storage and holds its GPU until its metric is done."""
    sources = [baselines.Source(name=one.name, docs=one.docs, labels=0) for one in instance.datasets]
    costs = baselines.Costs(
        preprocess=instance.preprocess_seconds,
        storage=instance.storage_seconds_alone,
        load=instance.load_seconds,
        metric_slots=instance.cpu_slots,
    )
    tasks = baselines.per_dataset(sources)
    gpus = instance.gpus
    ended = baselines.run_tasks(tasks, truth, costs, gpus=gpus, gpus_per_node=instance.gpus_per_node)
    free = [0.0] * gpus
    bars: list[Bar] = []
    jobs = zip(ended, instance.datasets, truth.metric_seconds, strict=True)
    for job, data_set, metric in sorted(jobs, key=lambda row: row[0].end - row[0].held):
        begin = job.end - job.held
        lane = next(number for number in range(gpus) if free[number] <= begin + 1e-6)
        free[lane] = job.end
        inferred = job.end - metric  # there are more CPU slots than GPUs: no metric waits
        first = inferred - job.busy
        parts = ((begin, first, "orange"), (first, inferred, MARKED.get(data_set.name, "blue")))
        bars += [(lane, *part) for part in (*parts, (inferred, job.end, "orange"))]
    busy = sum(job.busy for job in ended) / sum(job.held for job in ended)
    pieces = Counter(one.name for one in instance.datasets)
    return Panel(bars=bars, end=max(free), busy=busy, loads=len(ended), pieces=pieces)


def panels() -> tuple[dict[str, Panel], float, Instance]:
    """The three runs by their headings, the lower bound in seconds, and the instance."""
    instance = parse_instance(INSTANCE.read_text())
    truth = Truth(Predicted(instance.sets()), sigma=0.0, seed=0)
    bound = truth.bound(
        instance.lanes(),
        load_seconds=instance.load_seconds,
        cpu_slots=instance.cpu_slots,
        stage_seconds=instance.staging_seconds,
    )
    found = {
        "One job a data set": job_a_set(instance, truth),
        "Hu et al.: round robin over sorted queues": planned(instance, "round-robin", truth, tokenises=True),
        "evalspan": planned(instance, "evalspan", truth, tokenises=False),
    }
    return found, bound.seconds, instance


def figures() -> dict[str, Any]:
    """What packing.md says of the three runs."""
    found, bound, _ = panels()
    rows = {
        name: {
            "seconds": round(panel.end),
            "over the bound": round(panel.end / bound, 3),
            "model loads": panel.loads,
            "pieces": sum(panel.pieces.values()),
            "pieces of marked sets": {name: panel.pieces[name] for name in MARKED},
            "busy": round(panel.busy, 3),
            "GPUs end at": sorted(round(end) for end in panel.lane_ends),
        }
        for name, panel in found.items()
    }
    return {"lower bound": round(bound), **rows}


def draw() -> str:
    """The picture as SVG text."""
    found, bound, instance = panels()
    ends = {name: round(panel.end) for name, panel in found.items()}
    picture = Picture(
        f"{len(instance.datasets)} data sets on {instance.gpus} GPUs, planned by three policies",
        "Each bar is a GPU over time. "
        + "; ".join(f"{name}: {end:,} s" for name, end in ends.items())
        + f". Lower bound: {bound:,.0f} s. With one job a data set GPUs are held while models load and metrics run, "
        "and the last job ends long after the others; round robin loads once a GPU, but GPUs end at different times; "
        "evalspan's GPUs end together, at the bound.",
    )
    scale = (WIDTH - 2 * EDGE) / (max(ends.values()) * 1.005)
    picture.legend(
        EDGE, 24, [("blue", "inference"), ("green", "longest set"), ("purple", "set rated by a judge")]
    )
    picture.legend(378, 24, [("orange", "held, not inferring")])
    top, x_bound = 60.0, EDGE + bound * scale
    for name, panel in found.items():
        picture.text(EDGE, top - 7, name, "h")
        picture.text(WIDTH - EDGE, top - 7, f"{panel.end:,.0f} s", "h", anchor="end")
        _panel(picture, panel.bars, top, scale, instance.gpus)
        top += instance.gpus * (LANE + GAP) + 36
    bottom = top - 34
    picture.line(x_bound, 62 - 2, x_bound, bottom + 4, "dash strong")
    picture.text(x_bound, bottom + 20, f"lower bound {bound:,.0f} s", "s red", anchor="middle")
    for second in range(0, max(ends.values()) + 1, 2000):
        x = EDGE + second * scale
        picture.line(x, bottom, x, bottom + 4, "rim")
        if abs(x - x_bound) > 80:  # else the bound's own word stands there
            picture.text(
                max(x, EDGE), bottom + 20, f"{second:,} s", "s soft", anchor="middle" if second else "start"
            )
    return picture.svg(bottom + 32)


def _panel(picture: Picture, bars: Iterable[Bar], top: float, scale: float, lanes: int) -> None:
    for lane in range(lanes):
        picture.rect(EDGE, top + lane * (LANE + GAP), WIDTH - 2 * EDGE, LANE, "panel")
    for lane, begin, end, cls in sorted(bars):
        width = (end - begin) * scale
        if width > 0:  # a gap of background between two shards
            gap = 0.6 if width > 2 and cls != "orange" else 0.0
            picture.rect(EDGE + begin * scale, top + lane * (LANE + GAP), width - gap, LANE, cls)
