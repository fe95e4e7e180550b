"""Attacks of another user of the same Redis: what lies at evalspan's keys, in whatever type and size, and what is announced by it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from dev_cluster.testing import wait_until
from rq.command import send_shutdown_command
from support.daemons import SUITE, daemon, small, taken
from support.metric_jobs import Bench
from support.metric_jobs import running as supervised
from support.open_redis import open_server, running_on
from support.trials import Evaluation, finish

from coordinator.config.schema import Config, WatchConfig
from coordinator.hook import STREAM
from coordinator.intake import pending
from coordinator.intake.sources import count_in_stream
from coordinator.runtime.runner import Running
from coordinator.runtime.service import Service
from coordinator.services.notice_key import notice_key
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import JudgeOptions
from evaljobs.contract.storage import read_record
from evaljobs.judges.caps import Caps, Over, prefix
from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import RedisAddress
from evaljobs.queue.work_queue import WorkQueue
from evaljobs.scoring import rq_jobs


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis.Redis]:
    with open_server(tmp_path) as client:
        yield client


def looked(running: Running, times: int, start: float) -> None:
    for number in range(times):
        running._look_at_queue(start + 20.0 * number)
        running._audit(start + 20.0 * number)


def to_do(running: Running) -> set[str]:
    return {name for name, shard in running.state.shards.by_name.items() if shard.frame is None}


def queued(running: Running) -> set[str]:
    return set(running.performer.queue(running.state.evaluation_id).unclaimed())


def claims_all(running: Running) -> set[str]:
    """What a trial gets; it is given back."""
    queue, found = running.performer.queue(running.state.evaluation_id), set()
    while (claim := queue.claim("t", "n0/0", sorted(found))).shard is not None:
        found.add(claim.shard)
    for shard in found:
        queue.give_back("t", shard)
    return found


HASHES = ("meta", "info", "where", "claims", "held", "copies", "trials")
VALUES = [b"", b"\xff\xfe", b"{", b"[" * 5000, b"null", b"[1]", b'["t", "x"]', b'["t", 1e999]', b"9" * 5000]
FIGURES = [b'{"batches": 1e999}', b'{"shards_done": "x"}', b'{"beat_at": []}', b'{"shard": {"a": 1}}', b"[1]"]


def test_no_value_at_a_queues_keys_ends_an_evaluation(server: redis.Redis, tmp_path: Path) -> None:
    """The coordinator's looks and audits raise nothing, and after them all that is to do is queued."""
    running = running_on(tmp_path)
    looked(running, 2, 1e6)
    key = f"evalspan:{{{running.state.evaluation_id}}}:"
    shard = next(iter(to_do(running)))
    now = 2e6
    for name in HASHES:
        for value in [*VALUES, *(FIGURES if name == "trials" else [])]:
            server.hset(key + name, shard if name != "trials" else "trial", value)
            server.hset(key + name, b"\xff" + name.encode(), value)
            looked(running, 4, now := now + 100)
    assert queued(running) == to_do(running)


@pytest.mark.parametrize("name", [*HASHES, "lanes", "load", "withdrawn", "gone", "lane:n0/0"])
def test_no_type_at_a_queues_keys_stops_an_evaluation(name: str, server: redis.Redis, tmp_path: Path) -> None:
    """Deleted and made anew as a text, a list or a set: the queue is filled again by the next looks."""
    running = running_on(tmp_path)
    looked(running, 2, 1e6)
    key = f"evalspan:{{{running.state.evaluation_id}}}:{name}"
    for number, make in enumerate(
        (lambda: server.set(key, "x"), lambda: server.rpush(key, "x"), lambda: server.sadd(key, "x"))
    ):
        server.delete(key)
        make()
        now = 2e6 + 1000 * number
        looked(running, 4, now)
        with contextlib.suppress(redis_client.QueueUnavailable):  # a trial may be the first to find it
            claims_all(running)
        looked(running, 4, now + 200)
        assert queued(running) == to_do(running) == claims_all(running)
        looked(running, 4, now + 400)


def test_no_forged_claim_done_or_withdrawal_loses_a_shard(server: redis.Redis, tmp_path: Path) -> None:
    """What a stranger takes out of the queue in the name of trials that there are not is queued again, and what counts as
    done lies in response files.
    """
    running = running_on(tmp_path)
    looked(running, 2, 1e6)
    queue = running.performer.queue(running.state.evaluation_id)
    names = sorted(to_do(running))
    for number, shard in enumerate(names):
        lane = next(iter(queue.loads()), "")
        match number % 3:
            case 0:
                queue.claim("stranger", lane)
            case 1:
                queue.done("stranger", shard, 1 << 60)
            case _:
                queue.withdraw([shard])
    looked(running, 4, 2e6)
    assert queued(running) == set(names)
    assert to_do(running) == set(names)


def test_shards_that_no_plan_has_are_taken_out_of_the_queue(server: redis.Redis, tmp_path: Path) -> None:
    running = running_on(tmp_path)
    looked(running, 2, 1e6)
    queue = running.performer.queue(running.state.evaluation_id)
    forged = ["t0|0|999999999", "t0|-5|1", "no-task|0|1", "no shard", "t0|../x:0|1", "\x1b[2J|0|1"]
    where, lanes = f"evalspan:{{{running.state.evaluation_id}}}:where", queue.loads()
    for shard in forged:
        server.hset(where, shard, next(iter(lanes)))
        server.zadd(f"evalspan:{{{running.state.evaluation_id}}}:lane:{next(iter(lanes))}", {shard: -1})
    looked(running, 2, 2e6)
    assert queued(running) == to_do(running)


def test_no_forged_shard_ends_a_trial(shared_work: WorkPaths, model_dir: Path) -> None:
    """It drops what is no part of its request sets, and goes on with the shards that are: its weights stay loaded."""
    evaluation = Evaluation(shared_work, model_dir, "forged-shards")
    evaluation.fill()
    task = evaluation.task
    forged = [
        "no shard",
        f"{task}|x|y",
        f"{task}|0|999999999",
        f"{task}|-5|1",
        f"{task}|1|0",
        f"{task}|7:0|1",
    ]
    forged += [f"{task}|../../../x:0|1", f"{task}|fast-x:0|1"]
    client, key = redis_client.connect(shared_work.redis_address), f"evalspan:{{{evaluation.name}}}:"
    for shard in forged:
        client.hset(key + "where", shard, "lane0")
        client.zadd(key + "lane:lane0", {shard: -1})
    said = finish(evaluation.start())
    assert sorted(evaluation.dumped()) == sorted(evaluation.shards), said
    assert (evaluation.paths.outcome("trial", "trial.0")).exists() or not list(
        evaluation.paths.outcomes.glob("*.failed.json")
    ), said


BAD_IDS = [b"\xff\xfe", b"_FF", b"evalspan_FF-_C3", b"x" * (1 << 20), b""]


@pytest.mark.parametrize("entry", [b"\xff\xfe", b"_FF", b"evalspan_FF-_C3", b"x" * (1 << 20), b"", None])
def test_no_entry_of_a_metric_queue_stops_its_jobs(entry: bytes | None, shared_work: WorkPaths) -> None:
    """Ids that are no text, and (None) keys of another type: the audit's first look may find the queue away, its next takes jobs."""
    bench = Bench(shared_work, f"forged-{(entry or b'none').hex()[:8]}")
    client = redis_client.connect(shared_work.redis_address)
    queue = rq_jobs.open_queue(client, bench.evaluation)
    keys = (
        queue.key,
        queue.intermediate_queue_key,
        queue.started_job_registry.key,
        queue.failed_job_registry.key,
    )
    for key in keys:
        if entry is None:
            client.set(key, "x")
        elif "registry" in key or ":wip" in key or ":failed" in key:
            client.zadd(key, {entry + b":" + entry: 0, entry: 0})
        else:
            client.rpush(key, entry)
    with contextlib.suppress(redis_client.QueueUnavailable):
        bench.queue.recover()
        bench.queue.status()
    with contextlib.suppress(redis_client.QueueUnavailable):
        bench.enqueue("one")
    bench.enqueue("one")
    bench.queue.recover()
    assert "one" in bench.queue.known()
    bench.queue.status()
    bench.queue.remove()


def test_nothing_in_redis_commands_a_worker(shared_work: WorkPaths) -> None:
    """RQ's own commands and its suspension, which hold for all workers of a server, hold for no worker of evalspan; nor does
    a list of workers that is no text keep them from working.
    """
    bench = Bench(shared_work, "commanded")
    client = redis_client.connect(shared_work.redis_address)
    client.set("rq:suspended", 1)
    listed = ("rq:workers", f"rq:workers:{rq_jobs.queue_name(bench.evaluation)}")
    for key in listed:
        client.sadd(key, b"\xff\xfe")
    try:
        with supervised(bench) as process:
            bench.enqueue("first")
            wait_until(lambda: bench.failed("first"))
            for name in client.smembers(listed[1]) - {b"\xff\xfe"}:
                send_shutdown_command(client, name.decode().removeprefix("rq:worker:"))
            bench.enqueue("second")
            wait_until(lambda: bench.failed("second"))
            assert process.poll() is None
    finally:
        client.delete("rq:suspended")
        for key in listed:
            client.srem(key, b"\xff\xfe")


# --- the judge's caps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forged", [b"-1000000000", b"0", b"nan", b"-inf", b"x", b""])
def test_no_forged_sum_raises_a_judges_cost_cap(forged: bytes, server: redis.Redis, tmp_path: Path) -> None:
    """What the evaluation's files say was spent, and what this process has seen of it, is spent."""
    judge = JudgeOptions(url="http://j", model="m", max_cost=1.0)
    with Caps(WorkPaths(tmp_path).redis_address, judge, "e", spent=lambda: 900_000) as caps:
        assert isinstance(caps.take("a", 200_000), Over)
        server.hset(prefix(judge) + "spent", "e", forged)
        assert isinstance(caps.take("b", 200_000), Over)
        server.delete(prefix(judge) + "spent")
        assert isinstance(caps.take("c", 200_000), Over)


# --- notices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ears(server: redis.Redis, tmp_path: Path, every_tick: None) -> Service:
    """A daemon on the work folder whose Redis `server` is."""
    return daemon(tmp_path, Config(watch=WatchConfig(roots=(tmp_path / "run",), suite=SUITE)))


def announce(server: redis.Redis, **fields: object) -> object:
    return server.xadd(STREAM, {"notice": json.dumps(fields)})


def test_a_notice_that_is_deleted_while_it_waits_hides_no_other(
    server: redis.Redis, ears: Service, tmp_path: Path
) -> None:
    """The daemon has read the first and not acknowledged it: of it Redis gives back an entry without fields."""
    entry = announce(server, checkpoint=str(tmp_path / "run" / "step-1"))
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    ears.tick()
    server.xdel(STREAM, entry)
    announce(server, checkpoint=str(small(tmp_path / "run" / "step-2")))
    ears.tick()
    assert taken(ears) == ["step-2"]


def test_a_stream_of_another_type_costs_no_notice(server: redis.Redis, ears: Service, tmp_path: Path) -> None:
    """The hook leaves its notices in the spool folder then."""
    server.set(STREAM, "x")
    place = small(tmp_path / "run" / "step-3")
    code = f"from coordinator import hook; hook.notify({str(place)!r}, work_dir={str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    ears.tick()
    assert taken(ears) == ["step-3"]


NUMBERS = {
    "priority": [10**400, -(10**400), 10**30],
    "step": [10**400, -(10**30)],
    "noticed_at": [1e308, -1e308],
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in NUMBERS.items() for v in values], ids=lambda v: str(v)[:9]
)
def test_no_number_of_a_notice_ends_an_evaluation_or_hides_another(
    field: str, value: object, server: redis.Redis, ears: Service, tmp_path: Path
) -> None:
    announce(server, checkpoint=str(small(tmp_path / "run" / "step-4")), **{field: value})
    announce(server, checkpoint=str(small(tmp_path / "run" / "step-5", seed=1)))
    ears.tick()
    for _ in range(3):
        ears.coordinator.tick()
        ears.tick()
    assert "step-5" in taken(ears)
    assert ears.coordinator._parked.by_id == {}
    pending.read(ears.paths.pending)


def test_no_notice_writes_to_a_terminal_or_a_second_line_to_a_log(
    server: redis.Redis, ears: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its texts are shown by `status` and in the daemon's log: as they are where they can be printed, and not otherwise."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\nINFO all is well"
    for number, fields in enumerate(
        [
            {"checkpoint": f"{tmp_path}/run/{evil}"},
            {"checkpoint": f"{tmp_path}/run/x", "suite": evil},
            {"checkpoint": evil, "unknown": evil},
            {evil: evil},
        ]
    ):
        announce(server, noticed_at=number, **fields)
    ears.tick()
    told = read_record(ears.paths.pending, pending.PendingFile)
    assert len(told.refused) == 4
    assert all(text.isprintable() for r in told.refused for text in (r.checkpoint, r.suite, r.why))
    lines = [record.getMessage() for record in caplog.records if "not evaluated" in record.getMessage()]
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)


def test_a_notice_of_a_hundred_megabytes_is_refused_unread(
    server: redis.Redis, ears: Service, tmp_path: Path
) -> None:
    server.xadd(STREAM, {"notice": b'{"checkpoint": "' + b"x" * (100 << 20) + b'"}'})
    ears.tick()
    (refused,) = read_record(ears.paths.pending, pending.PendingFile).refused
    assert len(refused.model_dump_json()) < 5000
    assert "longer" in refused.why
    assert count_in_stream(ears.paths) == 0


def test_no_forged_altered_or_replayed_notice_starts_a_second_evaluation(
    server: redis.Redis, tmp_path: Path, every_tick: None
) -> None:
    """At a site's Redis: unsigned, signed with another key, with the signature of other words, or with the words moved to
    another field. A copy of a sound notice is the same evaluation.
    """
    watch = WatchConfig(roots=(tmp_path / "run",), suite=SUITE)
    ears = daemon(tmp_path, Config(watch=watch, redis={"url": f"unix://{tmp_path}/s"}))
    key = notice_key(ears.paths)

    def signed(number: int, by: bytes = key) -> dict[str, bytes]:
        place = small(tmp_path / "run" / f"step-{number}", seed=number)
        text = json.dumps({"checkpoint": str(place), "suite": SUITE}).encode()
        return {"notice": text, "mac": hmac.new(by, text, hashlib.sha256).hexdigest().encode()}

    sound = signed(1)
    forged = [
        {"notice": signed(2)["notice"]},
        signed(3, b""),
        signed(4, b"x" * 32),
        signed(5) | {"mac": sound["mac"]},
        signed(7) | {"mac": b"\xff" * 64},
        {"mac": signed(8)["mac"], "other": signed(9)["notice"]},
        {"notice": sound["notice"] + b" ", "mac": sound["mac"]},
    ]
    for fields in (*forged, sound, sound):
        server.xadd(STREAM, fields)
    for _ in range(3):
        ears.tick()
    assert taken(ears) == ["step-1"]
    server.xadd(STREAM, sound)
    ears.tick()
    assert taken(ears) == ["step-1"]
    assert count_in_stream(ears.paths) == 0


# --- the address -----------------------------------------------------------------------------------------------------


def test_a_server_that_is_none_of_ours_is_no_queue(tmp_path: Path) -> None:
    """A stranger's program at the port of a server that has ended: whatever it answers is Redis being away."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        work = WorkPaths(tmp_path)
        address = RedisAddress(host="127.0.0.1", port=listener.getsockname()[1], username="u")
        redis_client.publish(address, work.redis_address)

        def serve() -> None:
            for answer in (
                b"-ERR " + b"x" * (1 << 16),
                b"HTTP/1.1 200 OK\r\n\r\n",
                b"*1000000000\r\n",
                b"\x00" * 64,
                b"$-5\r\n",
            ):
                for _ in range(2):
                    connection, _where = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(answer + b"\r\n")

        threading.Thread(target=serve, daemon=True).start()
        for _ in range(5):
            with pytest.raises(redis_client.QueueUnavailable):
                WorkQueue.connect(work.redis_address, "e").snapshot()
