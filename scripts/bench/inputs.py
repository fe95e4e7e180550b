"""scripts/bench_inputs FOLDER: after each edit of one input, is the printed score lm_eval's of now, and did no GPU run in vain?

Every row of tests/support/inputs/edits.py is applied to one world, in turn, then PAIRS random pairs of rows. After each,
plain lm_eval with an empty cache of data sets and `evalspan eval` are asked the same; a work folder lasts until an answer
is wrong. FOLDER holds what was found (rows.jsonl): rows that are there are applied and not asked again. Exit status 1
where a score or a sample differs, or a GPU ran for a task that the table does not name.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness import Options, command, option, say
from support.inputs.asking import Answer, Asking, warm
from support.inputs.edits import EDITS, Edit
from support.inputs.world import World, make

NONE = Edit("nothing was edited", lambda _world: None)


def steps(options: Options) -> Iterator[tuple[Edit, ...]]:
    """One edit, or two at once."""
    if options.only:
        yield from ((edit,) for edit in EDITS if options.only in edit.name)
        return
    yield from ((edit,) for edit in EDITS)
    drawn = random.Random(options.seed)
    for _ in range(options.pairs):
        yield tuple(drawn.sample(EDITS, 2))


def verdict(edits: tuple[Edit, ...], ours: Answer, theirs: Answer, before: Answer | None) -> str:
    """What is wrong, in words; "" where nothing is."""
    if said := ours.differs(theirs):
        return f"differs: {said}"
    if extra := ours.ran - {task for edit in edits for task in edit.gpu}:
        return f"ran on a GPU in vain: {', '.join(sorted(extra))}"
    names = {key for edit in edits for key in f"{edit.changes} {edit.may}".split()}
    if before is not None and not names and ours.evaluation != before.evaluation:
        return "is another evaluation, of equal inputs"
    return ""


def measure(options: Options) -> tuple[str, bool]:
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    with warm(folder) as runner, ThreadPoolExecutor(1) as beside:
        world = make(folder / f"world-{time.time_ns()}")
        asking = Asking(world, runner)

        def ask() -> tuple[Answer, Answer]:
            theirs = beside.submit(asking.plain)
            return asking.ours(), theirs.result()

        before: tuple[Answer, Answer] | None = None
        known = _known(folder, options)
        for number, edits in enumerate([(NONE,), *steps(options)]):
            for edit in edits:
                edit.do(world)
            name = " + ".join(edit.name for edit in edits)
            if name in known and options.resume:
                found.append(known[name])
                before = None
                continue
            if before is None and number:  # of the state before, which was not asked
                say(f"(asked without comparison: {name})")
            started = time.monotonic()
            ours, theirs = ask()
            wrong = verdict(edits, ours, theirs, before and before[0])
            line = {
                "edit": name,
                "evalspan": ours.results.get("most", {}),
                "lm_eval": theirs.results.get("most", {}),
                "moved": before is None or bool(theirs.differs(before[1])),
                "gpu": sorted(ours.ran),
                "jobs": sorted(ours.jobs),
                "verdict": wrong or "right",
                "seconds": round(time.monotonic() - started, 1),
            }
            say(f"{line['seconds']:6.1f} s  {name}: {line['verdict']}{'' if line['moved'] else ' (no score moved)'}")
            with (folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            found.append(line)
            before = ours, theirs
            if wrong:
                asking.fresh()
                ours, theirs = ask()
                if ours.differs(theirs):
                    say(f"          and in an empty work folder: {ours.differs(theirs)}")
                before = replace(ours), theirs
    wrong_rows = [line for line in found if line["verdict"] != "right"]
    table = "\n".join(f"{line['edit']}: {line['verdict']}" for line in wrong_rows)
    return f"{len(found)} rows, {len(wrong_rows)} wrong\n{table}", not wrong_rows


def _known(folder: Path, options: Options) -> dict[str, dict[str, Any]]:
    place = folder / "rows.jsonl"
    if not options.resume or not place.exists():
        return {}
    return {line["edit"]: line for line in map(json.loads, place.read_text().splitlines())}


OPTIONS = (
    option("folder", type=Path),
    option("--pairs", 60, "random pairs of edits after the edits alone"),
    option("--seed", 1),
    option("--only", "", "only edits with these words in their names"),
    option("--resume", False, "do not ask again what rows.jsonl has", action="store_true"),
)
if __name__ == "__main__":
    sys.exit(command("bench_inputs", __doc__, measure, *OPTIONS))
