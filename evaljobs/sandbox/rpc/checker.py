"""The trusted side: runs the test and decides, in another process than the program.

Rule: a verdict rests on what the test concludes from data. The program's names are handles in the
test, which call the program over the codec. No object, exit status, output or file of the program
decides, except standard output where that is its answer. And no sample can change how a later one
is judged: this process ends after a job that reached its deadline, sent an invalid answer, ran out
of memory, grew or left threads, and after a test that may have changed the interpreter. Programs'
processes are not its children, so they inherit no test. Started by `zygote`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import socket
import struct
import sys
from typing import Any, Final

from evaljobs.sandbox.rpc import codec, names
from evaljobs.sandbox.rpc.frames import receive_exactly
from evaljobs.sandbox.rpc.link import SHORT, CandidateExitError, FaultError, Link, Outcome

MAX_OUTPUT: Final = 16 << 20  # most bytes of standard output that are read
# Messages to the zygote: job read; verdict sent; verdict sent, and this process ends.
READ, DONE, WORN = b"r", b"d", b"w"
LENGTH: Final = struct.Struct("!I")
_JOBS: Final = 200  # most jobs of one process
_GROWN_KIB: Final = 300 << 10
# A test with one of these texts may change the interpreter that runs it.
_TRACES: Final = (
    *("sys", "os.", "environ", "builtins", "setattr", "__", "signal", "thread", "gc.", "mock", "warnings"),
    *("open(", "decimal", "locale", "numpy", "import_module"),
)


# --- one job after another ----------------------------------------------------------------------------------------


def serve(control: socket.socket, job: socket.socket, verdict: socket.socket) -> None:
    """Judge jobs until this process is worn, or until the supervisor or zygote ends.

    Each message on `control` announces a job: LENGTH, with the descriptors of its program's channel
    and output. The answers are READ, then DONE or WORN.
    """
    state = random.getstate()
    for left in range(_JOBS - 1, -1, -1):
        length, fds, _, _ = socket.recv_fds(control, LENGTH.size, 2)
        body = receive_exactly(job, *LENGTH.unpack(length)) if fds else None
        if body is None:
            return
        control.send(READ)
        outcome, worn = _judge(body, fds)
        del body
        random.setstate(state)
        verdict.send(json.dumps({"verdict": outcome[0], "reason": outcome[1][:400]}).encode())
        if worn or not left:
            control.send(WORN)
            return
        control.send(DONE)


def _judge(body: bytes, fds: list[int]) -> tuple[Outcome, bool]:
    """Verdict and reason, and whether this process is worn."""
    try:
        task: dict[str, Any] = json.loads(body)
        with socket.socket(fileno=fds[0]) as channel:
            outcome = judge(task, channel, fds[1] if len(fds) > 1 else None)
    except MemoryError:
        return ("memory", "out of memory in the checker"), True
    except BaseException as error:  # noqa: BLE001  (its end is a verdict, whatever it is)
        return ("crash", f"the checker failed: {type(error).__name__}"), True
    finally:
        for fd in fds[1:]:
            os.close(fd)
        codec.forget()
    return outcome, outcome[0] not in ("pass", "fail") or _is_worn(task)


def _is_worn(task: dict[str, Any]) -> bool:
    text = task.get("test", "") + task.get("setup", "")
    if any(word in text for word in _TRACES):
        return True
    if len(sys._current_frames()) > 1 or sys.gettrace() is not None:  # noqa: SLF001  (importing threading costs each fork)
        return True
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _GROWN_KIB or bool(gc.garbage)


# --- the three ways to judge --------------------------------------------------------------------------------------


def judge(job: dict[str, Any], channel: socket.socket, output_fd: int | None) -> Outcome:
    """Verdict and reason for one job (see `records.Job`)."""
    link = Link(channel)
    try:
        if job["mode"] == "stdio":
            outcome = _judge_output(job, link, -1 if output_fd is None else output_fd)
        elif job["mode"] == "in_process":
            outcome = _judge_in_process(job, link)
        else:
            outcome = _judge_test(job, link)
    except (FaultError, CandidateExitError) as error:
        outcome = ("fail", _text(error))
    except MemoryError:
        outcome = ("memory", "out of memory")
    except BaseException as error:  # noqa: BLE001  (whatever a test raises is its verdict)
        outcome = ("fail", f"{type(error).__name__}: {_text(error)}")
    return link.fault or outcome  # a fault holds even if the test has caught it


def _text(error: BaseException) -> str:
    try:
        return str(error)[:SHORT]
    except BaseException:  # noqa: BLE001  (an integer too long to print, say)
        return ""


def _judge_test(job: dict[str, Any], link: Link) -> Outcome:
    test, entry_point = job["test"], job["entry_point"]
    compiled = compile(test, "<test>", "exec")
    needed = names.needs(test, compiled, entry_point)
    code = job["setup"] + "\n" + job["code"] if job["setup"] else job["code"]
    found = link.ask("load", code, tuple(sorted(needed.targets | needed.library)))
    if not isinstance(found, dict):
        return "fail", "answer refused: no names"
    scope: dict[str, Any] = {}
    if entry_point is not None:
        helpers = names.prompt_helpers(job["prompt"], entry_point, names.code_names(compiled))
        if helpers.body:
            exec(compile(helpers, "<prompt>", "exec"), scope)  # noqa: S102
            scope.pop(entry_point, None)
    if job["setup"]:
        exec(compile(job["setup"], "<setup>", "exec"), scope)  # noqa: S102
    for name in needed.targets | needed.library:
        description = found.get(name)
        if (
            isinstance(description, tuple)
            and len(description) == 2
            and (name in needed.targets or name not in scope)
        ):
            _supply(scope, name, description, is_target=name in needed.targets)
    exec(compiled, scope)  # noqa: S102
    return "pass", ""


def _supply(scope: dict[str, Any], name: str, description: tuple[Any, Any], *, is_target: bool) -> None:
    kind, value = description
    if not is_target:  # the program only decides whether the name exists, as its import would
        scope[name] = names.library_object(name)
    elif kind == "module":
        root = value.partition(".")[0] if isinstance(value, str) else ""
        if root == "numpy" or root in sys.stdlib_module_names:
            scope[name] = __import__(value, fromlist=["_"])
    elif kind == "value":
        scope[name] = value


def _judge_in_process(job: dict[str, Any], link: Link) -> Outcome:
    """Run program and test in one process, as openai/human-eval does.

    A hostile program can fool this; the verdict's `isolation` shows it.
    """
    token = os.urandom(16).hex()
    setup = job["setup"] + "\n" if job["setup"] else ""
    answer = link.ask("in_process", setup + job["code"], job["test"], token)
    return ("pass", "") if answer == token else ("fail", "the program did not reach the end of the test")


def _judge_output(job: dict[str, Any], link: Link, output_fd: int) -> Outcome:
    link.send("main", job["code"], job["stdin"])
    output = bytearray()
    while chunk := os.read(output_fd, 1 << 16):
        output += chunk
        if len(output) > MAX_OUTPUT:
            return "fail", f"more than {MAX_OUTPUT} bytes of output"
    link.receive()
    if lines(output.decode("utf-8", "replace")) != lines(job["stdout"]):
        return "fail", "standard output differs"
    return "pass", ""


def lines(text: str) -> list[str]:
    """Output in the form that is compared: without trailing blanks and empty last lines."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")
