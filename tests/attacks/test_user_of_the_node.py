"""Attacks of another user of the same node: decoys, and folders under foreseen names."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from support.with_root import USER, as_user

from coordinator.errors import EvalspanError
from coordinator.services.redis_server import RedisServer
from evaljobs.contract.paths import WorkPaths

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")
STRANGER = USER + 1


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
