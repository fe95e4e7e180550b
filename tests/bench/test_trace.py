"""The trace names each function of a module once, in whichever process it is entered, and changes nothing else."""

from __future__ import annotations

from bench.trace import kind_of, marked

SOURCE = b'''
"""A module."""
class A:
    def outer(self):
        """Its text."""
        def inner():
            yield 1
        return list(inner())
def never(): raise AssertionError
'''


def test_a_function_is_named_when_it_is_entered_and_returns_what_it_did() -> None:
    """Nested functions and generators too; what is not called is not named."""
    names: list[str] = []
    space = {"_evalspan_entered": names.append}
    exec(compile(marked("room/file.py", SOURCE), "file.py", "exec"), space)  # noqa: S102
    made = space["A"]
    assert made().outer() == [1]
    assert made.outer.__doc__ == "Its text."
    assert names == ["room/file.py:A.outer", "room/file.py:A.outer.inner"]


def test_a_process_is_known_by_its_command_line() -> None:
    assert kind_of(["python", "-m", "evaljobs", "stage", "spec.json"]) == "precursor"
    assert kind_of(["python", "other.py"]) == "other"
