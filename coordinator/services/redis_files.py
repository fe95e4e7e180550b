"""The text of the embedded server's configuration and of its users. Pure; called by `redis_server`."""

from __future__ import annotations

import hashlib
from pathlib import Path

from evaljobs.queue.redis_client import RedisAddress

USER = "evalspan"

# The rules under which RQ 2.x, its unique jobs and the work queue were tested (tests/services, tests/queue).
ACL_RULES = (
    "~rq:* ~evalspan:* &rq:* &evalspan:* "
    "-@all +@read +@write +@transaction +@connection +@pubsub +@list +@hash +@set +@sortedset +@string +@stream "
    "+@keyspace +@blocking +@scripting -flushall -flushdb -keys -swapdb -@dangerous +info +time +client|list"
)


def acl_text(password: str) -> str:
    """Lines of an ACL file or a configuration: one user, whose password is kept as its SHA-256; the default user is off."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    return f"user default off resetpass resetkeys resetchannels -@all\nuser {USER} on #{digest} {ACL_RULES}\n"


def config_text(address: RedisAddress, listen: list[str]) -> str:
    """The server's configuration, which it reads from standard input; to be passed by `os.fsencode`."""
    lines = [
        "set-proc-title no",  # its command line goes on naming the work folder
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
    """A path as the format's double-quoted string. Letters are not escaped: the server reads no JSON escapes."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}
    return f'"{"".join(escapes.get(char, char) for char in str(path))}"'
