"""The baselines follow their sources: hand-worked partitions and runs."""

from __future__ import annotations

import pytest
from simulation.baselines import (
    Costs,
    Piece,
    Source,
    metrics_after,
    opencompass_num_worker,
    opencompass_size,
    per_dataset,
    run_tasks,
    size_factor,
)
from simulation.sampled_times import Predicted, Truth

from coordinator.planning.model import WorkSet


def piece(name, start, end):
    return Piece(dataset=name, start_doc=start, end_doc=end)


def source(name, docs, labels=0):
    return Source(name=name, docs=docs, labels=labels)


def truth(**seconds):
    """Sets of 10 documents, by GPU seconds or (GPU, metric seconds); predictions are right."""
    sets = []
    for name, value in seconds.items():
        gpu, metric = value if isinstance(value, tuple) else (value, 0.0)
        sets.append(WorkSet(name=name, batch_seconds=[gpu / 10] * 10, metric_seconds=metric))
    return Truth(Predicted(sets), sigma=0.0, seed=0)


def test_size_charges_labels_generation_and_costly_names():
    """4 labels cost 4, generation 20, gsm8k ten times that, a costly name ten times those."""
    assert size_factor(source("mmlu", 10, 4)) == 4
    assert size_factor(source("squad", 10)) == 20
    assert size_factor(source("gsm8k_main", 10)) == 200
    assert size_factor(source("bbh-logical", 10)) == 200
    assert size_factor(source("mmlu_professional_law", 10, 4)) == 40
    assert size_factor(source("minerva_math", 10)) == 20


def test_size_slices_large_sets_evenly_and_packs_the_rest_next_fit_decreasing():
    """Costs: big 5,000 of 20 = 100,000 → step 2,000 → ceil(5,000 / 3) = 1,667: three slices, a task
    each; then 36,000 (a), 24,000 (b) + 16,000 (c) = 40,000, and 4,000 (d) alone.
    """
    tasks = opencompass_size(
        [source("d", 1000, 4), source("c", 800), source("b", 1200), source("a", 1800), source("big", 5000)]
    )
    assert tasks == [
        (piece("big", 0, 1667),),
        (piece("big", 1667, 3334),),
        (piece("big", 3334, 5000),),
        (piece("a", 0, 1800),),
        (piece("b", 0, 1200), piece("c", 0, 800)),
        (piece("d", 0, 1000),),
    ]


def test_size_sorts_stably():
    """Sets of equal cost keep their order; all that fit share a task."""
    tasks = opencompass_size([source("x", 100), source("y", 100), source("z", 200)])
    assert tasks == [(piece("z", 0, 200), piece("x", 0, 100), piece("y", 0, 100))]


def test_num_worker_cuts_each_set_and_deals_all_pieces_round_robin():
    """4 workers. a: 100 docs, step 25, 4 pieces; b: 40 docs, step max(10, 16) = 16, 3 pieces; c: 16
    docs, whole. Pieces 0 … 7 go to buckets 0 1 2 3 0 1 2 3.
    """
    tasks = opencompass_num_worker([source("a", 100), source("b", 40), source("c", 16)], 4)
    assert tasks == [
        (piece("a", 0, 25), piece("b", 0, 16)),
        (piece("a", 25, 50), piece("b", 16, 32)),
        (piece("a", 50, 75), piece("b", 32, 40)),
        (piece("a", 75, 100), piece("c", 0, 16)),
    ]


def test_num_worker_leaves_empty_buckets_out():
    """One small set on 8 workers is one task."""
    assert opencompass_num_worker([source("a", 10)], 8) == [(piece("a", 0, 10),)]


def test_jobs_that_load_together_share_the_nic():
    """Two jobs on one node read 4 s alone, 8 s together: 3 + 8 + 2 + 10 = 23. A third, alone on the
    other node, reads in 4: 3 + 4 + 2 + 10 = 19.
    """
    known = truth(a=10.0, b=10.0, c=10.0)
    costs = Costs(preprocess=3.0, storage=4.0, load=2.0)
    tasks = per_dataset([source("a", 10), source("b", 10), source("c", 10)])
    ended = run_tasks(tasks, known, costs, gpus=3, gpus_per_node=2)
    assert [job.end for job in ended] == pytest.approx([23.0, 23.0, 19.0])


def test_a_reader_that_comes_later_slows_the_first_only_while_both_read():
    """a starts at 0 and reads alone until 1, then shares with b (submitted 1 s later): a needs 3
    more alone-seconds, 6 shared, ends reading at 7; b has read 3 of its 4 and reads the last alone
    until 8.
    """
    known = truth(a=10.0, b=10.0)
    costs = Costs(preprocess=0.0, storage=4.0, load=0.0, gap=1.0)
    ended = run_tasks(per_dataset([source("a", 10), source("b", 10)]), known, costs, gpus=2, gpus_per_node=2)
    assert [job.end for job in ended] == pytest.approx([17.0, 18.0])


def test_per_dataset_keeps_the_gpu_while_the_metric_runs():
    """First come, first served on one GPU: 1 + 10 + 5, then 1 + 20 + 7: 44 s."""
    known = truth(a=(10.0, 5.0), b=(20.0, 7.0))
    costs = Costs(preprocess=1.0, storage=0.0, load=0.0, metric_slots=1)
    ended = run_tasks(per_dataset([source("a", 10), source("b", 10)]), known, costs, gpus=1, gpus_per_node=1)
    assert [job.end for job in ended] == pytest.approx([16.0, 44.0])
    assert [job.held for job in ended] == pytest.approx([16.0, 28.0])
    assert [job.busy for job in ended] == pytest.approx([10.0, 20.0])


def test_metrics_on_gpus_still_need_a_cpu_slot():
    """Inference ends at 10 and 20; on one slot the second's metric and GPU wait until 60."""
    known = truth(a=(10.0, 50.0), b=(20.0, 7.0))
    costs = Costs(preprocess=0.0, storage=0.0, load=0.0, metric_slots=1)
    tasks = per_dataset([source("a", 10), source("b", 10)])
    ended = run_tasks(tasks, known, costs, gpus=2, gpus_per_node=2)
    assert [job.held for job in ended] == pytest.approx([60.0, 67.0])


def test_at_most_so_many_jobs_run_at_once():
    """Three GPUs, two jobs at once: the third job starts when the first ends."""
    known = truth(a=10.0, b=20.0, c=5.0)
    costs = Costs(preprocess=0.0, storage=0.0, load=0.0, running=2)
    tasks = per_dataset([source("a", 10), source("b", 10), source("c", 10)])
    ended = run_tasks(tasks, known, costs, gpus=3, gpus_per_node=8)
    assert [job.end for job in ended] == pytest.approx([10.0, 20.0, 15.0])


def test_metrics_after_all_inference():
    """Inference of a ends at 10, of b at 20: a's metric of 15 s starts at 20, on one slot or on two."""
    known = truth(a=(10.0, 15.0), b=(20.0, 4.0))
    costs = Costs(preprocess=0.0, storage=0.0, load=0.0)
    tasks = per_dataset([source("a", 10), source("b", 10)])
    ended = run_tasks(tasks, known, costs, gpus=2, gpus_per_node=2)
    assert metrics_after(ended, known, 2) == pytest.approx(35.0)
    assert metrics_after(ended, known, 1) == pytest.approx(39.0)
