"""A command of evalspan at a terminal of its own."""

import os
import pty
import select
import subprocess
import sys
import time

# so that Ctrl-C on it is a signal to the command
OWN_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """A command at a terminal of its own, 80 columns wide."""

    def __init__(self, folder, *arguments):
        self.said = ""
        self._keyboard, side = pty.openpty()
        environment = {
            **os.environ,
            "EVALSPAN_CONFIG": str(folder / "evalspan.toml"),
            "COLUMNS": "80",
            "TERM": "xterm-256color",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, sys.executable, "-m", "coordinator", *arguments, "--work-dir", str(folder / "work")],
            stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(side)

    def type(self, text):
        os.write(self._keyboard, text.encode())

    def until(self, law, what, deadline_s=120.0):
        end = time.monotonic() + deadline_s
        while not law():
            assert time.monotonic() < end, f"not within {deadline_s} s: {what}\n{self.said}"
            self._listen(0.1)

    def ends(self):
        self.until(lambda: self.process.poll() is not None, "the command ends")
        self._listen(0.0)
        return int(self.process.wait())

    def _listen(self, wait_s):
        while select.select([self._keyboard], [], [], wait_s)[0]:
            try:
                self.said += os.read(self._keyboard, 65536).decode(errors="replace")
            except OSError:  # the command's side is closed
                time.sleep(wait_s)
                return
            wait_s = 0.0
