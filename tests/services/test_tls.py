"""Laws of a site's Redis behind TLS: a real server that shows and asks for certificates."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until

from coordinator.config.schema import Config, RedisConfig
from coordinator.errors import OperatorError
from coordinator.runtime.wiring import cluster_of, keeper_of
from coordinator.services.metric_queue import MetricQueue
from coordinator.services.redis_server import acl_text
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue.work_queue import WorkQueue

PASSWORD = "secret"  # noqa: S105


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_certificates(folder: Path) -> None:
    """An authority, and certificates of it for the server (localhost) and for a client."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(
        folder, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=site", "-days", "2"
    )
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    for name in ("server", "client"):
        _openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """(folder of the certificates, port) of a Redis that asks for certificates and runs under our ACL."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None or shutil.which("openssl") is None:
        pytest.skip("needs openssl and a redis-server with TLS (Debian: apt-get install redis-server)")
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    (folder / "users.acl").write_text(acl_text(PASSWORD))
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

    def listens() -> bool:
        if process.poll() is not None:
            pytest.skip(f"{binary} has no TLS: {(folder / 'log').read_text()[-300:]}")
        with closing(socket.socket()) as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        with probe:
            wait_until(listens)
        yield folder, port
    finally:
        process.terminate()
        process.wait(60)


def config(site: tuple[Path, int], work: Path, **changes: object) -> Config:
    folder, port = site
    (folder / "password").write_text(PASSWORD + "\n")
    (folder / "password").chmod(0o640)
    section = {
        "url": f"rediss://localhost:{port}/0",
        "username": "evalspan",
        "password_file": folder / "password",
        "ca_file": folder / "ca.pem",
        "cert_file": folder / "client.pem",
        "key_file": folder / "client.key",
    }
    return Config(work_dir=work, redis=RedisConfig.model_validate(section | changes))


def test_all_who_read_the_address_come_through(site: tuple[Path, int], tmp_path: Path) -> None:
    """Checked, published, and used by the work queue and the metric queue."""
    settings = config(site, tmp_path / "work")
    work = WorkPaths(settings.work_dir)
    keeper = keeper_of(settings, cluster_of(settings))
    keeper.ensure()
    assert WorkQueue.connect(work.redis_address, "e").snapshot().epoch is None
    assert MetricQueue(work.redis_address, "e").known() == ()
    assert work.redis_address.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ca_file": None}, r"\[redis\] ca_file"),
        # how a refused client learns of it is the server's and the network's choice
        ({"cert_file": None, "key_file": None}, "cert_file|reset"),
    ],
    ids=["unknown authority", "no certificate"],
)
def test_what_is_missing_is_said(
    site: tuple[Path, int], tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    """One line that names the setting to give; nothing is published."""
    settings = config(site, tmp_path / "work", **changes)
    with pytest.raises(OperatorError, match=said):
        keeper_of(settings, cluster_of(settings)).ensure()
    assert not WorkPaths(settings.work_dir).redis_address.exists()
