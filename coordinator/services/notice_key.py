"""The key of a work folder that signs the hook's notices in a Redis to which others may write.

Rule: `coordinator.hook` signs where it can read the key, and leaves its notice in the spool folder where it may not.
Called by `redis_server` before the address of a site's Redis is published, and by `intake.sources`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from contextlib import suppress

from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import write_atomic

KEY_BYTES = 32


def notice_key(paths: WorkPaths) -> bytes:
    """The key; made where there is none. OSError where the file system refuses."""
    with suppress(FileNotFoundError):
        if len(key := paths.notice_key.read_bytes()) >= KEY_BYTES:
            return key
    paths.redis.mkdir(mode=0o700, exist_ok=True)
    write_atomic(paths.notice_key, key := secrets.token_bytes(KEY_BYTES), mode=0o600)
    return key


def is_signed(notice: bytes, mac: bytes, key: bytes) -> bool:
    """Is `mac` the HMAC-SHA256 of the notice's bytes, in hex?"""
    return hmac.compare_digest(mac, hmac.new(key, notice, hashlib.sha256).hexdigest().encode())
