"""Trials as the cluster runs them: own processes, a real Redis, responses on disk."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.trials import OPTIONS, TASK, Evaluation, finish, on_a_small_gpu

from coordinator.site.services.redis_server import RedisServer
from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import Failed, Probed, TooLarge, TrialEnded
from evaljobs.contract.paths import WorkPaths, batch_file, batch_index_file
from evaljobs.contract.specs import BatchIndex
from evaljobs.contract.storage import read_frame, read_frames, read_record, write_atomic
from evaljobs.queue.work_queue import QueuedShard
from evaljobs.requests import build as requests
from evaljobs.trial import trial as trial_module
from evaljobs.trial.engines import loading
from evaljobs.trial.engines.harness import HarnessEngine
from evaljobs.trial.shard_runner import RequestSet, run_shard
from evaljobs.trial.trial import Trial


@pytest.fixture
def evaluation(shared_work, tiny_model_dir, request):
    return Evaluation(shared_work, tiny_model_dir, request.node.name, getattr(request, "param", TASK))


@pytest.mark.model
def test_a_shard_that_another_trial_has_done_is_dropped(evaluation):
    """A trial that learns of it between two batches writes no record and goes on with the next
    shard.
    """
    whole = str(ShardId(TASK, 0, len(evaluation.shards)))
    evaluation.queue.fill({"lane0": [QueuedShard(shard=whole, rank=0.0, seconds=1.0)]}, "epoch")
    trial = Trial(evaluation.spec(), evaluation.spec().lanes[0])
    trial.activity.phase = "infer"
    trial._beat = lambda _over: None  # what it would hear is said below
    real, ticks = trial._tick, []

    def tick(done, of):
        ticks.append(done)
        if done == 1:
            trial.activity.overtaken = whole
            evaluation.queue.withdraw([whole])
            evaluation.queue.done("another", whole, 1)
            evaluation.queue.requeue_claims(trial.lane.trial)
        real(done, of)

    trial._tick = tick
    assert trial.perform() == 0
    assert ticks == [0, 1]
    assert evaluation.dumped() == []


@pytest.mark.model
def test_a_beat_takes_nothing_back(evaluation, monkeypatch):
    """A heartbeat claims no shard that another trial has done, and the shard stays overtaken."""
    monkeypatch.setattr(trial_module, "HEARTBEAT_SECONDS", 0.02)
    evaluation.fill()
    shard = evaluation.queue.claim("another", "lane0").shard
    trial, over = Trial(evaluation.spec(), evaluation.spec().lanes[0]), threading.Event()
    trial.activity.shard = shard
    beating = threading.Thread(target=trial._beat, args=(over,))
    beating.start()
    try:
        wait_until(lambda: trial.activity.overtaken)
        evaluation.queue.done("another", shard, 1)
        done_at = evaluation.queue.snapshot().trials["another"].beat_at
        wait_until(lambda: evaluation.queue.snapshot().trials["trial.0"].beat_at > done_at + 0.1)
    finally:
        over.set()
        beating.join()
    assert evaluation.queue.snapshot().claims == {}
    assert trial.activity.overtaken == shard


@pytest.mark.model
def test_two_trials_drain_a_queue_and_end(evaluation):
    """Members of one array dump every shard once, and each writes its outcome. A signal after that changes nothing."""
    evaluation.fill(lanes=2)
    processes = [evaluation.start(member) for member in range(2)]
    for member, process in enumerate(processes):
        place = evaluation.paths.outcome("trial-ended", f"trial.{member}")
        wait_until(lambda place=place, process=process: place.exists() or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
    logs = [finish(process) for process in processes]
    assert [p.returncode for p in processes] == [0, 0], logs
    assert sorted(evaluation.dumped()) == sorted(evaluation.shards)
    ended = [read_record(evaluation.paths.outcome("trial-ended", f"trial.{i}"), TrialEnded) for i in range(2)]
    assert sum(e.shards for e in ended) == len(evaluation.shards)
    assert {e.reason for e in ended} == {"drained"}
    assert all(
        e.load_seconds > 0 and e.import_seconds > 0 and e.warm_seconds > 0 and e.devices == "cpu"
        for e in ended
    )
    assert all(0 <= e.tokenise_seconds <= e.infer_seconds for e in ended)
    assert sum(e.tokenise_seconds for e in ended) > 0
    assert sum(e.generated_tokens or 0 for e in ended) >= len(evaluation.shards)
    assert "it/s" not in "".join(logs)
    snapshot = evaluation.queue.snapshot()
    assert snapshot.unclaimed == 0
    assert not snapshot.claims
    for trial, progress in snapshot.trials.items():
        assert progress.response_bytes == evaluation.paths.response_file(trial).stat().st_size


def waiting(evaluation, away_seconds):
    """A trial whose Redis is away for so many seconds of its own clock, and that clock."""
    slept = [0.0]
    published = evaluation.work.redis_address
    place = evaluation.paths.root / "address.json"

    def sleep(seconds):
        slept[0] += seconds
        if slept[0] >= away_seconds:
            shutil.copy(published, place)

    spec = evaluation.spec(redis_file=str(place))
    return Trial(spec, spec.lanes[0], monotonic=lambda: slept[0], sleep=sleep), slept


@pytest.mark.model
@pytest.mark.parametrize("lane", [0, 1], ids=["its own lane", "another's lane"])
def test_a_trial_without_redis_runs_the_shards_that_come_next_and_reports_them_later(
    tiny_model_dir, tmp_path, lane
):
    """Redis ends during the first shard. The trial dumps all others before it waits for Redis, which comes back empty and
    is filled again; the trial runs nothing twice, and ends with a queue that is empty.
    """
    server = RedisServer(WorkPaths(tmp_path))
    server.ensure()
    away = Evaluation(server.work, tiny_model_dir, "away")
    away.fill()
    spec = away.spec()
    dumped = []

    def waited(_seconds):
        dumped.append(away.dumped())
        server.ensure()
        away.fill()

    trial = Trial(spec, spec.lanes[lane], monotonic=lambda: 0.0, sleep=waited)
    real = trial._tick

    def tick(done, of):
        if done == 0 and trial.shards == 0:
            wait_until(lambda: len(trial._ahead._names) == len(away.shards) - 1)
            server.stop()
        real(done, of)

    trial._tick = tick
    try:
        assert trial.perform() == 0
        assert sorted(dumped[0]) == sorted(away.shards)
        assert sorted(away.dumped()) == sorted(away.shards)
        ended = read_record(away.paths.outcome("trial-ended", trial.lane.trial), TrialEnded)
        assert (ended.reason, ended.shards) == ("drained", len(away.shards))
        snapshot = away.queue.snapshot()
        assert (snapshot.epoch, snapshot.unclaimed, dict(snapshot.claims)) == ("epoch", 0, {})
    finally:
        server.stop()


@pytest.mark.model
@pytest.mark.parametrize(
    ("away", "waits", "ends"), [(121, (121, 140), "drained"), (1e9, (580, 600), "queue-lost")]
)
def test_a_trial_waits_for_a_redis_that_is_away_as_long_as_slurm_holds_a_requeued_job(
    evaluation, away, waits, ends
):
    """After 121 s, 1 s more than `cred_expire`, it goes on; after `redis_patience_seconds`, 600 by default, it gives
    its GPU back with an account.
    """
    evaluation.fill()
    trial, slept = waiting(evaluation, away)
    assert trial.perform() == 0
    assert waits[0] <= slept[0] <= waits[1]
    ended = read_record(evaluation.paths.outcome("trial-ended", "trial.0"), TrialEnded)
    assert (ended.reason, ended.shards) == (ends, len(evaluation.shards) * (ends == "drained"))


@pytest.mark.model
def test_a_terminated_trial_gives_its_shard_back(evaluation):
    """After SIGTERM: an outcome with the reason, status 0, and the shard is queued for the next trial."""
    evaluation.fill()
    process = evaluation.start()
    wait_until(lambda: len(evaluation.dumped()) >= 1 or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    log = finish(process)
    assert process.returncode == 0, log
    ended = read_record(evaluation.paths.outcome("trial-ended", "trial.0"), TrialEnded)
    assert ended.reason in {"terminated", "drained"}
    assert ended.shards == len(evaluation.dumped())
    # The coordinator releases a shard that was dumped but not reported, as after a crash.
    evaluation.queue.requeue_claims("trial.0")
    assert Trial(evaluation.spec(), evaluation.spec().lanes[1]).perform() == 0
    assert set(evaluation.dumped()) == set(evaluation.shards)


@pytest.mark.model
def test_a_trial_that_ends_in_a_second_turn_leaves_nothing_of_it(shared_work, tiny_model_dir, monkeypatch):
    """SIGTERM during a later turn: no half conversation is dumped, the shard is given back, and the
    next trial's answers equal those of an undisturbed one.
    """
    chat = Evaluation(shared_work, tiny_model_dir, "talks", "toy_talks", apply_chat_template=True)
    chat.fill()
    engine = loading.load_engine(str(chat.model), OPTIONS, 2)
    batches = RequestSet(chat.sets["toy_talks"], 2)
    expected = {s: run_shard(engine, batches, s, trial="x", seed=1234).responses for s in chat.shards}
    assert {len(said) for pairs in expected.values() for _, said in pairs} == {1, 2, 3}
    load, calls = loading.load_engine, []

    def loaded(*arguments, **keywords):
        made = load(*arguments, **keywords)
        assert isinstance(made, HarnessEngine)
        generate = made.lm.generate_until

        def counted(asked, **how):
            calls.append(len(asked))
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return generate(asked, **how)

        made.lm.generate_until = counted
        return made

    monkeypatch.setattr(loading, "load_engine", loaded)
    spec = chat.spec()
    trial = Trial(spec, spec.lanes[0])
    before = signal.signal(signal.SIGTERM, trial.on_signal)
    assert trial.perform() == 0
    signal.signal(signal.SIGTERM, before)
    assert len(calls) == 2
    assert read_record(chat.paths.outcome("trial-ended", "trial.0"), TrialEnded).reason == "terminated"
    assert chat.dumped() == []
    assert Trial(spec, spec.lanes[1]).perform() == 0
    root = chat.paths.responses
    frames = [frame for file in root.glob("*.frames") for frame, _ in read_frames(file)]
    found = {record.shard: record.responses for record in (read_frame(root, frame) for frame in frames)}
    assert {s: [(i, list(said)) for i, said in pairs] for s, pairs in found.items()} == {
        s: [(i, list(said)) for i, said in pairs] for s, pairs in expected.items()
    }


@pytest.mark.model
def test_a_shard_that_cannot_be_run_is_named(evaluation, tmp_path):
    """An error in a shard ends the trial with status 1 and a `Failed` that names the shard."""
    evaluation.sets = {TASK: str(shutil.copytree(evaluation.sets[TASK], tmp_path / "sets"))}
    place = batch_file(evaluation.sets[TASK], 2)
    place.write_bytes(place.read_bytes()[:-50])  # the last batch is torn
    last = evaluation.shards[-1]
    evaluation.queue.fill({"lane0": [QueuedShard(shard=last, rank=0.0, seconds=1.0)]}, "epoch")
    assert Trial(evaluation.spec(), evaluation.spec().lanes[0]).perform() == 1
    failed = read_record(evaluation.paths.outcome("failed", "trial.0"), Failed)
    assert (failed.job, failed.shard, failed.name) == ("trial", last, "trial.0")
    assert evaluation.queue.unclaimed() == (last,)


@pytest.mark.model
@pytest.mark.parametrize("evaluation", ["toy_choice"], indirect=True)
@pytest.mark.parametrize("cut", ["16", "fast-4096-16"])
def test_a_batch_that_does_not_fit_the_gpu_is_reported_with_the_size_that_fits(evaluation, cut):
    """The trial drops its shard, finds by halves what fits, and runs the shards that do."""
    folder = evaluation.sets["toy_choice"]
    for each in (cut, "1"):
        requests.add_batches(Path(folder), each)
    index = read_record(batch_index_file(folder, cut), BatchIndex)
    whole = max(index.prefill_tokens)
    large = ShardId(
        "toy_choice", index.prefill_tokens.index(whole), index.prefill_tokens.index(whole) + 1, cut
    )
    small = ShardId("toy_choice", 0, 6, "1")
    shards = [QueuedShard(shard=str(s), rank=float(n), seconds=0.0) for n, s in enumerate((large, small))]
    evaluation.queue.fill({"lane0": shards}, "epoch")
    process = evaluation.start(environment=on_a_small_gpu(whole // 2), batch_size=16)
    log = finish(process)
    assert process.returncode == 0, log
    found = read_record(evaluation.paths.outcome("too-large", "trial.0.1"), TooLarge)
    assert (found.shard, found.trial) == (str(large), "trial.0")
    assert found.what == ("unit" if "fast" in cut else "likelihoods")
    assert "CUDA out of memory" in found.error
    batch = RequestSet(folder, cut).batches(large.first_batch, large.end_batch)[0]
    assert found.of == (16 if batch.unit is None else len(batch.unit.rows))
    assert found.of // 4 <= found.fits < found.of
    assert evaluation.dumped() == [str(small)]
    assert evaluation.queue.unclaimed() == ()
    ended = read_record(evaluation.paths.outcome("trial-ended", "trial.0"), TrialEnded)
    assert (ended.reason, ended.shards) == ("drained", 1)


@pytest.mark.model
def test_a_task_that_was_planned_after_a_trials_start_is_left_to_the_next(evaluation):
    """The trial gives the shard back and ends well: neither shard nor node has failed."""
    evaluation.fill()
    trial = evaluation.spec(request_sets={})
    assert Trial(trial, trial.lanes[0]).perform() == 0
    ended = read_record(evaluation.paths.outcome("trial-ended", "trial.0"), TrialEnded)
    assert (ended.reason, ended.shards) == ("outdated", 0)
    assert sorted(evaluation.queue.unclaimed()) == sorted(evaluation.shards)


@pytest.mark.model
def test_auto_is_probed_once_and_then_reported(evaluation):
    """With batch_size "auto" a trial reports the size it found, waits for sets of the settled size,
    and runs them.
    """
    told = evaluation.paths.root / "request_sets.json"
    options = OPTIONS.model_copy(update={"model_args": {"max_length": 64}})
    process = evaluation.start(batch_size="auto", request_sets={}, request_sets_file=str(told), model=options)
    place = evaluation.paths.outcome("probed", "trial.0")
    wait_until(lambda: place.exists() or process.poll() is not None)
    assert place.exists(), finish(process)
    probed = read_record(place, Probed)
    assert probed.batch_size >= 1
    assert probed.token_budget == 64 * probed.batch_size
    evaluation.fill()
    write_atomic(told, json.dumps({"batch_size": 2, "request_sets": evaluation.sets}).encode())
    log = finish(process)
    assert process.returncode == 0, log
    assert sorted(evaluation.dumped()) == sorted(evaluation.shards)


@pytest.mark.model
def test_a_trial_that_loads_before_its_requests_are_built_runs_them(evaluation):
    """It waits for the queue; the request sets are named in a file before the queue is filled."""
    told = evaluation.paths.root / "request_sets.json"
    spec = evaluation.spec(request_sets={}, request_sets_file=str(told))

    def slept(_seconds):
        assert trial.activity.phase == "infer"
        write_atomic(told, json.dumps({"batch_size": 2, "request_sets": evaluation.sets}).encode())
        evaluation.fill()

    trial = Trial(spec, spec.lanes[0], sleep=slept)
    assert trial.perform() == 0
    assert sorted(evaluation.dumped()) == sorted(evaluation.shards)


@pytest.mark.model
def test_a_trial_drops_a_shard_that_is_withdrawn(evaluation, monkeypatch):
    """Between two batches; the next shard is run, and no trial holds the withdrawn one."""
    monkeypatch.setattr(trial_module, "HEARTBEAT_SECONDS", 0.02)
    evaluation.fill()
    trial, withdrawn = Trial(evaluation.spec(), evaluation.spec().lanes[0]), []
    real = trial._tick

    def tick(done, of):
        if not withdrawn:
            withdrawn.append(trial.activity.shard)
            evaluation.queue.withdraw(withdrawn)
            wait_until(lambda: trial.activity.overtaken)
        real(done, of)

    trial._tick = tick
    assert trial.perform() == 0
    assert sorted(evaluation.dumped() + withdrawn) == sorted(evaluation.shards)
    assert evaluation.queue.snapshot().claims == {}


@pytest.mark.model
def test_warming_up_changes_no_answer_and_draws_no_random_number(evaluation):
    """Random generators do not move, and each answer is the same to the last bit."""
    import random

    import numpy as np
    import torch

    engine = loading.load_engine(str(evaluation.model), OPTIONS, 2)
    requests_ = RequestSet(evaluation.sets[TASK], 2)

    def generators():
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002

    def answers():
        return run_shard(engine, requests_, evaluation.shards[0], trial="t", seed=1).responses

    cold, before = answers(), generators()
    assert engine.warm_up() > 0
    assert generators() == before
    assert answers() == cold
    compiled = OPTIONS.model_copy(update={"model_args": {"compile": True}})
    assert isinstance(engine, HarnessEngine)
    assert HarnessEngine(engine.lm, compiled, engine.loaded).warm_up() == 0.0
