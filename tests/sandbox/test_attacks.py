"""Programs that try to get out, to fool the checker or to break the sandbox; and unusual right
ones.

`attacks.ATTACKS` are wrong programs that can only be passed wrongly;
`data/adversarial_programs.jsonl` has more.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sandbox.attacks import ADD, ATTACKS, ROOT

DATA = Path(__file__).with_name("data")

HONEST: list[tuple[str, dict[str, object]]] = [
    ("builtin-name", {"code": "def sum(a, b):\n    return a * b\n", "test_list": ("assert sum(2, 3) == 6",)}),
    (
        "library-name",
        {
            "code": "def gcd(a, b):\n    return b if a == 0 else gcd(b % a, a)\n",
            "test_list": ("assert gcd(4, 6) == 2",),
        },
    ),
    ("imported-name", {"code": "from operator import add\n", **ADD}),
    ("own-import", {"code": "import math\ndef f(x): return x * x\n", "test": "assert math.isclose(f(3), 9)"}),
    (
        "from-import",
        {"code": "from math import isclose\ndef f(x): return x * x\n", "test": "assert isclose(f(3), 9)"},
    ),
    (
        "setup",
        {
            "code": "def f(x): return sqrt(x)\n",
            "test_setup_code": "from math import sqrt",
            "test_list": ("assert f(9) == 3", "assert sqrt(9) == f(9)"),
        },
    ),
    (
        "own-class",
        {
            "code": "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\ndef longest(ps):\n    return sum(p.b - p.a for p in ps)\n",
            "test_list": ("assert longest([Pair(1, 3), Pair(2, 5)]) == 5", "assert Pair(1, 2).b == 2"),
        },
    ),
    (
        "generator",
        {
            "code": "def f(n):\n    yield from range(n)\n",
            "test": "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0",
        },
    ),
    (
        "in-place",
        {"code": "def f(xs):\n    xs.sort()\n", "test": "xs = [3, 1, 2]\nf(xs)\nassert xs == [1, 2, 3]"},
    ),
    (
        "in-place-nested",
        {
            "code": "def f(m):\n    m[0][0] = 9\n    m.append([7])\n",
            "test": "m = [[1], [2]]\nrow = m[0]\nf(m)\nassert row == [9] and m == [[9], [2], [7]]",
        },
    ),
    ("closure", {"code": "def f(n):\n    return lambda x: x + n\n", "test": "assert f(2)(3) == 5"}),
    ("keyword", {"code": "def f(a, *, b=1):\n    return a - b\n", "test": "assert f(3, b=2) == 1"}),
    (
        "exception",
        {
            "code": "class Bad(ValueError): pass\ndef f(x):\n    raise Bad('no')\n",
            "test": "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'",
        },
    ),
    (
        "types",
        {
            "code": "from collections import *\nfrom decimal import Decimal\nfrom fractions import Fraction\nimport datetime\nP = namedtuple('P', 'x y')\n"
            "def f():\n    return [Counter('aab'), OrderedDict(a=1), defaultdict(list, a=[1]), deque([1]), {1, 2}, frozenset({3}), b'x', bytearray(b'y'),\n"
            "        1j, range(3), Decimal('1.5'), Fraction(1, 3), datetime.date(2020, 1, 2), P(1, 2), (1, (2,)), {1: {2: None}}, 10**5000, '\\ud800', '\\U0001F600', -0.0]\n",
            "test": "import datetime\nfrom decimal import Decimal\nfrom fractions import Fraction\nr = f()\n"
            "assert r[:15] == [{'a': 2, 'b': 1}, {'a': 1}, {'a': [1]}, __import__('collections').deque([1]), {1, 2}, {3}, b'x', b'y', 1j, range(3), Decimal('1.5'), Fraction(1, 3), datetime.date(2020, 1, 2), (1, 2), (1, (2,))]\n"
            "assert r[13].y == 2 and r[15] == {1: {2: None}} and r[16] == 10**5000 and r[17] == '\\ud800' and len(r[18]) == 1 and str(r[19]) == '-0.0'",
        },
    ),
    (
        "big-answer",
        {
            "code": "def f(n):\n    return list(range(n))\n",
            "test": "assert sum(f(300000)) == 300000 * 299999 // 2",
        },
    ),
    ("prints", {**ADD, "code": "def add(a, b):\n    print('adding', a, b)\n    return a + b\n"}),
    (
        "scratch-free-asyncio",
        {
            **ADD,
            "code": "import asyncio\nasync def work(a, b):\n    await asyncio.sleep(0)\n    return a + b\ndef add(a, b): return asyncio.run(work(a, b))\n",
        },
    ),
    ("helper-of-prompt", {**ROOT, "completion": "    return -xs[0] / xs[1]\n"}),
    (
        "stdin",
        {
            "code": "n = int(input())\nfor line in __import__('sys').stdin: n += int(line)\nprint(n)\n",
            "stdin": ("1\n2\n", "3\n4\n5"),
            "stdout": ("3", "12\n\n"),
        },
    ),
    (
        "stdin-main",
        {
            "code": "def main():\n    print(len(input()))\nif __name__ == '__main__':\n    main()\n    exit()\n",
            "stdin": "x" * 200000 + "\n",
            "stdout": "200000",
        },
    ),
    (
        "dataclass",
        {
            "code": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x): return P(x)\n",
            "test": "assert f(3) == P(3) and f(3).x == 3",
        },
    ),
]


def _listed() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    problem = json.loads((DATA / "adversarial_problem.json").read_text())
    return problem, [
        json.loads(line) for line in (DATA / "adversarial_programs.jsonl").read_text().splitlines()
    ]


def test_listed_programs_fare_as_expected_and_leave_nothing(run: Any, level: str, who: str) -> None:
    """No hostile program passes, an honest one after each does, and no trace is left."""
    problem, rows = _listed()
    subprocess.run(["/bin/sh", "-c", problem["setup"]], check=True)
    fields = {name: problem[name] for name in ("prompt", "entry_point", "test")}
    programs = []
    for row in rows:
        # an honest program may need its time on a busy machine; a hostile one shall not have it
        limit = 20.0 if row["expected"] == "pass" else 1.0
        programs.append({**fields, "id": row["id"], "completion": row["code"], "timeout_seconds": limit})
        programs.append({**fields, "id": "honest", "completion": "    return a + b\n"})
    verdicts = run(programs, level, who)
    assert [v["id"] for v in verdicts] == [p["id"] for p in programs]
    wrong = []
    for row, verdict, honest in zip(rows, verdicts[::2], verdicts[1::2], strict=True):
        passed = verdict["verdict"] == "pass"
        if passed != (row["expected"] == "pass") or (
            row["expected"] == "timeout" and verdict["verdict"] != "timeout"
        ):
            wrong.append(verdict)
        if honest["verdict"] != "pass":
            wrong.append(("after", row["id"], honest))
        if subprocess.run(
            ["/bin/bash", "-c", row["side_effect_check"]], check=False, capture_output=True
        ).returncode:
            wrong.append(("side effect of", row["id"]))
    assert wrong == []
    assert {v["isolation"] for v in verdicts} == {level}


def test_no_further_attack_passes_or_chooses_its_judge(run: Any, level: str, who: str) -> None:
    """No attack passes, gets into the test's process, or spoils the right program after it."""
    programs = []
    for name, fields in ATTACKS:
        programs.append({"id": name, "timeout_seconds": 1.0, **fields})
        programs.append({"id": "honest", "completion": "def add(a, b):\n    return a + b\n", **ADD})
    verdicts = run(programs, level, who)
    assert [v for v in verdicts[::2] if v["verdict"] in ("pass", "refused") or v["isolation"] != level] == []
    assert [v for v in verdicts[1::2] if v["verdict"] != "pass"] == []


def test_right_programs_of_unusual_shape_pass(run: Any, level: str, who: str) -> None:
    """The data-only boundary costs no honest program its pass."""
    verdicts = run([{"id": name, **fields} for name, fields in HONEST], level, who)
    assert [v for v in verdicts if v["verdict"] != "pass" or v["isolation"] != level] == []


def test_rlimits_are_refused_unless_allowed(run: Any, who: str) -> None:
    """Resource limits alone are used on request only, and never as root."""
    honest = {"id": "honest", "completion": "def add(a, b):\n    return a + b\n", **ADD}
    with pytest.raises(AssertionError, match="allow-unsafe"):
        run([honest], "rlimits", who)
    (verdict,) = run([honest], "rlimits", who, "--allow-unsafe")
    assert (verdict["verdict"], verdict["isolation"]) == ("pass", "rlimits")
