"""slurmdbd and its MariaDB, for a cluster with accounts and limits.

Rule: both are processes of the cluster, with their data below its folder. A server of the machine is not touched.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Sequence

from dev_cluster import daemons, real_site
from dev_cluster.registry import Record
from dev_cluster.spec import DevClusterError

PACKAGES = "slurmdbd mariadb-server"
COMMAND_SECONDS = 60.0  # longest time of one command of MariaDB or sacctmgr
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
    """Start the database and slurmdbd, and name the cluster there. slurmctld starts after it, then `make_accounts`."""
    port = record.base_port + 1 + len(record.spec.node_names)
    _start_database(record, port + 1)
    _start_slurmdbd(record, port)
    _sacctmgr(record, ["add", "cluster", record.spec.name])


def make_accounts(record: Record) -> None:
    """The account, its QOS and the user. slurmctld has told slurmdbd by then that GPUs are counted."""
    for command in real_site.account_commands(record.spec.name, record.user):
        _sacctmgr(record, command)


def modify(record: Record, kind: str, name: str, *values: str) -> None:
    """Set limits or other values of a user, account or QOS, as `sacctmgr` takes them."""
    _sacctmgr(record, ["modify", kind, name, "set", *values])


def set_default_qos(record: Record, name: str) -> None:
    """The QOS of the user's jobs that name none."""
    modify(record, "user", record.user, f"defaultqos={name}")


def _start_database(record: Record, port: int) -> None:
    layout = record.layout
    layout.database.mkdir(mode=0o755, exist_ok=True)
    shutil.chown(layout.database, "mysql", "mysql")
    data = layout.database / "data"
    if not data.exists():
        made = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}"]
        made += ["--skip-test-db", "--auth-root-authentication-method=normal"]
        _run(record, made, seconds=INSTALL_SECONDS)
    log = layout.log / "database.log"
    argv = real_site.database_argv(layout, port)
    daemons.spawned(record, "database", argv, log=log, ready=lambda: _answers(port))
    client = ["mariadb", "--no-defaults", f"--socket={layout.database}/socket", "--user=root", "-e", SQL]
    _run(record, client)


def _start_slurmdbd(record: Record, port: int) -> None:
    conf = record.layout.conf / "slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(real_site.slurmdbd_conf(record.layout, port))
    log = record.layout.log / "slurmdbd.out"
    daemons.spawned(record, "slurmdbd", ["slurmdbd", "-D"], log=log, ready=lambda: _answers(port))


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _sacctmgr(record: Record, words: Sequence[str]) -> None:
    _run(record, ["sacctmgr", "-i", *words])


def _run(record: Record, argv: Sequence[str], *, seconds: float = COMMAND_SECONDS) -> None:
    try:
        done = subprocess.run(
            argv, check=False, text=True, capture_output=True, env=daemons.daemon_env(record), timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise DevClusterError(f"{argv[0]} did not end in {seconds:g} s") from error
    if done.returncode != 0:
        raise DevClusterError(f"{' '.join(argv[:4])}: {' '.join((done.stderr + done.stdout).split())[-400:]}")
