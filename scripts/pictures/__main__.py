"""Draws the pictures of docs/explanation into docs/pictures, and prints the figures that packing.md quotes:

scripts/draw-pictures                              # those that follow from the code and from shipped instances
scripts/draw-pictures evalspan-work/EVALUATION     # and, from an evaluation that has ended, time.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pictures import flows, measured, packing, phases

OUT = Path(__file__).parents[2] / "docs" / "pictures"
DRAWN: Mapping[str, Callable[[], str]] = {
    "staging.svg": flows.staging,
    "packing.svg": packing.draw,
    "exactness.svg": flows.exactness,
    "machine.svg": flows.machine,
    "phases.svg": phases.draw,
}


def main(evaluations: list[str]) -> None:
    """Write all pictures; time.svg where an evaluation's folder is given."""
    for name, draw in DRAWN.items():
        (OUT / name).write_text(draw(), encoding="utf-8")
    if evaluations:
        (OUT / "time.svg").write_text(measured.draw(Path(evaluations[0])), encoding="utf-8")
    print(json.dumps(packing.figures(), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
