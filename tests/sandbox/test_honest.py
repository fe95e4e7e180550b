"""Honest programs get the verdict of plain Python, where program and test share a process.

The oracle is `exec` here: the programs of `honest` are the project's own.
"""

from __future__ import annotations

import io
import socket
import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox.honest import IN_PROCESS, PROGRAMS, UNSUPPORTED, WRONG, WRONG_IN_PROCESS

from evaljobs.sandbox import Level, Program, best_level, run_programs
from evaljobs.sandbox.rpc.candidate import Agent
from evaljobs.sandbox.rpc.link import Link
from evaljobs.sandbox.rpc.names import needs_shared_process

UNWRITABLE = {"a file"}  # Landlock has no private folder, so programs may not write


def _passes(code: str, test: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", sys.stdin)  # restored afterwards
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
    """Right and wrong ones have plain Python's verdict; a wrong one has its own reason."""
    table = {**PROGRAMS, **WRONG, **IN_PROCESS, **WRONG_IN_PROCESS}
    plain = {name: _passes(*texts, monkeypatch) for name, texts in table.items()}
    assert plain == {name: name in PROGRAMS or name in IN_PROCESS for name in table}
    verdicts = list(run_programs(_programs(table), level=Level(level)))
    impossible = UNWRITABLE if level == "landlock" else set()
    differ = [v for v in verdicts if (v.verdict == "pass") != (plain[v.id] and v.id not in impossible)]
    assert [(v.id, v.verdict, v.reason) for v in differ] == []
    assert [v for v in verdicts if v.verdict not in ("pass", "fail") or "unsupported" in v.reason] == []
    assert {v.id for v in verdicts if v.isolation != level} == {*IN_PROCESS, *WRONG_IN_PROCESS}


@pytest.mark.skipif(best_level() is Level.RLIMITS, reason="no level holds here")
def test_what_is_not_asked_of_a_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says so where a right program fails because the test needs more than a handle."""
    assert all(_passes(*texts, monkeypatch) for texts in UNSUPPORTED.values())
    verdicts = list(run_programs(_programs(UNSUPPORTED)))
    assert [(v.id, v.verdict) for v in verdicts] == [(name, "fail") for name in UNSUPPORTED]
    assert [v for v in verdicts if not v.reason.startswith("unsupported: ")] == []


@pytest.mark.parametrize(
    "handed",
    [
        "lambda: 1",
        "own",
        "Own()",
        "mine",
        "[own]",
        "{'k': own}",
        "map(len, x)",
        "sqrt",
        "operator.add",
        "str.upper",
        "(v for v in x)",
    ],
)
@pytest.mark.parametrize("call", ["f({})", "f(1, key={})", "made.visit({})", "assert f(3, {}) == 4"])
def test_a_test_that_hands_over_an_object_shares_the_programs_process(handed: str, call: str) -> None:
    """The test's text decides: a function, generator or object of its own is an argument."""
    assert needs_shared_process(
        f"def own(x): return x\nclass Own: pass\nmine = Own()\nmade = g(3)\n{call.format(handed)}"
    )


@pytest.mark.parametrize(
    "test",
    [
        *(
            "assert sorted(f(3), key=lambda v: -v) == [1]",
            "r = f(3)\nr.sort(key=lambda v: v[0])",
            "assert all(f(v) for v in x)",
        ),
        *(
            "for got, want in zip(map(f, x), y):\n    assert got == want",
            "def near(a): return a < 1\nassert f(near(2))",
        ),
        *(
            "assert f(sorted(x, key=lambda v: v)) == 1",
            "assert f(math.pi, pi) == 3",
            "assert isinstance(f(3), (int, str))",
        ),
        *(
            "try:\n    f(3)\nexcept ValueError:\n    pass",
            "with f(3) as r:\n    assert r",
            "try:\n    f()\nexcept f.Bad:\n    pass",
        ),
        *(
            "class Own:\n    pass\nassert f(3) != Own()",
            "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)",
        ),
        *(
            "assert functools.reduce(lambda a, b: a + b, f(3)) == 6",
            "product = 3\nassert f(product) == 4",
            "assert f(",
            "assert f(\0)",
        ),
    ],
)
def test_a_test_of_values_alone_never_shares_the_programs_process(test: str) -> None:
    """With data alone, and no class of the program, the program has its own process."""
    assert not needs_shared_process(test)


# --- arguments that the program changes -------------------------------------------------------------------------------

PLAY = """
def play(lists, moves):
    for name, i, j in moves:
        here, other = lists[i % len(lists)], lists[j % len(lists)]
        if name == 'append': here.append(j)
        elif name == 'nest': here.append(other)
        elif name == 'cut' and here: here.pop()
        elif name == 'turn': here.reverse()
        elif name == 'fresh': here[:] = [[j], *here[:1]]
        elif name == 'swap': here[:], other[:] = other[:], here[:]
        elif name == 'raise': raise ValueError(j)
    return lists[-1]
"""
moves = st.lists(
    st.tuples(
        st.sampled_from(["append", "nest", "cut", "turn", "fresh", "swap", "raise"]),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=12,
)
nests = st.lists(
    st.lists(st.integers(0, 5), max_size=3), max_size=4
)  # each list: numbers of earlier ones that it holds


def _play(play: Any, nested: list[list[int]], played: list[tuple[str, int, int]]) -> tuple[Any, ...]:
    """What a test has after a call: the result or exception, texts, and which lists are one."""
    lists: list[Any] = [[]]
    for numbers in nested:
        lists.append([lists[n % len(lists)] for n in numbers])
    result = error = None
    try:
        result = play(lists, played)
    except ValueError as raised:
        error = repr(raised)
    seen = [*lists, *(v for here in lists for v in here), result]
    return error, repr(lists), [[a is b for a in seen if isinstance(a, list)] for b in seen]


@settings(max_examples=60)
@given(nests, moves)
def test_arguments_after_a_call_are_as_in_one_process(
    nested: list[list[int]], played: list[tuple[str, int, int]]
) -> None:
    """The test sees lists after a call as in one process, with identities and cycles."""
    plain: dict[str, Any] = {}
    exec(PLAY, plain)  # noqa: S102
    ours, theirs = socket.socketpair()
    agent = threading.Thread(target=Agent(theirs).serve)
    agent.start()
    try:
        with ours:
            _, play = Link(ours).ask("load", PLAY, ("play",))["play"]
            assert _play(play, nested, played) == _play(plain["play"], nested, played)
    finally:
        agent.join()
        theirs.close()
