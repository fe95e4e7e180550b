"""Verdicts of programs, by content: each program of a task is run once, whichever job needs it.

Rule: a job writes its verdicts, a line each, to its own file before it uses them; readers take all
files of their tasks. Called from `score`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from evaljobs.contract.paths import EvaluationPaths, slug
from evaljobs.contract.storage import write_atomic
from evaljobs.errors import OperatorError, one_line
from evaljobs.sandbox import Program, SandboxUnavailableError, Verdict, run_programs


class Verdicts:
    """Verdicts of some leaf tasks by program key: reads every job's file, writes this job's own."""

    def __init__(
        self,
        paths: EvaluationPaths,
        tasks: Sequence[str],
        job: str,
        *,
        item_seconds: float,
        allow_unsafe: bool,
        workers: int | None = None,
    ) -> None:
        self._folder = paths.verdicts
        self._prefixes = [f"{slug(task)}@" for task in tasks]
        self._own = self._folder / f"{self._prefixes[0]}{slug(job)}.jsonl"
        self._item_seconds = item_seconds
        self._allow_unsafe = allow_unsafe
        self._workers = workers
        self._known: dict[str, Verdict] = {}
        self._ours: dict[str, Verdict] = {}
        self._read()

    def _read(self) -> None:
        for file in sorted(self._folder.glob("*.jsonl")):
            if not file.name.startswith(tuple(self._prefixes)):
                continue
            for line in file.read_text().splitlines():
                verdict = Verdict(**json.loads(line))
                self._known[verdict.id] = verdict
                if file == self._own:
                    self._ours[verdict.id] = verdict

    def run_missing(self, programs: Iterable[Program]) -> int:
        """Run the programs that have no verdict yet, in parallel; returns how many."""
        missing = [program for program in programs if program.id not in self._known]
        if not missing:
            return 0
        limited = [_within(program, self._item_seconds) for program in missing]
        try:
            found = list(run_programs(limited, workers=self._workers, allow_unsafe=self._allow_unsafe))
        except SandboxUnavailableError as error:
            raise OperatorError(one_line(error)) from error
        self._known |= {verdict.id: verdict for verdict in found}
        self._ours |= {verdict.id: verdict for verdict in found}
        lines = [verdict.line() for verdict in self._ours.values()]
        write_atomic(self._own, ("\n".join(lines) + "\n").encode())
        return len(missing)

    def of(self, programs: list[Program]) -> list[Verdict]:
        """Verdicts of these programs; missing ones are run now."""
        self.run_missing(programs)
        return [self._known[program.id] for program in programs]


def _within(program: Program, seconds: float) -> Program:
    if program.timeout_seconds <= seconds:
        return program
    return replace(program, timeout_seconds=seconds)
