"""`python -m evaljobs sandbox IN.jsonl --out OUT.jsonl`: a file of programs → a file of verdicts.

Rule: a verdict per line, in the order of the lines; the output appears whole or not at all. Exit
status 0 if every line has its verdict, 2 if no program could be run (see standard error).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from evaljobs.sandbox import levels
from evaljobs.sandbox.records import MAX_JOB_BYTES, Level, Program, SandboxError, Verdict, parse_line, refused
from evaljobs.sandbox.run import run_programs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
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
        sys.stdout.write(levels.describe() + "\n")
        return 0
    if options.input is None:
        parser.error("a file of programs is needed")
    level = None if options.level == "auto" else Level(options.level)
    try:
        with contextlib.ExitStack() as stack:
            source = (
                sys.stdin.buffer
                if options.input == "-"
                else stack.enter_context(Path(options.input).open("rb"))
            )
            programs = read_programs(source)
            verdicts = run_programs(
                programs, workers=options.workers, level=level, allow_unsafe=options.allow_unsafe
            )
            write_verdicts(verdicts, options.out)
    except (SandboxError, OSError) as error:
        sys.stderr.write(f"sandbox: {error}\n")
        return 2
    return 0


def read_programs(source: BinaryIO) -> Iterator[Program | Verdict]:
    """Programs of a stream of lines; a bad line is a refused verdict, an empty one is skipped."""
    number = 0
    while line := source.readline(MAX_JOB_BYTES + 1):
        number += 1
        if len(line) > MAX_JOB_BYTES:
            while line and not line.endswith(b"\n"):
                line = source.readline(1 << 20)
            yield refused(f"line-{number}", f"a line of more than {MAX_JOB_BYTES} bytes")
        elif line.strip():
            yield parse_line(line, number)


def write_verdicts(verdicts: Iterable[Verdict], path: str | None) -> None:
    """Write one line per verdict; a file is replaced when it is complete."""
    if path is None:
        for verdict in verdicts:
            sys.stdout.write(verdict.line() + "\n")
        return
    half = Path(f"{path}.{secrets.token_hex(4)}.part")
    try:
        with half.open("x", encoding="utf-8") as out:
            for verdict in verdicts:
                out.write(verdict.line() + "\n")
            out.flush()
            os.fsync(out.fileno())
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
