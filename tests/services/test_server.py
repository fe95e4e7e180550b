"""Laws of the embedded server and of the address, on real servers."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from dev_cluster.testing import wait_until
from support.metric_jobs import Bench, kill, move, running, zombie

from coordinator.errors import OperatorError, RetryError
from coordinator.services import redis_server
from coordinator.services.metric_queue import MetricQueue
from coordinator.services.redis_server import RedisServer, SiteRedis, check, local_address_towards
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import QueueUnavailable, RedisAddress
from evaljobs.queue.work_queue import QueuedShard, WorkQueue
from evaljobs.scoring import rq_jobs


@pytest.fixture
def server(work: WorkPaths) -> Iterator[RedisServer]:
    made = RedisServer(work)
    yield made
    made.stop()


def test_only_its_owner_reads_the_password_without_which_nothing_is_told(
    server: RedisServer, work: WorkPaths
) -> None:
    """The address is published whole, mode 0600. The default user is off, a wrong password is refused with what to do."""
    address = server.ensure()
    assert redis_client.read(work.redis_address) == address
    assert {stat.S_IMODE(f.stat().st_mode) & 0o077 for f in (work.redis, *work.redis.rglob("*"))} == {0}
    assert address.password not in repr(address)
    with pytest.raises(OperatorError, match="needs a password: give"):
        check(address.model_copy(update={"username": None, "password": None}))
    with pytest.raises(OperatorError, match="refuses our user or password"):
        check(address.model_copy(update={"password": "guess"}))
    assert check(address) == []


FORBIDDEN = [
    "SET other:key 1", "GET other:key", "CONFIG GET *", "FLUSHALL", "KEYS *", "ACL LIST", "SHUTDOWN", "PUBLISH other x",
    "MODULE LIST", "REPLICAOF 127.0.0.1 1",
]  # fmt: skip


def test_our_user_may_do_only_what_is_needed(server: RedisServer) -> None:
    """The ACL keeps our user on our keys and away from the server's own controls."""
    client = redis_client.client(server.ensure())
    for command in FORBIDDEN:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())


@pytest.mark.parametrize("bind", ["127.0.0.1", "unix"])
@pytest.mark.parametrize("name", ["arbeit-größe", "評価", 'a "quoted" \\ name', "two\nlines \\n"])
def test_the_server_starts_in_a_folder_of_any_name(tmp_path: Path, name: str, bind: str) -> None:
    """Letters beyond ASCII, quotes, backslashes and line ends reach the server as they are."""
    work = WorkPaths(tmp_path / name)
    server = RedisServer(work, bind)
    try:
        assert check(server.ensure()) == []
        left = {entry.name for entry in work.redis.iterdir()}
        assert left - {"redis.sock"} == {"address.json", "valkey.log"}, "no data"
    finally:
        server.stop()


def test_a_server_that_does_not_start_is_quoted(work: WorkPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that it refuses is known by its own words alone, said before it has a log."""
    text = redis_server.config_text
    monkeypatch.setattr(redis_server, "config_text", lambda *a: f"{text(*a)}maxmemory-policy never\n")
    with pytest.raises(OperatorError, match=r"does not start at .*'maxmemory-policy never'"):
        RedisServer(work).ensure()


def test_while_it_is_unknown_where_to_listen_the_address_of_the_last_coordinator_serves(
    work: WorkPaths,
) -> None:
    """None is started until one is known; an address of another host does not count."""

    def away() -> str:
        raise RetryError("the controller is away")

    def published(host: str) -> None:
        work.redis.mkdir(parents=True, exist_ok=True)
        redis_client.publish(RedisAddress(host=host, port=1), work.redis_address)

    homeless = RedisServer(work, away)
    with pytest.raises(RetryError, match="away"):
        homeless.ensure()
    published("203.0.113.7")
    with pytest.raises(RetryError, match="away"):
        homeless.ensure()
    published("127.0.0.1")
    assert homeless.ensure().host == "127.0.0.1"
    homeless.stop()


def test_it_ends_with_a_killed_coordinator(work: WorkPaths) -> None:
    """SIGKILL of the coordinator leaves no server; the next one starts its own."""
    code = textwrap.dedent(
        f"""
        import os, signal
        from coordinator.services.redis_server import RedisServer
        from evaljobs.contract.paths import WorkPaths
        server = RedisServer(WorkPaths({str(work.root)!r}))
        server.ensure()
        print(server.pid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: zombie(int(done.stdout)))
    server = RedisServer(work)
    assert check(server.ensure()) == []
    server.stop()
    assert not work.redis_address.exists()


def test_a_killed_server_returns_empty_and_with_another_password(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says so. Who took its port in between got a password that opens nothing any more."""
    address = server.ensure()
    redis_client.client(address).set("evalspan:lost", "1")
    kill(server)
    assert "had ended" not in caplog.text
    again = server.ensure()
    with pytest.raises(OperatorError):
        check(address.model_copy(update={"port": again.port}))
    assert "Redis had ended: it is started again" in caplog.text
    assert redis_client.client(again).get("evalspan:lost") is None


def test_a_queue_follows_the_server_to_its_next_address(server: RedisServer, work: WorkPaths) -> None:
    """With the next password; the coordinator fills it again."""
    server.ensure()
    queue = WorkQueue.connect(work.redis_address, "e")
    for epoch in ("1", "2"):
        queue.fill({"a": [QueuedShard(shard="x", rank=0, seconds=1)]}, epoch)
        assert queue.claim("t", "a").shard == "x"
        move(server)


def test_a_port_that_is_taken_and_an_address_of_another_host_are_an_operators_errors(work: WorkPaths) -> None:
    """A configured port is never left for another one; the server's own words are shown."""
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", 0))
        taker.listen()
        with pytest.raises(OperatorError, match=r"does not start at .*Failed listening on port"):
            RedisServer(work, port=taker.getsockname()[1]).ensure()
    with pytest.raises(OperatorError, match="no address of this host"):
        RedisServer(work, "203.0.113.7").ensure()


def test_a_socket_serves_under_any_path(tmp_path: Path) -> None:
    """bind="unix" listens on a socket alone, under a work folder of any length."""
    for folder in ("w", "w" * 150):
        server = RedisServer(WorkPaths(tmp_path / folder), "unix")
        try:
            address = server.ensure()
            assert address.socket is not None
            assert redis_client.client(address).ping()
        finally:
            server.stop()
        assert not Path(address.socket).exists()
        assert Path(address.socket).parent.exists() == (folder == "w")


def test_a_frozen_server_is_an_error_within_seconds(server: RedisServer, work: WorkPaths) -> None:
    """A server that does not answer (SIGSTOP) is QueueUnavailable, never a hang."""
    address = server.ensure()
    pid = server.pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        queue = WorkQueue(redis_client.client(address, seconds=0.2), "e", address=address)
        with pytest.raises(QueueUnavailable, match="does not answer in time"):
            queue.snapshot()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_reason_of_a_metric_jobs_failure_is_its_last_line(server: RedisServer, work: WorkPaths) -> None:
    """As RQ itself writes it, also where it is as long as a traceback may be."""
    queue = MetricQueue(work.redis_address, "e")
    client = redis_client.client(server.ensure())
    queue.enqueue("a", work.root / "specs" / "a.json")
    rq_queue = rq_jobs.open_queue(client, "e")
    job = rq_queue.fetch_job(rq_jobs.job_id("e", "a"))
    text = "Traceback\n" + "  a line\n" * 5000 + "refused: no spec"
    job._handle_failure(text, pipeline := client.pipeline(), worker_name="w")
    pipeline.execute()
    rq_queue.failed_job_registry.add(job, ttl=100, exc_string=text)
    assert queue.failed() == {"a": "refused: no spec"}


# --- the site's --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://u:p%40ss@h:7000/2", "redis://h:7000/2"),
        ("rediss://h", "rediss://h:6379/0"),
        ("unix:///run/x.sock", "/run/x.sock"),
    ],
)
def test_urls_are_read_without_loss(url: str, where: str) -> None:
    """A site's URL becomes an address; its password is unquoted and never part of what is shown."""
    address = RedisAddress.from_url(url)
    assert address.where == where
    if "@" in url:
        assert (address.username, address.password) == ("u", "p@ss")
    assert RedisAddress.from_url(url, username="me", password="it").username == "me"  # noqa: S106


def test_a_sites_redis_is_checked_and_published(server: RedisServer, tmp_path: Path) -> None:
    """It is tried before it is used, published for the nodes, and never stopped. One that has served is waited for."""
    given = server.ensure()
    url = f"redis://{given.username}:{given.password}@127.0.0.1:{given.port}/0"
    work = WorkPaths(tmp_path / "another")
    site = SiteRedis(work, RedisAddress.from_url(url))
    assert site.ensure() == site.ensure()
    assert WorkQueue.connect(work.redis_address, "e").snapshot().epoch is None
    site.stop()
    assert redis_client.client(given).ping()
    gone = RedisAddress(host="127.0.0.1", port=1, password="then")  # noqa: S106
    redis_client.publish(gone, work.redis_address)
    with pytest.raises(RetryError, match="cannot be reached"):
        SiteRedis(work, gone).ensure()
    for other in ({"password": "now"}, {"port": 2}):
        with pytest.raises(OperatorError, match="cannot be reached"):
            SiteRedis(work, gone.model_copy(update=other)).ensure()


def test_the_address_towards_a_host_is_our_own() -> None:
    """The way to this host is through its loopback."""
    assert local_address_towards("127.0.0.1") == "127.0.0.1"


# --- another host --------------------------------------------------------------------------------------------------------


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str, str]]:
    """(namespace of the server, of a node, the server's address), joined by a veth pair."""
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    tag = uuid.uuid4().hex[:6]
    server, node = f"es{tag}", f"en{tag}"
    try:
        for name in (server, node):
            _ip("netns", "add", name)
        _ip(*f"link add vs{tag} netns {server} type veth peer name vn{tag} netns {node}".split())
        for name, link, address in ((server, f"vs{tag}", "10.213.7.1"), (node, f"vn{tag}", "10.213.7.2")):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    else:
        yield server, node, "10.213.7.1"
    finally:
        for name in (server, node):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _in(namespace: str, code: str) -> str:
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_nodes_of_another_network_pull_shards_and_score(two_hosts, tmp_path: Path) -> None:
    """The server on the cluster address is reached from another network namespace: by a trial's queue and by real metric
    workers."""
    host, node, bind = two_hosts
    work = WorkPaths(tmp_path / "work")
    bench = Bench(work, "e")
    common = f"""
        from pathlib import Path
        from coordinator.services.redis_server import RedisServer
        from coordinator.services.metric_queue import MetricQueue
        from evaljobs.contract.paths import WorkPaths
        from evaljobs.queue.work_queue import QueuedShard, WorkQueue
        work = WorkPaths({str(work.root)!r})
    """
    code = f"""{common}
        RedisServer(work, {bind!r}).ensure()
        WorkQueue.connect(work.redis_address, "e").fill({{"a": [QueuedShard(shard="x", rank=0, seconds=1)]}}, "1")
        MetricQueue(work.redis_address, "e").enqueue("far", Path({str(bench.write_spec("far"))!r}))
        print("ready", flush=True)
        input()
    """
    argv = ["ip", "netns", "exec", host, sys.executable, "-c", textwrap.dedent(code)]
    claim = f"{common}\n        print(WorkQueue.connect(work.redis_address, 'e').claim('t', 'a').shard)"
    coordinator = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert coordinator.stdout is not None
        assert coordinator.stdout.readline() == "ready\n"
        assert _in(node, claim) == "x"
        with running(bench, "--burst-idle", "600", prefix=("ip", "netns", "exec", node)):
            wait_until(lambda: bench.failed("far"))
    finally:
        coordinator.communicate("\n")
