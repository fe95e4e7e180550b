"""Runs untrusted programs and says how they fared. Nothing gets out, and nothing fools the verdict.

Rule: usable alone, with the standard library only. See `records` for what goes in and out, `levels` for how they are
shut in, `code_eval` for Hugging Face `evaluate`'s interface.
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
