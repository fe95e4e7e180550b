"""Attacks of another user of the same node: decoys, and folders under foreseen names."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.with_root import USER, as_user, needs_open_code

from coordinator.base import process_identity
from coordinator.errors import EvalspanError
from coordinator.services import redis_server
from coordinator.services.redis_server import RedisServer
from evaljobs.contract.paths import WorkPaths

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")
STRANGER = USER + 1


@needs_open_code
@as_root
def test_a_decoy_of_the_server_is_left_alone_and_keeps_no_server_from_starting(shared: Path) -> None:
    """A stranger's process with the server's command line, which names the work folder's configuration."""
    work = WorkPaths(shared / "home" / "work")
    process_identity.boot_id()  # codecs are imported before a process becomes another user
    decoy = shared / "stranger" / redis_server.binary().name
    config = work.redis.absolute() / "valkey.conf"
    pid = os.fork()
    if pid == 0:
        become(STRANGER)
        os.execv(  # noqa: S606
            "/bin/bash",
            [str(decoy), "-c", "sleep 60; true", str(config)],
        )
    try:
        wait_until(lambda: str(config).encode() in Path(f"/proc/{pid}/cmdline").read_bytes())

        def act() -> None:
            started = time.monotonic()
            RedisServer(work)._end_unrecorded()
            assert time.monotonic() - started < redis_server.STOP_SECONDS

        as_user(act)
        found = process_identity.identify(pid)
        assert found is not None
        RedisServer(work)._end_unrecorded()  # by root, who could end it
        assert process_identity.identify(pid) == found
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


@as_root
@pytest.mark.parametrize("plant", ["a link to a folder of the user's", "a folder", "a file"])
def test_a_squatter_of_the_sockets_folder_gets_no_socket(plant: str, shared: Path) -> None:
    """Work folders with long paths have their socket in /tmp, under a name that all can foresee."""
    work = WorkPaths(shared / "home" / ("w" * 120))

    def foreseen() -> Path:
        path = os.fsencode((work.redis / "redis.sock").absolute())
        return Path(f"/tmp/evalspan-{USER}-{hashlib.sha256(path).hexdigest()[:16]}")

    place = foreseen()
    (shared / "home" / "own").mkdir()
    os.chown(shared / "home" / "own", USER, USER)
    match plant:
        case "a folder":
            place.mkdir(mode=0o777)
        case "a file":
            place.touch()
        case _:
            place.symlink_to(shared / "home" / "own")
    os.lchown(place, STRANGER, STRANGER)

    def act() -> None:
        with pytest.raises((EvalspanError, OSError)):
            RedisServer(work, "unix")._socket_path()

    try:
        as_user(act)
        assert list((shared / "home" / "own").iterdir()) == []
    finally:
        place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
