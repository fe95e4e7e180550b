"""Laws of the metric workers: real Valkey, real supervisor, workers and work-horses, real metric code."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import rq.registry
from dev_cluster.testing import wait_until
from rq import Callback
from rq.command import send_shutdown_command
from rq.utils import now
from support.metric_jobs import Bench, children, kill, move, running
from support.served import server_pid
from support.with_root import memory_group, storage_away, umount

from coordinator.site.services.redis_server import RedisServer
from evaljobs.contract.specs import ScoreSpec
from evaljobs.queue import redis_client
from evaljobs.scoring import worker
from evaljobs.scoring.item_deadlines import NOTE_BYTES, note_file

IMPATIENT = (
    "import sys; from evaljobs.scoring import item_deadlines, worker; item_deadlines.FIRST_SECONDS = 0.0; "
    "worker.HEARTBEAT_SECONDS, worker.HEARTBEAT_TTL = 1, 4; sys.exit(worker.main(sys.argv[5:]))"
)


@pytest.fixture(scope="module")
def bench_and_supervisor(shared_work):
    """One supervisor for the tests that leave it whole: importing lm-eval takes seconds."""
    bench = Bench(shared_work, uuid.uuid4().hex)
    with running(bench, prefix=(sys.executable, "-c", IMPATIENT)) as process:
        yield bench, process


def at_work(bench, supervisor, job, before=0):
    """(worker, work-horse), where the only worker's horse (another than `before`) is at this job."""
    with redis_client.make_client(redis_client.read_address(bench.work.redis_address)) as client:
        found = [(w, h) for w in children(supervisor) for h in children(w) if h != before]
        status = client.hget(f"rq:job:{bench.queue.job_id(job)}", "status")
    # the horse of an earlier job may have ended, and this one's begun, between the two looks
    return found[0] if found and status == b"started" else None


def busy_worker(bench, supervisor, job, before=0):
    """Once it is so. The first job waits for lm-eval's import."""
    found = []

    def there():
        if (pair := at_work(bench, supervisor, job, before)) is not None:
            found.append(pair)
        return bool(found)

    wait_until(there)
    return found[0]


def test_a_job_leaves_its_outcome_once(bench_and_supervisor):
    """A job's outcome is a file; a job whose outcome is there is not run again."""
    bench, _ = bench_and_supervisor
    bench.enqueue("plain")
    wait_until(lambda: bench.failed("plain"))
    first = bench.paths.outcome("failed", "plain").stat().st_mtime_ns
    wait_until(lambda: bench.gone("plain"))
    bench.enqueue("plain")
    bench.enqueue("later")
    wait_until(lambda: bench.failed("later"))
    assert bench.paths.outcome("failed", "plain").stat().st_mtime_ns == first


def test_a_work_horse_that_the_kernel_ends_for_lack_of_memory_is_no_riddle(bench_and_supervisor):
    """By the kernel's own count: it is not tried again with the same memory, and the setting that would do is named."""
    bench, process = bench_and_supervisor
    wait_until(lambda: children(process.pid))
    with memory_group(100) as group:
        (group / "cgroup.procs").write_text(str(children(process.pid)[0]))
        bench.enqueue("large", held=True)
        _, horse = busy_worker(bench, process.pid, "large")
        hog = f"echo 1000 > /proc/$$/oom_score_adj; echo $$ > {group}/cgroup.procs; exec {sys.executable} -c 'x = bytearray(400 << 20)'"
        assert subprocess.run(["sh", "-c", hog], check=False).returncode == -signal.SIGKILL
        os.kill(horse, signal.SIGKILL)
        wait_until(lambda: bench.failed("large"))
    failed = bench.failed("large")
    assert failed.memory_mb == 100
    assert "its job had 100 MB; set [metric] memory_mb = 200" in failed.error


def test_a_job_waits_for_storage_that_is_away_and_has_not_failed(bench_and_supervisor):
    """At a failover each try would end at once, and the third one fail the task."""
    bench, _ = bench_and_supervisor
    name = "storage away"
    spec = bench.write_spec(name)
    log = bench.paths.logs / "worker.log"
    with storage_away(bench.paths.specs):
        bench.queue.enqueue(name, spec)
        wait_until(lambda: "storage is unavailable" in log.read_text())
        umount(bench.paths.specs)
        wait_until(lambda: bench.failed(name))
    assert "Transport endpoint" not in bench.failed(name).error
    wait_until(lambda: bench.gone(name))
    assert bench.why(name) == ""


@pytest.mark.parametrize("victim", ["work-horse", "worker"])
def test_a_killed_process_loses_no_job_and_one_that_kills_thrice_is_given_up(bench_and_supervisor, victim):
    """kill -9: the job is run again, at once before those that wait, or by another worker where its own died. The third time
    is a failure with a reason; where no process is left to write the outcome, the queue itself has it.
    """
    bench, process = bench_and_supervisor
    name, newer = f"deadly to its {victim}", f"newer than that of a {victim}"
    bench.enqueue(name, held=True)
    worker, horse = busy_worker(bench, process.pid, name)
    if victim == "work-horse":
        bench.enqueue(newer)
    for _ in range(2):
        os.kill(worker if victim == "worker" else horse, signal.SIGKILL)
        if victim == "worker":
            wait_until(lambda: bench.gone(name))
            assert bench.why(name) == ""
            bench.queue.enqueue(name, bench.paths.spec(name))  # as the coordinator does
        again, horse = busy_worker(bench, process.pid, name, before=horse)
        assert (again == worker) == (victim == "work-horse")
        assert bench.failed(newer) is None
        worker = again
    os.kill(worker if victim == "worker" else horse, signal.SIGKILL)
    wait_until(lambda: bench.gone(name) and bench.why(name))
    failed = bench.failed(name)
    if victim == "worker":
        assert failed is None
        assert "its worker died 3 times" in bench.why(name)
    else:
        assert (failed.job, failed.blame, failed.entry) == ("score", "retry", 0)
        assert "died" in failed.error
        wait_until(lambda: bench.failed(newer))


def test_an_hour_between_two_clocks_takes_no_job_from_a_living_worker(bench_and_supervisor, monkeypatch):
    """Whose last sign is too old is for Redis to say, whatever the clock of who looks shows."""
    bench, process = bench_and_supervisor
    bench.enqueue("hour", held=True)
    busy = busy_worker(bench, process.pid, "hour")
    true = rq.registry.current_timestamp
    monkeypatch.setattr(rq.registry, "current_timestamp", lambda: true() + 3600)
    assert not bench.gone("hour")
    bench.queue.enqueue("hour", bench.paths.spec("hour"))
    assert bench.opened().count == 0
    assert busy_worker(bench, process.pid, "hour") == busy
    bench.let_go("hour")
    wait_until(lambda: bench.failed("hour"))


def test_nothing_in_redis_names_what_a_worker_runs_or_commands_it(bench_and_supervisor, tmp_path):
    """A job's function and callbacks are labels; RQ's commands and its suspension, which hold for all workers of a
    server, hold for no worker of evalspan.
    """
    bench, process = bench_and_supervisor
    client = redis_client.make_client(redis_client.read_address(bench.work.redis_address))
    queue = bench.opened()
    touched = tmp_path / "touched"
    client.set("rq:suspended", 1)
    try:
        calls = Callback("os.system")
        armed = str(bench.write_spec("armed"))
        queue.enqueue("os.system", armed, on_success=calls, on_failure=calls)
        wait_until(lambda: bench.failed("armed"))  # its score was tried, and nothing else
        for name in client.smembers(f"rq:workers:{queue.name}"):
            send_shutdown_command(client, name.decode().removeprefix("rq:worker:"))
        other = queue.enqueue("os.system", f"touch {touched}")
        wait_until(lambda: other.id in queue.failed_job_registry)
        assert process.poll() is None
        assert not touched.exists()
    finally:
        client.delete("rq:suspended")


def test_a_spec_that_is_not_run_ends_with_the_reason(bench_and_supervisor):
    """One of another version."""
    bench, _ = bench_and_supervisor
    path = bench.write_spec("another version")
    path.write_text('{"kind": "score", "version": 99}')
    bench.queue.enqueue("another version", path)
    wait_until(lambda: bench.why("another version"))


def test_no_password_on_a_command_line(bench_and_supervisor):
    """Neither server nor supervisor nor workers show the password in /proc."""
    bench, process = bench_and_supervisor
    password = redis_client.read_address(bench.work.redis_address).password
    server = server_pid(bench.work)
    for pid in (process.pid, *children(process.pid), server):
        for part in ("cmdline", "environ"):
            assert password.encode() not in Path(f"/proc/{pid}/{part}").read_bytes()


def test_enqueuing_twice_is_once(shared_work):
    """A queued job is not queued again, whatever its name; what is removed leaves nothing."""
    bench = Bench(shared_work, f"e/{uuid.uuid4().hex}".replace("/", "_"))
    names = ["execute-mmlu_x:y-0", "score é|1", "a_5Fb"]
    for name in [*names, *names]:
        bench.enqueue(name)
    assert bench.opened().count == len(names)
    assert bench.queue.gone([*names, "never"]) == {"never": ""}
    bench.queue.remove()
    assert bench.queue.gone(names).keys() == {*names}
    with redis_client.make_client(redis_client.read_address(shared_work.redis_address)) as client:
        assert not list(client.scan_iter(match=f"rq:*{bench.evaluation}*"))


def test_what_comes_first_is_ahead_of_those_that_wait(shared_work):
    """A job of a long metric is taken before others that were queued sooner."""
    bench = Bench(shared_work, uuid.uuid4().hex)
    for name, first in (("a", False), ("b", False), ("long", True)):
        bench.queue.enqueue(name, bench.write_spec(name), first=first)
    assert bench.opened().job_ids == [bench.queue.job_id(name) for name in ("long", "a", "b")]
    bench.queue.remove()


def test_a_job_that_redis_lost_or_holds_in_part_is_enqueued_afresh(shared_work):
    """A worker that died with a job popped and not begun; a record of which a heartbeat left a part in an emptied Redis."""
    bench = Bench(shared_work, uuid.uuid4().hex)
    queue = bench.opened()
    client, record = queue.connection, f"rq:job:{bench.queue.job_id('lost')}"
    bench.enqueue("lost")
    client.lmove(queue.key, queue.intermediate_queue_key)
    for damage in (lambda: None, lambda: client.hdel(record, *client.hkeys(record)[1:])):
        damage()
        client.delete(queue.key)
        assert bench.queue.gone(["lost"]) == {"lost": ""}
        bench.enqueue("lost")
        assert bench.queue.gone(["lost"]) == {}
        assert queue.count == 1
    client.hset(f"rq:execution:{bench.queue.job_id('lost')}:e", "last_heartbeat", "9")
    bench.queue.remove()
    assert not list(client.scan_iter(match=f"rq:*{bench.evaluation}*"))


@pytest.mark.parametrize("late", [False, True])
def test_a_job_ended_at_its_deadline_is_not_tried_again(shared_work, late):
    """It would take as long again: its failure is an outcome at once. One that died in time keeps its attempts."""
    bench = Bench(shared_work, uuid.uuid4().hex)
    path = bench.write_spec("slow")
    bench.queue.enqueue("slow", path)
    queue = bench.opened()
    made = worker.MetricWorker(queue)
    made._spec = ScoreSpec.model_validate_json(path.read_bytes())
    job = queue.fetch_job(bench.queue.job_id("slow"))
    job.started_at = now()
    job.ended_at = now() + timedelta(seconds=worker.deadline_seconds(made._spec) * 1.1 if late else 1.0)
    made._on_killed_horse(job, None, signal.SIGKILL, None)
    failed = bench.failed("slow")
    assert job.should_retry is not late
    assert (failed is not None) is late
    assert failed is None or "took longer" in failed.error
    bench.queue.remove()


def test_a_metric_that_ignores_signals_is_ended_from_outside_and_the_job_goes_on(bench_and_supervisor):
    """An item at work for far longer than its deadline: its process is ended, the job is run again and blames the item."""
    bench, process = bench_and_supervisor
    path = bench.write_spec("deaf", held=True, item_seconds=0.2)
    bench.queue.enqueue("deaf", path)
    _, horse = busy_worker(bench, process.pid, "deaf")
    note = note_file(ScoreSpec.model_validate_json(path.read_bytes()))
    wait_until(lambda: note.exists() and note.stat().st_size >= NOTE_BYTES)  # it has been blanked
    with note.open("r+b") as file:
        file.write(b'["t", 7]')
    busy_worker(bench, process.pid, "deaf", before=horse)
    wait_until(
        lambda: (
            (text := note.read_bytes())[NOTE_BYTES:].endswith(b'["t", 7]\n') and not text[:NOTE_BYTES].strip()
        )
    )
    bench.let_go("deaf")
    wait_until(lambda: bench.failed("deaf"))


@contextmanager
def renewed(lease):
    """A coordinator that lives, whatever else it waits for. It renews more slowly than a busy worker asks Redis."""
    ended = threading.Event()

    def renew():
        while not ended.wait(0.5):
            os.utime(lease)

    coordinator = threading.Thread(target=renew)
    coordinator.start()
    try:
        yield
    finally:
        ended.set()
        coordinator.join()


def test_workers_end_where_no_coordinator_comes_back_and_nothing_of_an_evaluation_stays(shared_work):
    """Their Redis may live on: with a lease that is not renewed they end, with exit code 0; while it is renewed they stay.

    A daemon's Redis does not grow with what has ended.
    """
    bench = Bench(shared_work, uuid.uuid4().hex)
    lease = shared_work.root / f"{bench.evaluation}.lease"
    lease.touch()
    with running(bench, "--lease-file", str(lease), "--lease-seconds", "2") as process:
        with renewed(lease):
            bench.enqueue("only", held=True)
            busy_worker(bench, process.pid, "only")
            bench.let_go("only")
            wait_until(lambda: bench.failed("only"))
            assert process.poll() is None
        assert process.wait(60) == 0
    assert "cannot be imported" not in (bench.paths.logs / "worker.log").read_text()
    with redis_client.make_client(redis_client.read_address(shared_work.redis_address)) as client:
        name = bench.evaluation.encode()
        assert [key for key in client.scan_iter() if name in key]
        bench.queue.remove()
        assert [key for key in client.scan_iter() if name in key] == []


def test_redis_restarted_empty_in_mid_job(work):
    """Redis killed and back empty while a job runs: worker and job go on, its outcome comes, later jobs are run; so
    they are where Redis had to move."""
    server = RedisServer(work)
    server.ensure()
    bench = Bench(work, "e")
    try:
        with running(bench, "--stop-file", str(bench.paths.release / "workers")) as process:
            bench.enqueue("during", held=True)
            worker, horse = busy_worker(bench, process.pid, "during")
            writer = bench.read_by_job("during")
            kill(server)
            server.ensure()
            assert bench.gone("during")
            assert children(worker) == [horse]
            bench.let_go("during")
            os.close(writer)
            wait_until(lambda: bench.failed("during"))
            bench.enqueue("after")
            wait_until(lambda: bench.failed("after"))
            move(server)
            bench.enqueue("moved")
            wait_until(lambda: bench.failed("moved"))
            (bench.paths.release / "workers").touch()
            assert process.wait(60) == 0
    finally:
        server.stop()
