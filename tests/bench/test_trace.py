"""The trace names each function of the product once, in whichever process it is entered."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.trace import kind_of, profiler_of

SOURCE = """
class A:
    def outer(self):
        def inner():
            yield 1
        return list(inner()) + [one for one in (lambda: [2])()]
def never(): raise AssertionError
"""


def test_a_function_is_named_when_it_is_first_entered() -> None:
    """Nested functions and generators too; no class, no lambda, no other file, and not what is not called. A name that is
    not taken yet comes again.
    """
    names: list[str] = []
    space: dict[str, type] = {}
    sys.setprofile(profiler_of(Path("/tree"), lambda name: names.append(name) or len(names) > 1))
    try:
        exec(compile(SOURCE, "/tree/evaljobs/file.py", "exec"), space)  # noqa: S102
        space["A"]().outer()
        space["A"]().outer()
    finally:
        sys.setprofile(None)
    assert names == [f"evaljobs/file.py:A.{name}" for name in ("outer", "outer.inner", "outer")]


def test_a_process_is_known_by_its_command_line() -> None:
    assert kind_of(["python", "-m", "evaljobs", "stage", "spec.json"]) == "precursor"
    assert kind_of(["python", "other.py"]) == "other"
