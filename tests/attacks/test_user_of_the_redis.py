"""Attacks of another user of the same Redis: RQ's commands, and what is announced by it."""

from __future__ import annotations

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
from support.open_redis import open_server

from coordinator.config.schema import Config, WatchConfig
from coordinator.hook import STREAM
from coordinator.intake import pending
from coordinator.intake.sources import count_in_stream
from coordinator.runtime.service import Service
from coordinator.services.notice_key import notice_key
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import read_record
from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import RedisAddress
from evaljobs.queue.work_queue import WorkQueue
from evaljobs.scoring import rq_jobs


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis.Redis]:
    with open_server(tmp_path) as client:
        yield client


def test_nothing_in_redis_commands_a_worker(shared_work: WorkPaths) -> None:
    """RQ's own commands and its suspension, which hold for all workers of a server, hold for no worker of evalspan."""
    bench = Bench(shared_work, "commanded")
    client = redis_client.connect(shared_work.redis_address)
    client.set("rq:suspended", 1)
    try:
        with supervised(bench) as process:
            bench.enqueue("first")
            wait_until(lambda: bench.failed("first"))
            for name in client.smembers(f"rq:workers:{rq_jobs.queue_name(bench.evaluation)}"):
                send_shutdown_command(client, name.decode().removeprefix("rq:worker:"))
            bench.enqueue("second")
            wait_until(lambda: bench.failed("second"))
            assert process.poll() is None
    finally:
        client.delete("rq:suspended")


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
