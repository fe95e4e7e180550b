"""Run a precursor that stops (SIGSTOP) as it writes its first block: `python paused.py SPEC`. SIGCONT lets it go on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from evaljobs.contract.specs import StageSpec
from evaljobs.staging import precursor

_once = threading.Lock()


def _profiled(_frame: object, event: str, function: object) -> None:
    if event == "c_call" and getattr(function, "__name__", "") == "pwrite" and _once.acquire(blocking=False):
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    threading.setprofile(_profiled)
    sys.exit(precursor.main(StageSpec.model_validate_json(Path(sys.argv[1]).read_bytes())))
