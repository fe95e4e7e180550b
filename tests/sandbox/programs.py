"""The programs of `data/programs.jsonl`: a row each, with the verdict that is expected and why.

`expected` is pass, fail, timeout or "no pass" (any verdict but a pass); `landlock`, where that level
differs; `leaves`, a shell command that fails where the program left something; the rest is a line of
`python -m evaljobs sandbox`. Names begin with the kind: right, wrong, unusual or hostile.
"""

import json
from pathlib import Path

_ABOUT = ("expected", "why", "landlock", "leaves")
ROWS = [json.loads(line) for line in Path(__file__).with_name("data").joinpath("programs.jsonl").open()]
# A file that no program may remove, looked for by one row's `leaves`.
CANARY = Path("/tmp/sbxadv_canary/keep")


def line_of(row, seconds):
    """What the command reads of a row."""
    return {name: value for name, value in row.items() if name not in _ABOUT} | {"timeout_seconds": seconds}


def checks():
    """Row's name → its command, with the file in place that none may remove."""
    CANARY.parent.mkdir(exist_ok=True)
    CANARY.write_text("keep")
    return {row["id"]: row["leaves"] for row in ROWS if "leaves" in row}
