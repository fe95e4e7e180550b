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
from pathlib import Path
from typing import Any

from support.inputs.asking import Answer, Asking, warm
from support.inputs.edits import EDITS, Edit
from support.inputs.world import make

from bench.harness import Options, command, option, say

NONE = Edit("nothing was edited", lambda _world: None)


def steps(options: Options) -> Iterator[tuple[Edit, ...]]:
    """One edit alone, or several at once."""
    words = options.only.split("|")
    edits = [edit for edit in EDITS if any(word in edit.name for word in words)]
    if not options.pairs_alone:
        yield from together(edits) if options.together else ((edit,) for edit in edits)
    drawn = random.Random(options.seed)
    for _ in range(options.pairs):
        yield tuple(drawn.sample(edits, 2))


def together(edits: list[Edit]) -> Iterator[tuple[Edit, ...]]:
    """Steps of edits that concern different tasks, those of one task in their order; then those of several tasks, each alone."""
    steps: list[list[Edit]] = []
    for edit in (edit for edit in edits if len(edit.tasks) in (1, 2)):
        at = next(
            (
                n + 1
                for n, step in reversed([*enumerate(steps)])
                if {*edit.tasks} & {task for e in step for task in e.tasks}
            ),
            0,
        )
        if at == len(steps):
            steps.append([])
        steps[at].append(edit)
    yield from map(tuple, steps)
    yield from ((edit,) for edit in edits if len(edit.tasks) not in (1, 2))


def verdicts(edits: tuple[Edit, ...], ours: Answer, theirs: Answer, before: Answer | None) -> dict[str, str]:
    """Edit -> what is wrong, in words; nothing where all is right."""
    wrong = {task: f"differs: {text}" for task, text in ours.wrong(theirs).items()}
    allowed = {task for edit in edits for task in edit.gpu}
    for task in ours.ran - allowed if before is not None else ():
        wrong.setdefault(task, f"{task} ran on a GPU in vain")
    keys = {key for edit in edits for key in f"{edit.changes} {edit.may}".split()}
    if before is not None and not before.trouble and not keys and ours.evaluation != before.evaluation:
        wrong.setdefault("", "is another evaluation, of equal inputs")
    found: dict[str, list[str]] = {}
    for task, text in wrong.items():
        of_task = [edit.name for edit in edits if task in edit.tasks]
        for name in of_task or [" + ".join(edit.name for edit in edits)]:
            found.setdefault(name, []).append(text[:300])
    return {name: "; ".join(texts) for name, texts in found.items()}


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
            wrong = verdicts(edits, ours, theirs, before and before[0])
            line = {
                "edit": name,
                "edits": len(edits),
                "evalspan": ours.results.get("most", {}),
                "lm_eval": theirs.results.get("most", {}),
                "moved": before is None or bool(theirs.differs(before[1])),
                "gpu": sorted(ours.ran),
                "jobs": sorted(ours.jobs),
                "verdict": wrong or "right",
                "said": ours.said.splitlines()[-3:] if wrong else [],
                "seconds": round(time.monotonic() - started, 1),
            }
            say(f"{line['seconds']:6.1f} s  {name}{'' if line['moved'] else ' (no score moved)'}")
            for edit, text in wrong.items():
                say(f"          WRONG {edit}: {text}")
            with (folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            found.append(line)
            before = ours, theirs
            if wrong:
                asking.fresh()
                ours = asking.ours()
                before = ours, theirs
                if ours.differs(theirs):
                    say(f"          and in an empty work folder: {ours.differs(theirs)}")
    wrong_rows = [
        f"{name}: {text}"
        for line in found
        if line["verdict"] != "right"
        for name, text in line["verdict"].items()
    ]
    edits = sum(line["edits"] for line in found[1:])
    return "\n".join(
        [f"{edits} edits in {len(found)} questions, {len(wrong_rows)} wrong", *wrong_rows]
    ), not wrong_rows


def _known(folder: Path, options: Options) -> dict[str, dict[str, Any]]:
    place = folder / "rows.jsonl"
    if not options.resume or not place.exists():
        return {}
    return {line["edit"]: line for line in map(json.loads, place.read_text().splitlines())}


OPTIONS = (
    option("folder", type=Path),
    option("--pairs", 60, "random pairs of edits after the edits alone"),
    option("--pairs-alone", False, "the pairs, and no edit alone", action="store_true"),
    option("--seed", 1),
    option("--together", False, "neighbours that concern different tasks in one step", action="store_true"),
    option("--only", "", "only edits with one of these words in their names, as A|B"),
    option("--resume", False, "do not ask again what rows.jsonl has", action="store_true"),
)
if __name__ == "__main__":
    sys.exit(command("bench_inputs", __doc__, measure, *OPTIONS))
