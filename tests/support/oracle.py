"""The best schedule that CP-SAT finds for the same shards, for tests and the bench alone.

Identical lanes are a cumulative resource. The CPU stage is relaxed (slots without limit), so the
oracle may promise less than any schedule can do; the bound limits it from below.
"""

from math import ceil
from random import Random

from coordinator.decide.planning.model import Lane, WorkSet

SCALE = 100  # CP-SAT counts in whole hundredths of a second


def best_known(made, sets, *, load_seconds, shard_overhead_seconds, cpu_slots, seconds, **_):
    """Makespan of the best known schedule of a plan's shards, after `seconds` of search."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    works = {work.name: work for work in sets}
    totals = {work.name: sum(work.batch_seconds) for work in sets}
    horizon = ceil(made.makespan_seconds * SCALE) + 1
    start = int(load_seconds * SCALE)
    intervals, ends, jobs = [], {}, {}
    last = model.new_int_var(0, horizon, "last")
    for number, lane in enumerate(made.lanes):
        at = load_seconds
        for shard in lane.shards:
            # rounded down, so a piece never costs more than it does
            length = int((shard.seconds + shard_overhead_seconds) * SCALE)
            begin = model.new_int_var(start, horizon, f"b{number}.{shard.rank}")
            model.add_hint(begin, int(at * SCALE))
            at += shard.seconds + shard_overhead_seconds
            intervals.append(model.new_fixed_size_interval_var(begin, length, f"i{shard.rank}"))
            work = works[shard.set]
            tail = work.metric_seconds
            if work.metric == "execute":
                share = shard.seconds / totals[shard.set] if totals[shard.set] else 0.0
                pieces = min(work.metric_parallelism, cpu_slots, shard.end_batch - shard.first_batch)
                tail *= share / pieces
                jobs.setdefault(shard.set, []).extend([tail] * pieces)
            model.add(last >= begin + length + int(tail * SCALE))
            ends.setdefault(shard.set, []).append(begin + length)
    for (
        name,
        pieces,
    ) in jobs.items():  # a set's metric starts after its first shard, on no more slots than it may
        first = model.new_int_var(start, horizon, f"first.{name}")
        model.add_min_equality(first, ends[name])
        tail = shortest_end(pieces, min(works[name].metric_parallelism, cpu_slots))
        model.add(last >= first + int(tail * SCALE))
    model.add_cumulative(intervals, [1] * len(intervals), len(made.lanes))
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status not in {cp_model.OPTIMAL, cp_model.FEASIBLE}:
        return made.makespan_seconds
    found = max(solver.objective_value / SCALE, made.lower_bound_seconds)
    return min(found, made.makespan_seconds)


def shortest_end(pieces, slots):
    """Seconds that no schedule on `slots` slots beats: of k·slots + 1 pieces, one has k + 1."""
    ordered = sorted(pieces, reverse=True)
    stacked = [(k + 1) * ordered[k * slots] for k in range(-(-len(ordered) // slots))]
    return max(sum(ordered) / slots, *stacked)


def random_problem(seed):
    """1 to 500 sets, 1 to 512 GPUs, heavy tails: (sets, lanes, costs)."""
    random = Random(seed)
    count, gpus = int(10 ** random.uniform(0, 2.7)), int(10 ** random.uniform(0, 2.71))
    mean, spread = random.uniform(2, 7), random.uniform(0.3, 2)
    sets = []
    for index in range(count):
        seconds, documents = random.lognormvariate(mean, spread), random.choice([10, 100, 1000, 5000])
        heavy = random.random() < 0.3
        metric = random.lognormvariate(random.uniform(0, 5), 1.5) if heavy else random.uniform(0, 5)
        kind = {
            "metric": random.choice(["score", "execute"]),
            "metric_parallelism": random.choice([1, 4, 1 << 30]),
        }
        batches = [seconds / documents] * documents
        sets.append(WorkSet(name=str(index), batch_seconds=batches, metric_seconds=metric, **kind))
    costs = {
        "load_seconds": random.choice([5.0, 20.0, 60.0]),
        "shard_overhead_seconds": random.choice([0.05, 0.5, 1.0]),
        "cpu_slots": max(1, int(gpus * random.choice([0.5, 2, 4]))),
    }
    return sets, [Lane(name=str(index), node=str(index // 8)) for index in range(gpus)], costs
