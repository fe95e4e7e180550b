"""The baselines follow their sources: hand-worked partitions and runs."""

from __future__ import annotations

from functools import partial

import pytest
from simulation.baselines import (
    Costs,
    Source,
    metrics_after,
    opencompass_num_worker,
    opencompass_size,
    per_dataset,
    run_tasks,
)
from simulation.sampled_times import Predicted, Truth

from coordinator.planning.model import WorkSet

four_workers, eight_workers = (partial(opencompass_num_worker, workers=workers) for workers in (4, 8))


def truth(**seconds):
    """Sets of 10 documents, by (GPU, metric) seconds; predictions are right."""
    sets = [
        WorkSet(name=name, batch_seconds=[gpu / 10] * 10, metric_seconds=metric)
        for name, (gpu, metric) in seconds.items()
    ]
    return Truth(Predicted(sets), sigma=0.0, seed=0)


@pytest.mark.parametrize(
    ("source", "cost"),
    [
        (Source("mmlu", 10, 4), 4),
        (Source("squad", 10), 20),
        (Source("gsm8k_main", 10), 200),
        (Source("bbh-logical", 10), 200),
        (Source("mmlu_professional_law", 10, 4), 40),
        (Source("minerva_math", 10), 20),
    ],
)
def test_size_charges_labels_generation_and_costly_names(source, cost):
    """4 labels cost 4, generation 20, gsm8k ten times that, a costly name ten times those."""
    assert source.cost == cost


@pytest.mark.parametrize(
    ("partition", "sources", "tasks"),
    [
        pytest.param(
            opencompass_size,
            [
                Source("d", 1000, 4),
                Source("c", 800),
                Source("b", 1200),
                Source("a", 1800),
                Source("big", 5000),
            ],
            [
                [("big", 0, 1667)],
                [("big", 1667, 3334)],
                [("big", 3334, 5000)],
                [("a", 0, 1800)],
                [("b", 0, 1200), ("c", 0, 800)],
                [("d", 0, 1000)],
            ],
            # big: 100,000, step 2,000, ceil(5,000 / 3) = 1,667; then 36,000, 24,000 + 16,000 = 40,000, and 4,000
            id="size slices large sets evenly and packs the rest next-fit decreasing",
        ),
        pytest.param(
            opencompass_size,
            [Source("x", 100), Source("y", 100), Source("z", 200)],
            [[("z", 0, 200), ("x", 0, 100), ("y", 0, 100)]],
            id="size sorts stably: sets of equal cost keep their order, all that fit share a task",
        ),
        pytest.param(
            four_workers,
            [Source("a", 100), Source("b", 40), Source("c", 16)],
            [
                [("a", 0, 25), ("b", 0, 16)],
                [("a", 25, 50), ("b", 16, 32)],
                [("a", 50, 75), ("b", 32, 40)],
                [("a", 75, 100), ("c", 0, 16)],
            ],
            # a: step 25, 4 pieces; b: step max(10, 16) = 16, 3 pieces; c whole; to buckets 0 1 2 3 0 1 2 3
            id="num-worker cuts each set and deals all pieces round-robin",
        ),
        pytest.param(
            eight_workers,
            [Source("a", 10)],
            [[("a", 0, 10)]],
            id="num-worker leaves empty buckets out",
        ),
    ],
)
def test_partitioners_follow_their_sources_to_the_document(partition, sources, tasks):
    """Each task's pieces, in order."""
    assert [list(task) for task in partition(sources)] == tasks


# a job a set, in order: GPU and metric seconds; costs; GPUs, of each node; each job's end and seconds with its GPU held
@pytest.mark.parametrize(
    ("sets", "costs", "gpus", "ends", "held"),
    [
        pytest.param(
            [(10, 0)] * 3,
            {"preprocess": 3, "storage": 4, "load": 2},
            (3, 2),
            [23, 23, 19],  # two read 4 s alone, 8 s together; a third, alone on the other node, reads in 4
            [23, 23, 19],
            id="jobs that load together share the NIC",
        ),
        pytest.param(
            [(10, 0)] * 2,
            {"storage": 4, "gap": 1},
            (2, 2),
            [17, 18],  # a reads alone until 1, then 3 s more in 6; b has read 3 of its 4 then, the last alone
            [17, 17],
            id="a reader that comes later slows the first only while both read",
        ),
        pytest.param(
            [(10, 5), (20, 7)],
            {"preprocess": 1, "metric_slots": 1},
            (1, 1),
            [16, 44],
            [16, 28],
            id="per-dataset keeps the GPU while the metric runs, first come, first served",
        ),
        pytest.param(
            [(10, 50), (20, 7)],
            {"metric_slots": 1},
            (2, 2),
            [60, 67],  # inference ends at 10 and 20; the second's metric and GPU wait until 60
            [60, 67],
            id="metrics on GPUs still need a CPU slot",
        ),
        pytest.param(
            [(10, 0), (20, 0), (5, 0)],
            {"running": 2},
            (3, 8),
            [10, 20, 15],
            [10, 20, 5],
            id="at most so many jobs run at once",
        ),
    ],
)
def test_jobs_hold_gpus_links_and_slots_as_long_as_by_hand(sets, costs, gpus, ends, held):
    """Ends, seconds held and seconds of inference of each job."""
    names = "abc"[: len(sets)]
    known = truth(**dict(zip(names, sets, strict=True)))
    tasks = per_dataset([Source(name, 10) for name in names])
    ended = run_tasks(tasks, known, Costs(**costs), gpus=gpus[0], gpus_per_node=gpus[1])
    assert [job.end for job in ended] == pytest.approx(ends)
    assert [job.held for job in ended] == pytest.approx(held)
    assert [job.busy for job in ended] == pytest.approx([gpu for gpu, _ in sets])


def test_metrics_after_all_inference():
    """Inference of a ends at 10, of b at 20: a's metric of 15 s starts at 20, on one slot or on two."""
    known = truth(a=(10.0, 15.0), b=(20.0, 4.0))
    tasks = per_dataset([Source("a", 10), Source("b", 10)])
    ended = run_tasks(tasks, known, Costs(), gpus=2, gpus_per_node=2)
    assert [metrics_after(ended, known, slots) for slots in (2, 1)] == pytest.approx([35.0, 39.0])
