"""slurmdbd and its MariaDB, for a cluster with accounts and limits.

Rule: both are processes of the cluster, with their data below its folder. A server of the machine is not touched.
"""

from __future__ import annotations

import shutil
import socket

from dev_cluster import daemons, real_site
from dev_cluster.registry import Record
from dev_cluster.spec import DevClusterError

PACKAGES = "slurmdbd mariadb-server"
INSTALL_SECONDS = 300.0  # longest time in which MariaDB makes its data folder
SQL = (
    "create database if not exists slurm_acct_db; create user if not exists slurm@localhost identified by 'slurm'; "
    "create user if not exists slurm@127.0.0.1 identified by 'slurm'; "
    "grant all on slurm_acct_db.* to slurm@localhost; grant all on slurm_acct_db.* to slurm@127.0.0.1;"
)


def check_machine() -> None:
    """Refuse early, with the way out."""
    for tool in ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb"):
        if shutil.which(tool, path=daemons.DAEMON_PATH) is None:
            raise DevClusterError(f"{tool} is missing: apt-get install --no-install-recommends {PACKAGES}")


def start(record: Record) -> None:
    """Start what does not run of the database and slurmdbd, and name the cluster there. slurmctld starts after it, then
    `make_accounts`.
    """
    layout, port = record.layout, record.base_port + 1 + len(record.spec.node_names)
    layout.database.mkdir(mode=0o755, exist_ok=True)
    shutil.chown(layout.database, "mysql", "mysql")
    data = f"--datadir={layout.database}/data"
    common = ["--no-defaults", "--user=mysql", data]
    if not (layout.database / "data").exists():
        made = ["mariadb-install-db", *common, "--skip-test-db", "--auth-root-authentication-method=normal"]
        daemons.command(record, *made, seconds=INSTALL_SECONDS)
    server = ["mariadbd", *common, f"--socket={layout.database}/socket", f"--pid-file={layout.database}/pid"]
    server += ["--bind-address=127.0.0.1", f"--port={port + 1}", "--innodb-buffer-pool-size=64M"]
    _spawned(record, "database", server, port + 1)
    client = ["mariadb", "--no-defaults", f"--socket={layout.database}/socket", "--user=root", "-e", SQL]
    daemons.command(record, *client)
    conf = layout.conf / "slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(real_site.SLURMDBD.format(layout=layout, port=port, database_port=port + 1))
    _spawned(record, "slurmdbd", ["slurmdbd", "-D"], port)
    if not daemons.command(record, "sacctmgr", "-n", "list", "cluster", record.spec.name).strip():
        _sacctmgr(record, "add", "cluster", record.spec.name)


def make_accounts(record: Record) -> None:
    """The account, its QOS and the user. slurmctld has told slurmdbd by then that GPUs are counted."""
    for command in real_site.account_commands(record.spec.name, record.user):
        _sacctmgr(record, *command)


def modify(record: Record, kind: str, name: str, *values: str) -> None:
    """Set limits or other values of a user, account or QOS, as `sacctmgr` takes them."""
    _sacctmgr(record, "modify", kind, name, "set", *values)


def set_default_qos(record: Record, name: str) -> None:
    """The QOS of the user's jobs that name none."""
    modify(record, "user", record.user, f"defaultqos={name}")


def _spawned(record: Record, part: str, argv: list[str], port: int) -> None:
    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    if daemons.running(record, part) is None:
        daemons.spawned(record, part, argv, log=record.layout.log / f"{part}.out", ready=answers)


def _sacctmgr(record: Record, *words: str) -> None:
    daemons.command(record, "sacctmgr", "-i", *words)
