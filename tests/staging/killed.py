"""Run a precursor that is killed (SIGKILL) at its n-th step; a step is a change of names, a lock, or a block written.

python killed.py STEP SPEC      STEP 0: run to the end and print the number of steps
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from pathlib import Path

from evaljobs.contract.specs import StageSpec
from evaljobs.staging import precursor

STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.utime", "fcntl.flock"}


def main(step: int, place: Path) -> int:
    spec = StageSpec.model_validate_json(place.read_bytes())
    counter = itertools.count(1)
    last = 0

    def took() -> None:
        nonlocal last
        last = next(counter)
        if last == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def audited(event: str, _: object) -> None:
        if event in STEPS:
            took()

    def profiled(_: object, event: str, function: object) -> None:
        if event == "c_call" and getattr(function, "__name__", "") == "pwrite":
            took()

    sys.addaudithook(audited)
    threading.setprofile(profiled)
    status = precursor.main(spec)
    print(last)  # noqa: T201
    return status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
