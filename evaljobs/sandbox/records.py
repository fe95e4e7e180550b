"""Values of the sandbox: programs, their verdicts, and the jobs that lanes run.

Rule: no processes here. A line of a file becomes a Program, or a refused Verdict with the line's
fault. Called from all of the sandbox.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Final

MAX_JOB_BYTES: Final = 32 << 20
MAX_TIMEOUT: Final = 3600.0
MAX_MEMORY_MIB: Final = 1 << 20
VERDICTS: Final = ("pass", "fail", "timeout", "memory", "crash", "refused")


class SandboxError(Exception):
    """Base of the sandbox's errors; the text says what to do."""


class SandboxUnavailableError(SandboxError):
    """The requested isolation does not hold on this machine."""


class Level(enum.StrEnum):
    """Kinds of isolation, best first."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    RLIMITS = "rlimits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One untrusted program and its test.

    The program's text is `prompt + completion + code`. Exactly one kind of test: `test` with
    `entry_point` (HumanEval: the test defines `check`), `test` alone (statements run after the
    program), or `test_list` (MBPP). `timeout_seconds` is wall time, `memory_mib` address space.
    """

    id: str
    prompt: str = ""
    completion: str = ""
    code: str = ""
    entry_point: str | None = None
    test: str | None = None
    test_list: tuple[str, ...] | None = None
    test_setup_code: str = ""
    timeout_seconds: float = 3.0
    memory_mib: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a program. `isolation` is the level, or "none" if the program did not run."""

    id: str
    verdict: str
    seconds: float
    isolation: str
    reason: str = ""

    def line(self) -> str:
        """Return the verdict as one line of JSON, without its line end."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a program with its test, and the fields that the zygote reads."""

    body: bytes  # the source that `isolation.execute.judge_program` takes, as JSON
    timeout_seconds: float
    memory_mib: int
    numpy: bool  # load numpy in the zygote, so that each fork has it


def refused_verdict(program_id: str, reason: str) -> Verdict:
    """Return the verdict of a program that was not run."""
    return Verdict(id=program_id, verdict="refused", seconds=0.0, isolation="none", reason=reason[:400])


def program_key(candidate: str, reference: str, timeout: float) -> str:
    """Return 64 hex digits of a candidate, its test and its limit: equal runs have equal keys."""
    parts = json.dumps(["evalspan-program-2", candidate, reference, float(timeout)])
    return hashlib.sha256(parts.encode()).hexdigest()


# --- programs → jobs --------------------------------------------------------------------------------------------------


def program_fault(program: Program) -> str | None:
    """Return the fault of a program's record, or None."""
    tests = program.test, program.test_list
    if (
        tests.count(None) != 1
        or not isinstance(tests[0] or "", str)
        or not isinstance(tests[1] or (), (list, tuple))
    ):
        return "either test (a text) or test_list (a list of texts) is needed"
    if program.entry_point is not None and (program.test is None or not program.entry_point.isidentifier()):
        return "entry_point must be a Python name and goes with test"
    if not math.isfinite(program.timeout_seconds) or not 0 < program.timeout_seconds <= MAX_TIMEOUT:
        return f"timeout_seconds must lie in (0, {MAX_TIMEOUT:g}]"
    if not isinstance(program.memory_mib, int) or not 64 <= program.memory_mib <= MAX_MEMORY_MIB:
        return f"memory_mib must be a whole number in [64, {MAX_MEMORY_MIB}]"
    return None


def job_of(program: Program) -> Job:
    """Return the run that gives the program's verdict. Raise ValueError for a bad record."""
    if wrong := program_fault(program):
        raise ValueError(wrong)
    source = program.prompt + program.completion + program.code
    if program.test_setup_code:
        source = f"{program.test_setup_code}\n{source}"
    test = program.test if program.test is not None else "\n".join(program.test_list or ())
    call = f"\ncheck({program.entry_point})" if program.entry_point is not None else ""
    body = json.dumps(f"{source}\n{test}{call}").encode()
    if len(body) > MAX_JOB_BYTES:
        raise ValueError(f"a program and its test are limited to {MAX_JOB_BYTES} bytes")
    return Job(
        body=body,
        timeout_seconds=program.timeout_seconds,
        memory_mib=program.memory_mib,
        numpy=b"numpy" in body,
    )


# --- lines → programs -------------------------------------------------------------------------------------------------


def parse_line(line: bytes, number: int) -> Program | Verdict:
    """Parse one line of a file of programs (UTF-8 JSON; null for a missing field), or return a refused Verdict."""
    name = f"line-{number}"
    try:
        record: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in json.loads(line).items()
            if value is not None
        }
        name = str(record.get("id", name))[:1000]
        known = record.keys() & Program.__dataclass_fields__.keys()
        program = Program(**{**{key: record[key] for key in known}, "id": name})
        wrong = program_fault(program)
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        return refused_verdict(name, f"not a program: {error or type(error).__name__}")
    return refused_verdict(name, wrong) if wrong else program
