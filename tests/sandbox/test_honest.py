"""Honest programs fare as in plain Python, where program and test are one process; what cannot says so.

The oracle is `exec` here: the programs are ours (`honest`). `PROGRAMS` need objects, changes and output to cross as if nothing lay
between; `WRONG` must fail for what they get wrong; `UNSUPPORTED` are those that only the program's own word could pass.
"""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaljobs.sandbox import Level, Program, best_level, run_programs
from evaljobs.sandbox.box.candidate import Agent
from evaljobs.sandbox.box.link import Link
from tests.sandbox.honest import PROGRAMS, UNSUPPORTED, WRONG

IN_PROCESS = {"a file", "input", "coroutine", "callback"}  # and say so
UNWRITABLE = {"a file"}  # nothing may be written under Landlock, which knows no private folder


def _passes(code: str, test: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", sys.stdin)  # put back afterwards, whatever the test does
        patch.setattr(sys, "stdout", io.StringIO())
        try:
            exec(code + "\n" + test, {})  # noqa: S102
        except Exception:  # noqa: BLE001
            return False
    return True


def _programs(table: dict[str, tuple[str, str]]) -> list[Program]:
    return [Program(id=n, code=code, test=test, timeout_seconds=20.0) for n, (code, test) in table.items()]


@pytest.mark.skipif(best_level() is Level.RLIMITS, reason="no level holds here")
def test_honest_programs_fare_as_in_one_process(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong ones have the verdict that plain Python gives; the reason of a wrong one is its own."""
    table = {**PROGRAMS, **WRONG}
    plain = {name: _passes(*texts, monkeypatch) for name, texts in table.items()}
    assert plain == {name: name in PROGRAMS for name in table}
    verdicts = list(run_programs(_programs(table), level=Level(level)))
    impossible = UNWRITABLE if level == "landlock" else set()
    differ = [v for v in verdicts if (v.verdict == "pass") != (plain[v.id] and v.id not in impossible)]
    assert [(v.id, v.verdict, v.reason) for v in differ] == []
    assert [v for v in verdicts if v.verdict not in ("pass", "fail") or "unsupported" in v.reason] == []
    assert {v.id for v in verdicts if v.isolation != level} == IN_PROCESS


@pytest.mark.skipif(best_level() is Level.RLIMITS, reason="no level holds here")
def test_what_is_not_asked_of_a_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an honest program fails because its own word would decide, the reason says so."""
    assert all(_passes(*texts, monkeypatch) for texts in UNSUPPORTED.values())
    verdicts = list(run_programs(_programs(UNSUPPORTED)))
    assert [(v.id, v.verdict) for v in verdicts] == [(name, "fail") for name in UNSUPPORTED]
    assert [v for v in verdicts if not v.reason.startswith("unsupported")] == []


# --- lists that both sides hold -----------------------------------------------------------------------------------------

STORE = """
kept = []
def keep(x):
    kept.append(x)
    return x
def get(i): return kept[i % len(kept)] if kept else None
def drop(i):
    if kept: del kept[i % len(kept)]
def change(i, v):
    if kept: kept[i % len(kept)].append(v)
    if v == 3: raise ValueError(v)
def nest(i, j):
    if kept: kept[i % len(kept)].append(kept[j % len(kept)])
def cut(i): return kept[i % len(kept)].pop() if kept and kept[i % len(kept)] else None
"""
steps = st.lists(
    st.tuples(
        st.sampled_from(["keep", "get", "drop", "change", "nest", "cut", "mine", "own", "forget"]),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=25,
)


def _play(store: Any, moves: list[tuple[str, int, int]]) -> tuple[str, list[list[bool]]]:
    """What a test holds after these moves: texts, and which of its lists are one."""
    mine: list[Any] = [[], [1]]
    for name, i, j in moves:
        here = mine[i % len(mine)]
        if name == "keep":
            assert store["keep"](here) is here
        elif name in ("get", "cut"):
            mine += [v for v in (store[name](i),) if isinstance(v, list)]
        elif name == "mine":
            here.append(j)
        elif name == "own":
            here.append(mine[j % len(mine)])
        elif name == "forget":
            mine = [v for v in mine if v is not here] or [[]]
        else:
            with contextlib.suppress(ValueError):
                store[name](*(i, j)[: 1 if name == "drop" else 2])
    return repr(mine), [[a is b for a in mine] for b in mine]


@settings(max_examples=60)
@given(steps)
def test_lists_that_both_sides_hold_are_one(moves: list[tuple[str, int, int]]) -> None:
    """Whatever test and program do in turns to lists that either has from the other: the test sees what it would in one
    process, identities and cycles included.
    """
    plain: dict[str, Any] = {}
    exec(STORE, plain)  # noqa: S102
    ours, theirs = socket.socketpair()
    agent = threading.Thread(target=Agent(theirs).serve)
    agent.start()
    try:
        with ours:
            found = Link(ours).ask("load", STORE, ("keep", "get", "drop", "change", "nest", "cut"))
            assert _play({name: value for name, (_, value) in found.items()}, moves) == _play(plain, moves)
    finally:
        agent.join()
        theirs.close()
