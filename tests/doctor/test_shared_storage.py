"""Laws of what the nodes of a cluster see: refused is only what this machine alone has."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.doctor import shared_storage
from coordinator.errors import OperatorError
from evaljobs.staging.capacity import MEMORY_FS, fs_type


@pytest.mark.parametrize(
    ("place", "fs", "own"),
    [
        ("/home/a/suite", "tmpfs", True),  # a diskless login node
        ("/dev/shm/suite", "tmpfs", True),
        ("/tmp/a", "ext4", True),
        ("/var/tmp/a", "overlay", True),
        ("/run/user/1000", "xfs", True),
        ("/tmp", "nfs4", False),
        ("/tmpfiles/a", "ext4", False),
        ("/home/a", "ext4", False),  # may be exported to the nodes
        ("/scratch", "lustre", False),
    ],
)
def test_own_is_memory_and_what_each_machine_has(place: str, fs: str, own: bool) -> None:
    """Node memory anywhere, temporary folders on a local disk; a disk elsewhere may be exported to the nodes."""
    assert shared_storage.is_own(Path(place), fs) is own


@pytest.mark.parametrize(
    ("addresses", "here"),
    [
        (["127.0.0.1", "127.0.0.2", "::1"], True),
        (["login", "login"], True),
        (["login", "10.0.0.7"], False),
        (["n1"], False),
        ([], True),  # Slurm did not say
    ],
)
def test_nodes_are_here_only_where_each_one_is(addresses: list[str], here: bool) -> None:
    """Each node's address is this machine's, by name or as a loopback address."""
    assert shared_storage.all_here(addresses, "login.cluster") is here


@pytest.fixture
def sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm with a node elsewhere, first in PATH; says in a file that it was asked."""
    place = tmp_path / "bin" / "sinfo"
    place.parent.mkdir()
    place.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\necho '127.0.0.1   '; echo '10.0.0.7   '\n")
    place.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place.parent}:/usr/bin:/bin")
    return place


def test_a_folder_that_nodes_cannot_see_is_refused_by_its_path(sinfo: Path, tmp_path: Path) -> None:
    """One line with the path that is named, and what to do; also for a link to it and a pattern in it."""
    place = Path("/dev/shm")
    if fs_type(place) not in MEMORY_FS:
        pytest.skip("no memory file system at /dev/shm")
    link = tmp_path / "link"
    link.symlink_to(place)
    for path in (str(place), str(link), f"{place}/*.jsonl"):
        with pytest.raises(OperatorError) as refused:
            shared_storage.check_shared(["/", path])
        assert path in str(refused.value)
        assert "storage that they share" in str(refused.value)


def test_slurm_is_asked_only_where_a_path_is_this_machines_own(sinfo: Path, tmp_path: Path) -> None:
    """Folders that nodes may see cost the controller nothing; a cluster that does not answer refuses nothing."""
    shared_storage.check_shared(["/", "/usr"])
    assert not (tmp_path / "asked").exists()
    sinfo.write_text("#!/bin/sh\nexit 1\n")
    shared_storage.check_shared(["/dev/shm"])
