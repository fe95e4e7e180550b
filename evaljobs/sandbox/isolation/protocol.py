"""Messages between a lane's supervisor and its zygote.

A job on the stream socket is HEADER, then the body, JSON for the checker. HEADER has the length of
the body in bytes, timeout in ms, address space in MiB, and flags. Each message on the verdict
socket is one JSON object: {"ready"} or {"error"} once, then two per job. The checker sends
{"verdict", "reason"}, unless it was killed. The zygote sends {"end", "timed_out", "seconds",
"status"} when the job's processes are reaped.
"""

from __future__ import annotations

import struct
from typing import Final

HEADER: Final = struct.Struct("!IIII")
STDIO: Final = 1  # flag: the program reads standard input and its output is compared
NUMPY: Final = 2  # flag: load numpy in the zygote, so that each fork has it
SETUP_FAILED: Final = 97  # exit status of a candidate that could not be isolated
