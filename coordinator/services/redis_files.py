"""The text of the embedded server's configuration file and ACL file. Pure; `redis_server` writes the files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from evaljobs.queue.redis_client import RedisAddress

USER = "evalspan"

# The rules under which RQ 2.x, its unique jobs, the work queue and the trigger stream were tested (tests/services, tests/queue).
ACL_RULES = (
    "~rq:* ~evalspan:* &rq:* &evalspan:* "
    "-@all +@read +@write +@transaction +@connection +@pubsub +@list +@hash +@set +@sortedset +@string +@stream "
    "+@keyspace +@blocking +@scripting -flushall -flushdb -keys -swapdb -@dangerous +info +time +client|list"
)


def acl_text(password: str) -> str:
    """The ACL file: one user, whose password is kept as its SHA-256; the default user is off."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    return f"user default off resetpass resetkeys resetchannels -@all\nuser {USER} on #{digest} {ACL_RULES}\n"


def config_text(folder: Path, address: RedisAddress, listen: list[str]) -> str:
    """The server's configuration file, to be written with `os.fsencode`."""
    # File WORK_DIR/redis/data/…: data of the embedded Redis, an append-only file; rewritten at 64 MB | the embedded Redis | stays
    # File WORK_DIR/redis/users.acl: user of the embedded Redis, with the digest of the password | the coordinator | stays
    # File WORK_DIR/redis/valkey.conf: configuration of the embedded Redis | the coordinator | written anew at each start
    # File WORK_DIR/redis/valkey.log: log of the embedded Redis | the embedded Redis | stays
    # File WORK_DIR/redis/valkey.pid: process id of the embedded Redis | the embedded Redis | at its end
    lines = [
        f"dir {_quoted(folder.absolute() / 'data')}",
        f"aclfile {_quoted(folder.absolute() / 'users.acl')}",
        f"pidfile {_quoted(folder.absolute() / 'valkey.pid')}",
        "set-proc-title no",  # its command line goes on naming the configuration file, and so the work folder
        f"logfile {_quoted(folder.absolute() / 'valkey.log')}",
        "loglevel notice",
        "daemonize no",
        "appendonly yes",
        "appendfsync everysec",  # writes of the last second may be lost; the coordinator repeats them
        "aof-load-truncated yes",
        'save ""',
        "maxmemory-policy noeviction",
        "tcp-keepalive 30",
        "timeout 0",
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
