"""Runs programs that models wrote, each shut in, and returns a verdict for each.

Rule: usable alone, with the standard library only. `records` has what goes in and out, `levels` which isolation holds here,
`code_eval` Hugging Face `evaluate`'s interface; `isolation/` shuts programs in, `rpc/` lets a test ask them. Start reading
at `run`.
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
