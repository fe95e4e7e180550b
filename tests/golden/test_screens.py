"""What `watch`, `eval` and the daemon draw, at 40 and at 120 columns. The texts are snapshots; three laws hold at any width."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from support.goldens import Goldens
from support.screens import LONG_ID, NOW, drawn, ended, running

from coordinator.cli.screen.standing import Shown
from coordinator.runtime.summary import Halt, Node, Task, Timed

FAILED = Task(name="gsm8k", state="failed", error="no data [set]")
SCREENS = {
    "one": [Shown(running(LONG_ID, warnings=("a node is slow",)))],
    "many-lanes": [Shown(running(trials=96))],
    "several": [Shown(running(f"step-{step}-mini-0000{step}", step=step)) for step in (1000, 2000, 3000)],
    "waits": [
        Shown(running(trials=0, stage="waits", waits=(Timed(what="2 trials are pending", at=NOW - 190, why="jobs of higher priority go first (Priority)"),))),
        Shown(running("step-2000-mini-00002000", priority=-1, stage="waits", held=(Timed(what="es-1-build-a0", at=NOW + 9, why="MaxSubmitJobs"),))),
        Shown(running("step-3000-mini-00003000", waits_until=NOW + 61, nodes=(Node(name="n1", status="back-off", why="3 trials died", until=NOW + 61, times=2),), stragglers={"es-1-trial-n2-a0.3": "takes 3.1 times as long as the others"})),
    ],
    "failed": [
        Shown(running(tasks=(FAILED,), failed_jobs={f"es-1-trial-n1-a{i}": "CUDA out of memory" for i in range(2)})),
        Shown(running("step-2000-mini-00002000"), Halt("stopped", NOW - 45, "no process goes on with it")),
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("name", SCREENS)
@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_screen_fits_and_has_each_evaluation_once_with_its_whole_id(
    name: str, width: int, goldens: Goldens
) -> None:
    """No line but a command or an id is wider than the terminal."""
    runs = SCREENS[name]
    text = drawn(width, *runs, over=[Shown(ended())], below=["daemon: running"])
    ids = [one.summary.evaluation_id for one in runs] + ["step-900-core-00000000"]
    table = [line for line in text.splitlines() if not re.match(r"step-\S+: ", line)]
    for one in ids:
        assert one in text
        assert sum(line.startswith(one) and line.strip() != one for line in table) <= 1
    wide = [line.strip() for line in text.splitlines() if len(line) > width]
    assert all(line in ids or re.fullmatch(r"`[^`]+`[.;]?", line) for line in wide), wide
    if width != 80:
        told = "\n".join(line.rstrip() for line in text.splitlines())
        goldens.check(f"texts/screens/{name}-{width}.txt", f"{told}\n")
