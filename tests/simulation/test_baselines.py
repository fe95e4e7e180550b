"""The baselines follow their sources: hand-worked partitions and runs."""

from __future__ import annotations

from functools import partial

import pytest
from simulation.baselines import (
    Costs,
    metrics_after,
    opencompass_num_worker,
    per_dataset,
    run_tasks,
)
from simulation.sampled_times import Predicted, Truth

from coordinator.planning.instance import DataSet
from coordinator.planning.model import WorkSet

num_worker_4, num_worker_8 = (partial(opencompass_num_worker, workers=workers) for workers in (4, 8))


def data_set(name, docs):
    return DataSet(name=name, docs=docs, gpu_seconds=1.0, metric_seconds=0.0)


def sets(text):
    """NAME:DOCUMENTS each."""
    return [data_set(name, int(docs)) for name, docs in (word.split(":") for word in text.split())]


def ran(sets, costs, gpus, gpus_per_node):
    """A job a set, in order: sets of 10 documents, by (GPU, metric) seconds; predictions are right. The truth, the jobs."""
    rows = {
        name: {"batch_seconds": [gpu / 10] * 10, "metric_seconds": metric}
        for name, (gpu, metric) in zip("abc", sets, strict=False)
    }
    known = Truth(Predicted([WorkSet(name=name, **row) for name, row in rows.items()]), sigma=0.0, seed=0)
    tasks = per_dataset([data_set(name, 10) for name in rows])
    return known, run_tasks(tasks, known, Costs(**costs), gpus=gpus, gpus_per_node=gpus_per_node)


PARTITIONS = {
    # a: step 25, 4 pieces; b: step max(10, 16) = 16, 3 pieces; c whole; to buckets 0 1 2 3 0 1 2 3
    "num-worker cuts each set and deals all pieces round-robin": (
        num_worker_4,
        "a:100 b:40 c:16",
        "a 0 25, b 0 16 | a 25 50, b 16 32 | a 50 75, b 32 40 | a 75 100, c 0 16",
    ),
    "num-worker leaves empty buckets out": (num_worker_8, "a:10", "a 0 10"),
}


@pytest.mark.parametrize(("partition", "text", "tasks"), PARTITIONS.values(), ids=PARTITIONS)
def test_partitioners_follow_their_sources_to_the_document(partition, text, tasks):
    """Each task's pieces, in order: set, first document, end."""
    made = [", ".join(" ".join(map(str, piece)) for piece in task) for task in partition(sets(text))]
    assert " | ".join(made) == tasks


RUNS = {  # GPU and metric seconds; costs; GPUs, of each node; each job's end, and seconds with its GPU held
    # two read 4 s alone, 8 s together; a third, alone on the other node, reads in 4
    "jobs that load together share the NIC": (
        ([(10, 0)] * 3, {"preprocess": 3, "storage": 4, "load": 2}, 3, 2),
        [(23, 23), (23, 23), (19, 19)],
    ),
    # a reads alone until 1, then 3 s more in 6; b has read 3 of its 4 then, the last alone
    "a reader that comes later slows the first only while both read": (
        ([(10, 0)] * 2, {"storage": 4, "gap": 1}, 2, 2),
        [(17, 17), (18, 17)],
    ),
    "per-dataset keeps the GPU while the metric runs, first come, first served": (
        ([(10, 5), (20, 7)], {"preprocess": 1, "metric_slots": 1}, 1, 1),
        [(16, 16), (44, 28)],
    ),
    # inference ends at 10 and 20; the second's metric and GPU wait until 60
    "metrics on GPUs still need a CPU slot": (
        ([(10, 50), (20, 7)], {"metric_slots": 1}, 2, 2),
        [(60, 60), (67, 67)],
    ),
    "at most so many jobs run at once": (
        ([(10, 0), (20, 0), (5, 0)], {"running": 2}, 3, 8),
        [(10, 10), (20, 20), (15, 5)],
    ),
}


@pytest.mark.parametrize(("work", "jobs"), RUNS.values(), ids=RUNS)
def test_jobs_hold_gpus_links_and_slots_as_long_as_by_hand(work, jobs):
    """Ends, seconds held and seconds of inference of each job."""
    _, ended = ran(*work)
    assert [(job.end, job.held) for job in ended] == [pytest.approx(each) for each in jobs]
    assert [job.busy for job in ended] == pytest.approx([gpu for gpu, _ in work[0]])


def test_metrics_after_all_inference():
    """Inference of a ends at 10, of b at 20: a's metric of 15 s starts at 20, on one slot or on two."""
    known, ended = ran([(10, 15), (20, 4)], {}, 2, 2)
    assert [metrics_after(ended, known, slots) for slots in (2, 1)] == pytest.approx([35.0, 39.0])
