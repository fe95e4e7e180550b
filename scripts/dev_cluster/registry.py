"""Which clusters are on this machine: one JSON file each in `/run/evalspan-dev`, changed under one lock.

Rule: the file is written before anything is started and removed last, so that `down` finds whatever `up` left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dev_cluster.procs import Proc
from dev_cluster.site_view import Exposure
from dev_cluster.spec import ClusterSpec, DevClusterError, Layout

HOME = Path("/run/evalspan-dev")
# Below Linux's ephemeral ports (32768 and up), so that no client connection takes one by chance.
PORTS = range(17000, 32000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All that is needed to use or end a cluster. `owner` is the process that shall not outlive it, if any."""

    spec: ClusterSpec
    root: Path
    base_port: int
    user: str
    uid: int
    gid: int
    python: Path
    repo: Path
    exposures: tuple[Exposure, ...]
    owner: Proc | None
    warnings: tuple[str, ...] = ()  # checkouts of earlier versions ask for it

    @property
    def layout(self) -> Layout:
        return Layout(root=self.root)

    @property
    def ports(self) -> range:
        """slurmctld's, one a node, then with accounting slurmdbd's and its database's."""
        return range(self.base_port, self.base_port + self.spec.ports)


@contextlib.contextmanager
def locked(which: str = "lock") -> Iterator[None]:
    """Hold a machine-wide lock of these clusters; not re-entrant."""
    (HOME / "stage").mkdir(parents=True, exist_ok=True)
    with (HOME / which).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _path(name: str) -> Path:
    return HOME / f"{name}.json"


def write(record: Record) -> None:
    part = _path(record.spec.name).with_suffix(".part")
    data = dataclasses.asdict(record)
    # checkouts of other versions read it, too: they need not know a field that is as it always was
    default = dataclasses.asdict(ClusterSpec())
    data["spec"] = {key: value for key, value in data["spec"].items() if value != default[key]}
    part.write_text(json.dumps(data, default=str, indent=1) + "\n")
    part.replace(_path(record.spec.name))


def read(name: str) -> Record | None:
    try:
        data = json.loads(_path(name).read_text())
    except FileNotFoundError:
        return None
    known = {field.name for field in dataclasses.fields(ClusterSpec)}
    parsed = {
        "spec": ClusterSpec(**{key: value for key, value in data["spec"].items() if key in known}),
        "exposures": tuple(Exposure(**{key: Path(e[key]) for key in e}) for e in data["exposures"]),
        "owner": None if data["owner"] is None else Proc(**data["owner"]),
        "warnings": tuple(data["warnings"]),
    }
    return Record(**{**data, **{key: Path(data[key]) for key in ("root", "python", "repo")}, **parsed})


def remove(name: str) -> None:
    _path(name).unlink(missing_ok=True)


def everything() -> list[Record]:
    """All clusters on this machine, by name."""
    found = [read(path.stem) for path in sorted(HOME.glob("*.json"))]
    return [record for record in found if record is not None]


def choose_ports(count: int) -> int:
    """First of `count` neighbouring free ports. Call it under the lock."""
    reserved = {port for record in everything() for port in record.ports}
    base = PORTS.start
    while base + count <= PORTS.stop:
        taken = [p for p in range(base, base + count) if p in reserved or not _free(p)]
        if not taken:
            return base
        base = taken[-1] + 1
    raise DevClusterError(
        f"no {count} neighbouring ports are free in {PORTS.start}-{PORTS.stop}: end another cluster"
    )


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - slurmd listens on all addresses, so that is what to try
        except OSError:
            return False
    return True
