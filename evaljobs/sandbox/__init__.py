"""Runs programs that models wrote, each in isolation, and returns a verdict for each.

Rule: usable alone, with the standard library only. `records` has its values, `levels` finds the
isolation that holds here, `code_eval` has the interface of Hugging Face `evaluate`, `isolation/` runs
a program with its test in one isolated process. Start reading at `run`.
"""

from evaljobs.sandbox.levels import LevelReport, best_level, probe_levels
from evaljobs.sandbox.records import (
    Level,
    Program,
    SandboxError,
    SandboxUnavailableError,
    Verdict,
    parse_line,
    program_key,
)
from evaljobs.sandbox.run import run_programs

__all__ = [
    "Level",
    "LevelReport",
    "Program",
    "SandboxError",
    "SandboxUnavailableError",
    "Verdict",
    "best_level",
    "parse_line",
    "probe_levels",
    "program_key",
    "run_programs",
]
