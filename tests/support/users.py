"""An ordinary user of this machine, for tests that run as root."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

USER = 64321  # no user has this uid


def as_user(act: Callable[[], None]) -> None:
    """Do it in a process of the user's, forked from this one: his interpreter need not be readable to him."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            act()
        except BaseException:  # noqa: BLE001 (an assertion, too, is told to the parent)
            os.write(tell, traceback.format_exc().encode()[-4000:])
            os._exit(1)
        os._exit(0)
    os.close(tell)
    with os.fdopen(told) as file:
        said = file.read()
    assert os.waitpid(pid, 0)[1] == 0, said
