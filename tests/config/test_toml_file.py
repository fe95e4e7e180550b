"""Laws of reading TOML: lines are right, and every complaint names one."""

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import toml
from evaljobs.contract.specs import Record

KEY = st.text(alphabet="abcdefgh_-", min_size=1, max_size=6)
VALUE = st.sampled_from(
    [
        "1",
        '"text"',
        '"a # b ] ["',
        '"quote \\" [x]"',
        "'lit # ] \\'",
        "[1, 2]",
        '[\n  "a", # ]\n  "b",\n]',
        '"""\n[not.a.table]\nkey = 1\n"""',
        "'''\n]]\n'''",
        "{ a = 1, b = [1] }",
        "true",
        '""',
    ]
)
COMMENT = st.sampled_from(["", '  # a comment [x] = "y" \''])
BLANK = st.sampled_from(["", "# [no.table]\n", "\n\n"])


@given(st.lists(st.tuples(KEY, st.lists(st.tuples(BLANK, KEY, VALUE, COMMENT), max_size=4)), max_size=4))
def test_every_key_is_found_on_its_line(tables):
    """For any file that TOML takes, the line found for a key is the one that it was written on."""
    text, expected, seen = "", {}, set()
    for table, entries in tables:
        if table in seen:
            continue
        seen.add(table)
        text += f"[{table}]\n"
        keys = set()
        for blank, key, value, comment in entries:
            if key in keys:
                continue
            keys.add(key)
            text += blank
            expected[(table, key)] = text.count("\n") + 1
            text += f"{key} = {value}{comment}\n"
    tomllib.loads(text)
    assert {where: toml.line_of(text, where) for where in expected} == expected


def test_arrays_of_tables_quotes_and_dots_are_counted():
    """Elements of an array of tables are numbered; quoted and dotted keys are split as in TOML."""
    text = (
        '[[task]]\nname = "a"\n[task.gen_kwargs]\nx = 1\n[[task]]\n"na.me" = 1\ny.z = 2\n[a."b.c"]\nd = 1\n'
    )
    expected = {
        ("task", 0, "name"): 2,
        ("task", 0, "gen_kwargs", "x"): 4,
        ("task", 1): 5,
        ("task", 1, "na.me"): 6,
        ("task", 1, "y", "z"): 7,
        ("a", "b.c", "d"): 9,
        ("task", 2): None,
    }
    assert {where: toml.line_of(text, where) for where in expected} == expected


class _Inner(Record):
    count: int = 1
    ratio: float = 1.0


class _Outer(Record):
    inner: _Inner = _Inner()
    items: tuple[_Inner, ...] = ()


def test_whole_numbers_are_fine_where_a_fraction_is_wanted():
    """`ratio = 2` is 2.0, although TOML has two kinds of number."""
    assert toml.check(_Outer, {"inner": {"ratio": 2}}, str).inner.ratio == 2.0
