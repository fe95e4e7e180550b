"""Makes processes that an engine spawns end with the process that started them, however that ends.

Rule: multiprocessing runs the main module's name in each spawned process before anything else. Within `tie_processes` that name is
this module's, which asks the kernel for SIGKILL at the parent's end. This also covers processes of these processes. Called
from `vllm`, and from `scoring` for its workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator

from evaljobs.staging import segments

PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals, parent: int) -> None:
    """Have the kernel send this process the signal `number` when its parent dies (Linux). `parent`: the parent's pid."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call above
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def tie_processes() -> Iterator[None]:
    """Tie processes that multiprocessing spawns within the context to the life of this one."""
    main = sys.modules["__main__"]
    before = main.__spec__
    main.__spec__ = importlib.util.find_spec("evaljobs.trial.engines.tied")
    try:
        yield
    finally:
        main.__spec__ = before


if __name__ == "__mp_main__":
    die_with_parent(signal.SIGKILL, os.getppid())
    segments.name_ours()
