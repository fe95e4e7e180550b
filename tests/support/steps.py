"""Ends a process before a given step on the file system, to show what a kill leaves."""

import itertools
import os
import sys


def killed_at(step, act):
    """Run `act` in a process that ends before its `step`th step on the file system. False where it was done by then."""
    pid = os.fork()
    if pid == 0:
        left = itertools.count(step, -1)

        def hook(event, _arguments):
            if (event == "open" or event.startswith(("os.", "shutil."))) and next(left) == 0:
                os._exit(9)

        sys.addaudithook(hook)
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
