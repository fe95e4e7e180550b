"""Laws of the embedded server, a site's own, also behind TLS, and of the address, on real servers."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import redis
from dev_cluster import procs
from dev_cluster.testing import wait_until
from support.metric_jobs import kill, move

from coordinator.errors import OperatorError, RetryError
from coordinator.runtime.wiring import cluster_of, keeper_of
from coordinator.site.config.schema import Config, RedisConfig
from coordinator.site.services import redis_server
from coordinator.site.services.metric_queue import MetricQueue
from coordinator.site.services.redis_server import (
    RedisServer,
    SiteRedis,
    acl_text,
    check_server,
    local_address_towards,
)
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import Link, QueueUnavailable, RedisAddress, explain_errors
from evaljobs.queue.work_queue import QueuedShard, WorkQueue

PASSWORD = "secret"  # noqa: S105


@pytest.fixture
def server(work):
    made = RedisServer(work)
    yield made
    made.stop()


def test_only_its_owner_reads_the_password_without_which_nothing_is_told(server, work):
    """The address is published whole, mode 0600. The default user is off, a wrong password is refused with what to do. Our user
    stays on our keys and away from the server's own controls.
    """
    address = server.ensure()
    assert redis_client.read_address(work.redis_address) == address
    assert {stat.S_IMODE(f.stat().st_mode) & 0o077 for f in (work.redis, *work.redis.rglob("*"))} == {0}
    assert address.password not in repr(address)
    assert check_server(address) == []
    for changes, said in (
        ({"username": None, "password": None}, "needs a password: set"),
        ({"password": "guess"}, "refuses our user or password"),
    ):
        with pytest.raises(OperatorError, match=said):
            check_server(address.model_copy(update=changes))
    client = redis_client.make_client(address)
    for command in (
        "SET other:key 1", "GET other:key", "CONFIG GET *", "FLUSHALL", "KEYS *", "ACL LIST", "SHUTDOWN",
        "PUBLISH other x", "MODULE LIST", "REPLICAOF 127.0.0.1 1",
    ):  # fmt: skip
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())


@pytest.mark.parametrize("bind", ["127.0.0.1", "unix"])
@pytest.mark.parametrize("name", ['größe 評価 "quoted" \\ name', "two\nlines \\n" + "long" * 40])
def test_the_server_starts_in_a_folder_of_any_name(tmp_path, name, bind):
    """Letters beyond ASCII, quotes, backslashes and line ends reach the server as they are. bind="unix" listens on a socket
    alone, which goes with the server, under a work folder of any length.
    """
    work = WorkPaths(tmp_path / name)
    server = RedisServer(work, bind)
    try:
        address = server.ensure()
        assert check_server(address) == []
        left = {entry.name for entry in work.redis.iterdir()}
        assert left - {"redis.sock"} == {"address.json", "valkey.log"}, "no data"
        assert (address.socket is not None) == (bind == "unix")
    finally:
        server.stop()
    if address.socket:
        assert not Path(address.socket).exists()
        assert Path(address.socket).parent.exists() == (Path(address.socket).parent == work.redis)


def test_a_server_that_does_not_start_is_quoted(work, monkeypatch):
    """A setting that it refuses is known by its own words alone, said before it has a log. A configured port is never left for
    another one, and a bind address of another host is an operator's error.
    """
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", 0))
        taker.listen()
        with pytest.raises(OperatorError, match=r"does not start at .*Failed listening on port"):
            RedisServer(work, port=taker.getsockname()[1]).ensure()
    with pytest.raises(OperatorError, match="not an address of this host"):
        RedisServer(work, "203.0.113.7").ensure()
    text = redis_server.config_text
    monkeypatch.setattr(redis_server, "config_text", lambda *a: f"{text(*a)}maxmemory-policy never\n")
    with pytest.raises(OperatorError, match=r"does not start at .*'maxmemory-policy never'"):
        RedisServer(work).ensure()


def test_while_it_is_unknown_where_to_listen_the_address_of_the_last_coordinator_serves(work):
    """None is started until one is known; an address of another host does not count. The way to this host is its loopback."""

    def away():
        raise RetryError("the controller is away")

    homeless = RedisServer(work, away)
    for host in ("", "203.0.113.7"):
        if host:
            work.redis.mkdir(parents=True, exist_ok=True)
            redis_client.publish_address(RedisAddress(host=host, port=1), work.redis_address)
        with pytest.raises(RetryError, match="away"):
            homeless.ensure()
    redis_client.publish_address(RedisAddress(host="127.0.0.1", port=1), work.redis_address)
    assert homeless.ensure().host == local_address_towards("127.0.0.1") == "127.0.0.1"
    homeless.stop()


KILLED = """
import os, signal, sys
from coordinator.site.services.redis_server import RedisServer
from evaljobs.contract.paths import WorkPaths
server = RedisServer(WorkPaths(sys.argv[1]))
server.ensure()
print(server.pid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_a_killed_coordinator(work, server):
    """SIGKILL of the coordinator leaves no server; the next one starts its own."""
    argv = [sys.executable, "-c", KILLED, str(work.root)]
    done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not procs.identify(int(done.stdout)))
    assert check_server(server.ensure()) == []
    server.stop()
    assert not work.redis_address.exists()


def test_a_killed_server_returns_empty_and_with_another_password_and_queues_follow(server, work, caplog):
    """And the log says so. Who took its port in between got a password that opens nothing any more. A queue goes on at the next
    address, once the coordinator has filled it again.
    """
    address = server.ensure()
    redis_client.make_client(address).set("evalspan:lost", "1")
    kill(server)
    assert "restarting" not in caplog.text
    again = server.ensure()
    with pytest.raises(OperatorError):
        check_server(address.model_copy(update={"port": again.port}))
    assert "Redis exited: restarting it" in caplog.text
    assert redis_client.make_client(again).get("evalspan:lost") is None
    queue = WorkQueue(Link(work.redis_address), "e")
    for epoch in ("1", "2"):
        queue.fill({"a": [QueuedShard(shard="x", rank=0, seconds=1)]}, epoch)
        assert queue.claim("t", "a").shard == "x"
        move(server)


def test_a_frozen_server_is_an_error_within_seconds(server):
    """A server that does not answer (SIGSTOP) is QueueUnavailable, never a hang."""
    address, pid = server.ensure(), server.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        client = redis_client.make_client(address, seconds=0.2)
        with pytest.raises(QueueUnavailable, match="does not answer in time"), explain_errors(address.where):
            client.ping()
    finally:
        os.kill(pid, signal.SIGCONT)


# --- the site's ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://u:p%40ss@h:7000/2", "redis://h:7000/2"),
        ("rediss://h", "rediss://h:6379/0"),
        ("unix:///run/x.sock", "/run/x.sock"),
    ],
)
def test_urls_are_read_without_loss(url, where):
    """A site's URL becomes an address; its password is unquoted and never part of what is shown."""
    address = RedisAddress.from_url(url)
    assert address.where == where
    if "@" in url:
        assert (address.username, address.password) == ("u", "p@ss")
    assert RedisAddress.from_url(url, username="me", password=PASSWORD).username == "me"


def test_a_sites_redis_is_checked_and_published(server, tmp_path):
    """It is tried before it is used, published for the nodes, and never stopped. One that has served is waited for."""
    given = server.ensure()
    work = WorkPaths(tmp_path / "another")
    url = f"redis://{given.username}:{given.password}@127.0.0.1:{given.port}/0"
    site = SiteRedis(work, RedisAddress.from_url(url))
    assert site.ensure() == site.ensure()
    assert WorkQueue(Link(work.redis_address), "e").snapshot().epoch is None
    site.stop()
    assert redis_client.make_client(given).ping()
    gone = RedisAddress(host="127.0.0.1", port=1, password=PASSWORD)
    redis_client.publish_address(gone, work.redis_address)
    for changes, error in (
        ({}, RetryError),
        ({"password": "now"}, OperatorError),
        ({"port": 2}, OperatorError),
    ):
        with pytest.raises(error, match="cannot be reached"):
            SiteRedis(work, gone.model_copy(update=changes)).ensure()


def certify(folder):
    """An authority, and certificates of it for the server (localhost) and for a client."""

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=site", "-days", "2")
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """`tls(work, **changes)`: settings of a Redis that asks for certificates and runs under our ACL."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None or shutil.which("openssl") is None:
        pytest.skip("needs openssl and a redis-server with TLS (Debian: apt-get install redis-server)")
    folder = tmp_path_factory.mktemp("tls")
    certify(folder)
    (folder / "users.acl").write_text(acl_text(PASSWORD))
    (folder / "password").touch(0o640)
    (folder / "password").write_text(PASSWORD + "\n")
    probe = (
        socket.socket()
    )  # held, without listening, until the server listens: no other process is given the port
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
    lines = [
        f"bind 127.0.0.1\nport 0\ntls-port {port}\ndir {folder}\naclfile {folder}/users.acl",
        'tls-auth-clients yes\nsave ""\nmaxmemory-policy noeviction',
        f"tls-ca-cert-file {folder}/ca.pem\ntls-cert-file {folder}/server.pem\ntls-key-file {folder}/server.key",
    ]
    (folder / "redis.conf").write_text("\n".join(lines) + "\n")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, str(folder / "redis.conf")], stdout=log, stderr=log)

    def listens():
        if process.poll() is not None:
            pytest.skip(f"{binary} has no TLS: {(folder / 'log').read_text()[-300:]}")
        with closing(socket.socket()) as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    def settings(work, **changes):
        files = {"ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "client.key"} | changes
        section = {name: file and folder / file for name, file in files.items()}
        section |= {"url": f"rediss://localhost:{port}/0", "username": "evalspan"}
        section |= {"password_file": folder / "password"}
        return Config(work_dir=work.root, redis=RedisConfig.model_validate(section))

    try:
        with probe:
            wait_until(listens)
        yield settings
    finally:
        process.terminate()
        process.wait(60)


def test_all_who_read_the_address_come_through_tls(tls, work):
    """Checked, published, and used by the work queue and the metric queue."""
    settings = tls(work)
    keeper_of(settings, cluster_of(settings)).ensure()
    assert WorkQueue(Link(work.redis_address), "e").snapshot().epoch is None
    assert MetricQueue(Link(work.redis_address), "e").gone(["score"]) == {"score": ""}
    assert work.redis_address.stat().st_mode & 0o777 == 0o600
