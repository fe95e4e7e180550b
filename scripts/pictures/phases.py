"""The picture of an evaluation's phases: names from the code's own types, and the ways between them.

Rule: a name that the code gains or loses stops the drawing, so that the picture is mended with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import get_args

from coordinator.evaluation.state import EntryStatus, NodeStatus, Phase
from pictures.svg import EDGE, WIDTH, Picture

Words = tuple[str, ...]
PHASES: dict[Phase, Words] = {
    Phase.RUNNING: ("build, stage,", "plan, infer, score"),
    Phase.WRITING: ("merge scores,", "end its jobs"),
    Phase.LEAVING: ("its jobs", "are ending"),
    Phase.ENDED: ("nothing of", "it is left"),
    Phase.CLOSING: ("fails what the reason", "concerns, scores the rest"),
}
TASKS: dict[EntryStatus, Words] = {
    "unbuilt": ("no requests", "yet"),
    "building": ("a CPU job", "makes them"),
    "built": ("its shards", "are run"),
    "scoring": ("all answers", "are there"),
    "scored": ("has its", "scores"),
    "failed": (),
}
NODES: dict[NodeStatus, Words] = {
    "offered": ("its GPUs", "are free"),
    "staging": ("a precursor", "copies"),
    "ready": ("trials", "may start"),
    "back-off": ("left alone", "for a while"),
    "withdrawn": (),
}


def draw() -> str:
    """The picture as SVG text. ValueError where the code has other phases or states than are drawn here."""
    drawn = (
        (set(PHASES), set(Phase)),
        (set(TASKS), set(get_args(EntryStatus))),
        (set(NODES), set(get_args(NodeStatus))),
    )
    for here, code in drawn:
        if here != code:
            raise ValueError(f"drawn or in the code, not both: {sorted(map(str, here ^ code))}")
    picture = Picture(
        "The phases of an evaluation, of each of its tasks, and of each node that it uses",
        "An evaluation goes from running to writing, leaving and ended; a reason to end or a cancellation leads through closing; "
        "a retry leads back to running. A task goes from unbuilt through building, built and scoring to scored, or to failed from "
        "any of these. A node goes from offered through staging to ready, and into back-off after failures, or is withdrawn.",
    )
    picture.text(EDGE, 28, "An evaluation", "h")
    _evaluation(picture, 40.0)
    picture.text(EDGE, 254, "Each of its tasks", "h")
    _row(picture, 266, {name: words for name, words in TASKS.items() if words}, "green")
    picture.text(
        EDGE,
        348,
        "Each but a scored one may become “failed”, with the reason; a retry begins it again.",
        "s soft",
    )
    picture.text(EDGE, 382, "Each node that it uses", "h")
    nodes: dict[str, Words] = {name: words for name, words in NODES.items() if words}
    _row(picture, 394, nodes, "blue")
    picture.text(EDGE, 476, "Each may be “withdrawn”; a new offer of its GPUs begins again.", "s soft")
    return picture.svg(492)


def _row(picture: Picture, y: float, states: Mapping[str, Words], cls: str) -> None:
    """States from left to right, each an arrow from the next; the way into back-off leads both ways."""
    gap = 18.0
    width = (WIDTH - 2 * EDGE - gap * (len(states) - 1)) / len(states)
    for number, (name, words) in enumerate(states.items()):
        x = EDGE + number * (width + gap)
        kind = "orange" if name == "back-off" else cls
        picture.box(x, y, width, 64, name, *words, cls=kind)
        if number and name != "back-off":
            picture.arrow((x - gap, y + 32), (x, y + 32))
        elif number:
            picture.arrow((x - gap, y + 22), (x, y + 22))
            picture.arrow((x, y + 42), (x - gap, y + 42))


def _evaluation(picture: Picture, y: float) -> None:
    """RUNNING to ENDED from left to right, CLOSING and the way back below."""
    places = {
        Phase.RUNNING: (EDGE, 128.0),
        Phase.WRITING: (180.0, 100.0),
        Phase.LEAVING: (318.0, 92.0),
        Phase.ENDED: (448.0, 98.0),
    }
    for phase, (x, width) in places.items():
        cls = "green" if phase is Phase.RUNNING else "panel"
        picture.box(x, y, width, 64, phase.name.lower(), *PHASES[phase], cls=cls)
    for before, after in pairwise(places):
        x, width = places[before]
        picture.arrow((x + width, y + 32), (places[after][0], y + 32))
    picture.box(138, y + 104, 178, 64, "closing", *PHASES[Phase.CLOSING], cls="orange")
    picture.arrow((108, y + 64), (108, y + 136), (138, y + 136))
    picture.lines(118, y + 82, ("a reason to end,", "a cancellation"), "s soft", step=14)
    picture.arrow((230, y + 104), (230, y + 64))
    picture.arrow((497, y + 64), (497, y + 182), (40, y + 182), (40, y + 64), cls="dash")
    picture.text(488, y + 176, "a retry of what failed", "s soft", anchor="end")
