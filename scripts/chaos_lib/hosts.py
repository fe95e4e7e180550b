"""The hosts of a cluster (its nodes, and the submit side) as a fault makes them: their clock, storage, network and locks.

The nodes share the machine's kernel, which has one clock and one network: clock and storage are broken by a library that the
Python processes of a host load (`shim.c`), the network by a packet filter on the host's control group.

Rule: prepared before a run's first process and calm after it; another cluster of the machine sees nothing of it.
"""

from __future__ import annotations

import shlex
import shutil
import socket
import struct
import subprocess
from pathlib import Path

from dev_cluster import daemons
from dev_cluster.api import Cluster, DevClusterError

LOGIN = "login"  # the submit side, where the coordinator runs
CGROUPS = Path("/sys/fs/cgroup")  # below which `nft` looks for control groups
UNTIL_BACK = -1
PAGE = struct.Struct("5q4056s")  # `control` of shim.c
# a node's own /etc, of which it sees its ld.so.preload alone
PRELOAD = """\
[ -e /etc/ld.so.preload ] && exit 0
mkdir -p {at}/upper {at}/work
cp /etc/hosts {at}/upper/hosts
echo {library} > {at}/upper/ld.so.preload
mount -t overlay -o lowerdir=/etc,upperdir={at}/upper,workdir={at}/work overlay /etc
"""
CUT = """\
table inet {name} {{
  chain out {{ type filter hook output priority 0; socket cgroupv2 level 1 "{group}" meta skuid {uid} counter drop; }}
  chain in {{ type filter hook input priority 0; socket cgroupv2 level 1 "{group}" tcp sport {port} counter drop; }}
}}
"""


class Hosts:
    """Hosts of one cluster. `close` after the cluster's end."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = cluster.dir / "chaos"
        self.library = self.folder / "shim.so"
        self._unified = next(
            (Path(words[1]) for words in map(str.split, Path("/proc/mounts").read_text().splitlines())
             if words[2] == "cgroup2"), CGROUPS
        )  # fmt: skip
        self._generation = 0

    def prepare(self) -> None:
        """Have the processes that hosts start from now on load the library, and jobs be in control groups of their nodes."""
        self._build()
        for name in (LOGIN, *self.cluster.nodes):
            holder = daemons.running(self.cluster.record, name)
            if holder is None:
                raise DevClusterError(f"{name} is down: it cannot be prepared")
            page = self._page(name)
            page.write_bytes(bytes(PAGE.size))
            script = PRELOAD.format(
                at=shlex.quote(str(self.folder / f"etc-{name}")), library=shlex.quote(str(self.library))
            )
            _run("nsenter", "-t", str(holder.pid), "-m", "--", "sh", "-ec", script)
        for name in self.cluster.nodes:
            group = self._group(name)
            group.mkdir(exist_ok=True)
            for pid in self.cluster.node_pids(name):
                (group / "cgroup.procs").write_text(str(pid))

    def _build(self) -> None:
        if self.library.exists():
            return
        if shutil.which("cc") is None or shutil.which("nft") is None:
            raise DevClusterError(
                "cc or nft is missing: apt-get install --no-install-recommends gcc libc6-dev nftables"
            )
        self.folder.mkdir(exist_ok=True)
        self.folder.chmod(0o755)
        source = Path(__file__).with_name("shim.c")
        _run(
            "cc", "-shared", "-fPIC", "-O1", f'-DCONTROL="{self.folder}"', "-o", str(self.library),
            str(source), "-ldl",
        )  # fmt: skip

    def _page(self, host: str) -> Path:
        return self.folder / (socket.gethostname() if host == LOGIN else host)

    def _group(self, node: str) -> Path:
        return self._unified / f"evalspan-{self.cluster.name}-{node}"

    def _table(self, node: str) -> str:
        return f"evalspan_{self.cluster.name}_{node}".replace("-", "_")

    # --- what is broken ----------------------------------------------------------------------------------------------

    def set(
        self, host: str, storage: Path | None = None, *, clock_s: int = 0, hold_s: int = 0, rate: int = 0,
        stale: bool = False,
    ) -> None:  # fmt: skip
        """What is broken on a host from now on, all else is whole. `storage`: the folder that is on the broken one; each call
        to it takes `hold_s` seconds, or with UNTIL_BACK until it is whole again.

        Files that were open while it was `stale` stay so for good.
        """
        self._generation += stale
        values = (clock_s, hold_s, rate, int(stale), self._generation, str(storage or "").encode())
        with self._page(host).open("r+b") as page:
            page.write(PAGE.pack(*values))

    def cut(self, node: str, port: int) -> None:
        """No packet of the user's jobs leaves the node, and none from `port` arrives."""
        group = self._group(node).relative_to(CGROUPS)
        rules = CUT.format(name=self._table(node), group=group, uid=self.cluster.record.uid, port=port)
        _run("nft", "-f", "-", text=rules)

    def join(self, node: str) -> int:
        """Undo `cut`; how many packets it dropped."""
        said = _run("nft", "list", "table", "inet", self._table(node)).split()
        _run("nft", "delete", "table", "inet", self._table(node))
        return sum(int(said[i + 1]) for i, word in enumerate(said) if word == "packets")

    def calm(self) -> None:
        """Mend everything; files that were open on broken storage are closed by then."""
        self._generation = 0
        for name in (LOGIN, *self.cluster.nodes):
            page = self._page(name)
            if page.exists():
                self.set(name)
        listed = _run("nft", "list", "tables").split() if shutil.which("nft") else []
        for node in self.cluster.nodes:
            if self._table(node) in listed:
                self.join(node)

    def close(self) -> None:
        for node in self.cluster.nodes:
            if self._group(node).exists():
                self._group(node).rmdir()


def _run(*argv: str, text: str | None = None) -> str:
    done = subprocess.run(argv, check=False, text=True, input=text, capture_output=True)
    if done.returncode != 0:
        raise DevClusterError(f"{argv[0]}: {done.stderr.strip()[-400:]}")
    return done.stdout
