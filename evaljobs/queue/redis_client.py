"""The published address of Redis, and clients for it.

Rule: the address is one file in the work folder, mode 0600, written atomically. Credentials are only in it (no command line,
no environment). Every client has short socket timeouts and health checks, so an unreachable Redis is an error within seconds
and never a hang. Called from the coordinator, `work_queue` and `judges`.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import redis
from pydantic import Field, ValidationError
from redis.backoff import NoBackoff
from redis.retry import Retry

from evaljobs.contract.specs import SCHEMA_VERSION, StateRecord
from evaljobs.contract.storage import write_atomic

T = TypeVar("T")
SOCKET_SECONDS = 5.0  # for one command; a queue script takes milliseconds
HEALTH_SECONDS = 15  # idle time before a connection is pinged, since firewalls drop silent ones
DOCS_HINT = "see docs/site/redis.md"


class QueueUnavailable(Exception):  # noqa: N818 (a state of the world that callers wait out, not a fault of theirs)
    """Redis is unreachable, refuses the connection, or has no address yet. The message says what to do."""


class RedisAddress(StateRecord):
    """A socket, or host and port, with credentials. `repr` omits the password."""

    schema_version: int = SCHEMA_VERSION
    socket: str | None = None
    host: str | None = None
    port: int = 6379
    db: int = 0
    username: str | None = None
    password: str | None = Field(default=None, repr=False)
    tls: bool = False
    ca_file: str | None = None  # PEM file; None: the system's authorities
    cert_file: str | None = None  # PEM file: client certificate, where the server requires one
    key_file: str | None = None

    @classmethod
    def from_url(cls, url: str, **given: str | None) -> RedisAddress:
        """Parse `redis://[user[:password]@]host[:port][/db]`, `rediss://…` (TLS) or `unix:///path`.

        `given`: `username`, `password`, `ca_file`, `cert_file`, `key_file`; set values override the URL. Raise ValueError,
        which never contains the password.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.query or parts.fragment:
            raise ValueError("the Redis URL has options after its database: set [redis] ca_file etc. instead")
        fields: dict[str, Any] = {
            "username": parts.username and urllib.parse.unquote(parts.username),
            "password": parts.password and urllib.parse.unquote(parts.password),
        }
        fields |= {name: value for name, value in given.items() if value}
        if parts.scheme != "rediss" and any(name.endswith("_file") for name in fields):
            raise ValueError("[redis] ca_file, cert_file and key_file are for a rediss:// Redis URL")
        if ("cert_file" in fields) != ("key_file" in fields):
            raise ValueError("[redis] cert_file and key_file of a rediss:// Redis URL go together")
        if parts.scheme == "unix":
            if not parts.path:
                raise ValueError("a unix:// Redis URL needs a path: unix:///run/redis.sock")
            return cls(socket=parts.path, **fields)
        if parts.scheme not in ("redis", "rediss"):
            raise ValueError(
                f"Redis URL scheme {parts.scheme!r} is not known: use redis://, rediss:// or unix://"
            )
        if not parts.hostname:
            raise ValueError("the Redis URL names no host: redis://HOST:6379/0")
        path = parts.path.strip("/")
        if path and not path.isdigit():
            raise ValueError(f"the Redis URL ends in {path!r}, which is not a database number")
        return cls(
            host=parts.hostname,
            port=parts.port or 6379,
            db=int(path or 0),
            tls=parts.scheme == "rediss",
            **fields,
        )

    @property
    def where(self) -> str:
        """The address without credentials, for messages."""
        if self.socket is not None:
            return self.socket
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.db}"


def publish_address(address: RedisAddress, file: Path) -> None:
    """Write the address file atomically, readable by its owner only."""
    write_atomic(file, address.model_dump_json(exclude_none=True).encode(), mode=0o600)


def read_address(file: Path) -> RedisAddress:
    """Read the published address. Raise QueueUnavailable if there is none or another version wrote it."""
    try:
        return RedisAddress.model_validate_json(file.read_bytes())
    except OSError as error:
        raise QueueUnavailable(f"the Redis address in {file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise QueueUnavailable(f"{file} is not a Redis address: {first['loc']}: {first['msg']}") from error


def make_client(address: RedisAddress, *, seconds: float = SOCKET_SECONDS) -> redis.Redis:
    """Create a client, not yet connected. `seconds`: longest wait for a command or connection.

    It never retries: callers decide whether a command may be repeated.
    """
    options: dict[str, Any] = {
        "db": address.db,
        "username": address.username,
        "password": address.password,
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "health_check_interval": HEALTH_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # one reply format on every server from Redis 6 to Valkey 9
    }
    if address.socket is not None:
        return redis.Redis(unix_socket_path=address.socket, **options)
    if address.tls:
        options |= {
            "ssl": True,
            "ssl_ca_certs": address.ca_file,
            "ssl_certfile": address.cert_file,
            "ssl_keyfile": address.key_file,
        }
    return redis.Redis(
        host=address.host or "localhost",
        port=address.port,
        socket_keepalive=True,
        **options,
    )


@lru_cache(maxsize=1)
def shared_client(address: RedisAddress) -> redis.Redis:
    """Return this process's only client of an address, so that connections do not grow with evaluations.

    Its pool may be used from threads and after a fork. It is never closed.
    """
    return make_client(address)


def metric_queue(evaluation_id: str) -> str:
    """Return RQ's name of an evaluation's queue of metric jobs. One each: RQ pops a job of a single queue through a list of
    popped jobs that have not begun.
    """
    return f"evalspan-{evaluation_id}"


@contextmanager
def explain_errors(where: str) -> Iterator[None]:
    """Turn Redis's errors into QueueUnavailable, with what to do next."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        raise QueueUnavailable(explain_error(error, where)) from error


class Link:
    """This process's connection to the published address, wherever Redis moves. Does nothing before the first call."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._address: RedisAddress | None = None

    def call(self, effect: Callable[[redis.Redis], T]) -> T:
        """Call `effect` with the client; once more after a broken connection, at the currently published address, since a
        restarted server breaks idle connections. Any other error is raised at once, as QueueUnavailable.
        """
        try:
            return self._once(effect)
        except QueueUnavailable as error:
            if not isinstance(error.__cause__, (redis.ConnectionError, OSError)):
                raise
        self._address = None
        return self._once(effect)

    def _once(self, effect: Callable[[redis.Redis], T]) -> T:
        self._address = self._address or read_address(self._file)
        with explain_errors(self._address.where):
            return effect(shared_client(self._address))


def explain_error(error: Exception, where: str) -> str:
    """Return one line: what Redis at `where` did, and what to do next."""
    text = str(error)
    for signs, words in _CAUSES:
        if any(sign in text if isinstance(sign, str) else isinstance(error, sign) for sign in signs):
            return f"Redis at {where} {words}".format(text=text)
    return f"Redis at {where}: {text}"


# (error classes and marks in the text, message): the first match counts. Marks are needed because
# errors from scripts and pipelines may lose their class.
_CAUSES: tuple[tuple[tuple[type[Exception] | str, ...], str], ...] = (
    (
        ("NOAUTH", "Authentication required"),
        f"needs a password: set [redis] username and password_file ({DOCS_HINT})",
    ),
    (
        (redis.AuthenticationError, "WRONGPASS"),
        f"refuses our user or password: {{text}} Correct [redis] username and password_file ({DOCS_HINT})",
    ),
    (
        (redis.exceptions.NoPermissionError, "NOPERM"),
        f"does not let our user do what is needed: {{text}}; {DOCS_HINT} for the ACL",
    ),
    ((redis.exceptions.OutOfMemoryError, "OOM command"), "is full: raise its maxmemory ({text})"),
    ((redis.exceptions.ReadOnlyError, "READONLY"), "is a read-only replica: use the primary's address"),
    (
        ("CERTIFICATE_VERIFY_FAILED",),
        "presents a certificate that cannot be verified: set [redis] ca_file, and use the certificate's name in url ({text})",
    ),
    (
        ("CERTIFICATE_REQUIRED", "certificate required", "EOF occurred in violation of protocol"),
        "ends the TLS connection: does it ask for a certificate ([redis] cert_file, key_file)? ({text})",
    ),
    (
        (redis.TimeoutError,),
        "does not answer in time: check that it is running and that no firewall blocks it ({text})",
    ),
    (
        (redis.ConnectionError, OSError),
        "cannot be reached: check that it is running and that its address is right ({text})",
    ),
)


def used_memory(address_file: Path, seconds: float = 1.0) -> float | None:
    """Return the bytes that the Redis of this address uses; None if it does not answer in `seconds`."""
    try:
        with make_client(read_address(address_file), seconds=seconds) as link:
            info: Any = link.info("memory")
            return float(info["used_memory"])
    except (redis.RedisError, OSError, QueueUnavailable, KeyError):
        return None
