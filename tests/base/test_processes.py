"""Laws of who lives and who has ended, on real processes."""

from __future__ import annotations

import subprocess
import sys

from dev_cluster.testing import wait_until

from coordinator.base import process_identity

# Its first thread ends; another one lives until it is killed.
HEADLESS = """
import ctypes, threading, time
threading.Thread(target=ctypes.CDLL(None).sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_has_ended_with_the_last_of_its_threads() -> None:
    """The kernel calls it a zombie before: a server that was killed holds its port until then."""
    process = subprocess.Popen([sys.executable, "-c", HEADLESS])
    try:

        def headless() -> bool:
            seen = process_identity.stat(process.pid)
            return seen is not None and seen.state == "Z"

        wait_until(headless)
        assert process.poll() is None
        known = process_identity.identify(process.pid)
        assert known is not None
        process_identity.end(known, patience=60.0)
        assert not process_identity.alive(known)
    finally:
        process.kill()
        process.wait()
