"""`python -m evaljobs sandbox IN.jsonl --out OUT.jsonl`: a file of programs → a file of verdicts.

Rule: a verdict per line, in the order of the lines; the output appears whole or not at all. Exit
status 0 if every line has its verdict, 2 if no program could be run (see standard error).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from evaljobs.sandbox import levels
from evaljobs.sandbox.records import Level, SandboxError, parse_line
from evaljobs.sandbox.run import run_programs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="sandbox", description="Run untrusted programs, one JSON object a line."
    )
    parser.add_argument("input", nargs="?", help="programs, JSON lines; - for standard input")
    parser.add_argument("--out", help="verdicts, JSON lines; standard output if not given")
    parser.add_argument("--level", default="auto", choices=["auto", *(level.value for level in Level)])
    parser.add_argument("--workers", type=int, default=None, help="programs at once (one per core)")
    parser.add_argument(
        "--allow-unsafe", action="store_true", help="run with resource limits alone if nothing better holds"
    )
    parser.add_argument("--probe", action="store_true", help="print which levels hold here, and why not")
    options = parser.parse_args(argv)
    if options.probe:
        sys.stdout.write(json.dumps([asdict(report) for report in levels.probe_levels()]) + "\n")
        return 0
    if options.input is None:
        parser.error("a file of programs is needed")
    level = None if options.level == "auto" else Level(options.level)
    try:
        with sys.stdin.buffer if options.input == "-" else Path(options.input).open("rb") as source:
            programs = (parse_line(line, n) for n, line in enumerate(source, 1) if line.strip())
            verdicts = run_programs(
                programs, workers=options.workers, level=level, allow_unsafe=options.allow_unsafe
            )
            if options.out is None:
                sys.stdout.writelines(f"{verdict.line()}\n" for verdict in verdicts)
            else:
                half = Path(f"{options.out}.part")
                half.write_text("".join(f"{verdict.line()}\n" for verdict in verdicts))
                half.replace(options.out)
    except (SandboxError, OSError) as error:
        sys.stderr.write(f"sandbox: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
