"""Values of the sandbox: programs, their verdicts, and the jobs that lanes run.

Rule: no processes here. A line of a file becomes a Program, or a refused Verdict with the line's
fault. Called from all of the sandbox.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
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
    program), `test_list` (MBPP), or `stdin` and `stdout` (one pair of texts, or tuples of them: one
    run each). `timeout_seconds` is wall time of one run, `memory_mib` its address space.
    """

    id: str
    prompt: str = ""
    completion: str = ""
    code: str = ""
    entry_point: str | None = None
    test: str | None = None
    test_list: tuple[str, ...] | None = None
    test_setup_code: str = ""
    stdin: str | tuple[str, ...] | None = None
    stdout: str | tuple[str, ...] | None = None
    timeout_seconds: float = 3.0
    memory_mib: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a program. `isolation` is the level, or "none" where the program did not run."""

    id: str
    verdict: str
    seconds: float
    isolation: str
    reason: str = ""

    def line(self) -> str:
        """The verdict as one line of JSON, without its line end."""
        record = {name: getattr(self, name) for name in ("id", "verdict", "seconds", "isolation", "reason")}
        return json.dumps(record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: what `isolation.execute.judge` takes, as JSON, and the fields that the zygote reads."""

    body: bytes
    timeout_seconds: float
    memory_mib: int
    numpy: bool  # load numpy in the zygote, so that each fork has it


def refused(program_id: str, reason: str) -> Verdict:
    """The verdict of a program that was not run."""
    return Verdict(id=program_id, verdict="refused", seconds=0.0, isolation="none", reason=reason[:400])


def program_key(candidate: str, reference: str, timeout: float) -> str:
    """64 hex digits of a candidate, its test and its limit: equal runs have equal keys."""
    parts = json.dumps(["evalspan-program-2", candidate, reference, float(timeout)])
    return hashlib.sha256(parts.encode()).hexdigest()


# --- programs → jobs --------------------------------------------------------------------------------------------------


def problem(program: Program) -> str | None:
    """The fault of a program's record, None if it has none."""
    kinds = [program.test is not None, program.test_list is not None, program.stdout is not None]
    if sum(kinds) != 1:
        return "exactly one of test, test_list and stdout is needed"
    if program.entry_point is not None and (program.test is None or not program.entry_point.isidentifier()):
        return "entry_point must be a Python name and goes with test"
    if not math.isfinite(program.timeout_seconds) or not 0 < program.timeout_seconds <= MAX_TIMEOUT:
        return f"timeout_seconds must lie in (0, {MAX_TIMEOUT:g}]"
    if not 64 <= program.memory_mib <= MAX_MEMORY_MIB:
        return f"memory_mib must lie in [64, {MAX_MEMORY_MIB}]"
    if program.stdout is not None and len(_texts(program.stdin)) != len(_texts(program.stdout)):
        return "stdin and stdout must have the same number of texts"
    return None


def _texts(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (value or "",)


def jobs(program: Program) -> list[Job]:
    """The runs that a program needs, all of which must pass; ValueError for a bad record."""
    if wrong := problem(program):
        raise ValueError(wrong)
    source = program.prompt + program.completion + program.code
    if program.test_setup_code:
        source = f"{program.test_setup_code}\n{source}"
    if program.stdout is not None:
        pairs = zip(_texts(program.stdin), _texts(program.stdout), strict=True)
        tasks = [{"source": source, "stdin": given, "stdout": wanted} for given, wanted in pairs]
    else:
        test = program.test if program.test is not None else "\n".join(program.test_list or ())
        call = f"\ncheck({program.entry_point})" if program.entry_point is not None else ""
        tasks = [{"source": f"{source}\n{test}{call}"}]
    return [_job(program, json.dumps(task).encode()) for task in tasks]


def _job(program: Program, body: bytes) -> Job:
    if len(body) > MAX_JOB_BYTES:
        raise ValueError(f"a program and its test are limited to {MAX_JOB_BYTES} bytes")
    return Job(
        body=body,
        timeout_seconds=program.timeout_seconds,
        memory_mib=program.memory_mib,
        numpy=b"numpy" in body,
    )


# --- lines → programs -------------------------------------------------------------------------------------------------

_KINDS: Final = {  # of a field's JSON values; null stands for a field that is not there
    **dict.fromkeys(
        ("id", "prompt", "completion", "code", "test_setup_code", "entry_point", "test"), "a text"
    ),
    **dict.fromkeys(("timeout_seconds", "memory_mib"), "a number"),
    **dict.fromkeys(("stdin", "stdout"), "a text or a list of texts"),
    "test_list": "a list of texts",
}


def parse_line(line: bytes, number: int) -> Program | Verdict:
    """One line of a file of programs (UTF-8 JSON), or a refused Verdict with its number."""
    name = f"line-{number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError, MemoryError) as error:
        return refused(name, f"not a JSON object: {type(error).__name__}")
    if not isinstance(record, dict):
        return refused(name, "not a JSON object")
    if isinstance(record.get("id"), (str, int)) and len(str(record["id"])) < 1000:
        name = str(record["id"])
    try:
        program = Program(**_fields({**record, "id": name}))
    except (TypeError, ValueError, OverflowError) as error:
        return refused(name, str(error))
    return refused(name, wrong) if (wrong := problem(program)) else program


def _fields(record: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, kind in _KINDS.items():
        value = record.get(key)
        if isinstance(value, str) and kind.startswith("a text"):
            fields[key] = value
        elif isinstance(value, list) and kind.endswith("texts") and all(isinstance(v, str) for v in value):
            fields[key] = tuple(value)
        elif isinstance(value, int | float) and kind == "a number" and not isinstance(value, bool):
            fields[key] = int(value) if key == "memory_mib" else float(value)
        elif value is not None:
            raise TypeError(f"{key} must be {kind}")
    return fields
