"""One job of a peer, in the standard library alone: prepare, read the weights, load, infer, and maybe score.

Rule: jobs that read on one node share its link to storage equally, which they find out by counting each other's marks,
as the simulator's `_Nic` does. Started as `python -I -S`: as cheap as can be.
"""

import json
import os
import sys
import time
from pathlib import Path

LOOK_SECONDS = 0.02


def read_weights(folder: Path, name: str, seconds: float) -> None:
    """Take `seconds` of a sole reader's time on this node's link."""
    marks = folder / "reading" / os.environ["SLURMD_NODENAME"]
    marks.mkdir(parents=True, exist_ok=True)
    (marks / name).touch()
    left, at = seconds, time.monotonic()
    while left > 0:
        readers = sum(1 for _ in marks.iterdir())
        time.sleep(min(LOOK_SECONDS, left * readers))
        now = time.monotonic()
        left, at = left - (now - at) / readers, now
    (marks / name).unlink()


if __name__ == "__main__":
    started = time.time()
    folder, name = Path(sys.argv[1]), sys.argv[2]
    job = json.loads((folder / "jobs" / name).read_text())
    time.sleep(job["preprocess"])
    if job["storage"]:
        read_weights(folder, name, job["storage"])
    time.sleep(job["load"] + job["infer"])
    inferred = time.time()
    time.sleep(job["metric"])
    unnamed = folder / "done" / f".{name}"
    unnamed.write_text(json.dumps({"started": started, "inferred": inferred, "ended": time.time()}))
    unnamed.rename(folder / "done" / name)
