"""Attacks of another user of the same node who may not write to the work folder: what can be read, held and overheard."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
import redis
from dev_cluster.testing import wait_until
from support.daemons import daemon
from support.loops import another
from support.simulated.parts import record
from support.with_root import USER, as_user, needs_open_code

from coordinator.config.schema import Config
from coordinator.intake.work_folder import open_folder
from coordinator.runtime.work_lock import DAEMON, WorkLock
from coordinator.services.redis_server import RedisServer
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")
STRANGER = USER + 1


@needs_open_code
@as_root
def test_another_user_sees_nothing_of_a_new_work_folder_and_of_its_files(shared: Path) -> None:
    """Made under the widest umask: folders 0700, files 0600, from the root of the work folder down."""
    work = shared / "home" / "work"

    def make() -> None:
        os.umask(0)
        open_folder(work, None)
        ears = daemon(work, Config(work_dir=work))
        with ears.coordinator.in_charge():
            ears.coordinator.accept(another(record(), 1))
            ears.coordinator.tick()
            ears.tick()

    daemon(shared / "imports")
    as_user(make)
    wide = [
        f"{path.relative_to(shared)} {stat.S_IMODE(path.lstat().st_mode):o}"
        for path in (work, *work.rglob("*"))
        if path.lstat().st_mode & 0o077 and not path.is_symlink()
    ]
    assert wide == []


@as_root
def test_a_reader_of_the_work_folder_keeps_no_daemon_from_starting(shared: Path) -> None:
    """A lock on a file asks for no right to write to it: each user who may open it may hold it."""
    work = WorkPaths(shared / "home" / "work")

    def begin() -> None:
        open_folder(work.root, None)
        WorkLock(work.lock).acquire(DAEMON)

    as_user(begin)
    held, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become(STRANGER)
            with contextlib.suppress(OSError):
                fcntl.flock(os.open(work.lock, os.O_RDONLY), fcntl.LOCK_EX)
            os.write(tell, b"x")
            time.sleep(60)
        finally:
            os._exit(0)
    try:
        os.read(held, 1)

        def act() -> None:
            lock = WorkLock(work.lock)
            lock.acquire(DAEMON)
            lock.release()

        as_user(act)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def squatter(port: int, heard: list[bytes]) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port))

    def listen() -> None:
        with listener:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(2)
                    try:
                        heard.append(connection.recv(1 << 16))
                        connection.sendall(b"+OK\r\n" * 20)
                    except OSError:
                        pass

    threading.Thread(target=listen, daemon=True).start()
    return listener


def test_a_password_that_a_squatter_of_the_port_was_told_opens_nothing(tmp_path: Path) -> None:
    """The server has ended, and a stranger's program listens at its port: clients tell it the password before they follow."""
    work = WorkPaths(tmp_path)
    server = RedisServer(work)
    before, heard = server.ensure(), list[bytes]()
    os.kill(server.pid() or 0, 9)
    wait_until(lambda: server.pid() is None)
    wait_until(lambda: bindable(before.port))
    listener = squatter(before.port, heard)
    try:
        with (
            redis_client.client(before, seconds=2.0) as client,
            contextlib.suppress(redis.RedisError, OSError),
        ):
            client.ping()
        after = server.ensure()
        assert before.password.encode() in b"".join(heard)
        stolen = after.model_copy(update={"password": before.password})
        with (
            redis_client.client(stolen) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        server.stop()


def bindable(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
