"""Right and wrong programs, and tests that need more than values: (program, test) by name."""

from __future__ import annotations

VECTOR = """
class V:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == (other.x if isinstance(other, V) else other)
    def __hash__(self): return hash(self.x)
    def __lt__(self, other): return self.x < getattr(other, 'x', other)
    def __add__(self, other): return V(self.x + getattr(other, 'x', other))
    __radd__ = __add__
    def __iadd__(self, other): self.x += getattr(other, 'x', other); return self
    def __mul__(self, other): return self.x * other.x if isinstance(other, V) else V(self.x * other)
    def __neg__(self): return V(-self.x)
    def __abs__(self): return abs(self.x)
    def __float__(self): return float(self.x)
    def __round__(self, n=0): return round(self.x, n)
    def __contains__(self, item): return item == self.x
    def __getitem__(self, key): return (self.x, key)
    def __repr__(self): return f'V({self.x})'
    def __format__(self, spec): return f'<{self.x:{spec}}>'
    def more(self): return V(self.x + 1)
"""
STACK = """
class Stack(list):
    def push(self, x): self.append(x); return self
    def pop(self): return super().pop() * 10
    def peek(self): return self[-1]
"""
BANK = """
class BankError(Exception):
    def __init__(self, amount, balance):
        super().__init__(f'{amount} of {balance}')
        self.amount, self.balance = amount, balance
class Overdrawn(BankError): pass
class Account:
    class Closed(Exception): pass
    def __init__(self, balance=0): self.balance, self.log = balance, []
    def draw(self, amount):
        self.log.append(amount)
        if amount > self.balance: raise Overdrawn(amount, self.balance)
        self.balance -= amount
        return self
    def close(self): raise self.Closed('closed')
"""

PROGRAMS: dict[str, tuple[str, str]] = {
    # changes of arguments
    "changed, and a value returned": (
        "def f(l): return l.pop()",
        "a = [1, 2]\nassert f(a) == 2 and a == [1]",
    ),
    "changed and returned": (
        "def f(l): l.sort(); return l",
        "a = [2, 1]\nr = f(a)\nassert r is a and a == [1, 2]",
    ),
    "changed, then raised": (
        "def f(l): l.append(1); raise ValueError",
        "a = []\ntry:\n    f(a)\nexcept ValueError:\n    pass\nassert a == [1]",
    ),
    "in place, HumanEval's way": (
        "def f(nums):\n    k = 0\n    for n in nums:\n        if not k or nums[k - 1] != n: nums[k] = n; k += 1\n    return k",
        "def check(c):\n    nums = [1, 1, 2]\n    k = c(nums)\n    assert k == 2 and nums[:k] == [1, 2]\ncheck(f)",
    ),
    "nested, aliased": (
        "def f(m): m[0].append(5); m.reverse(); return m[0]",
        "row = [1]\nm = [row, [2], row]\nr = f(m)\nassert r is row and row == [1, 5] and m == [[1, 5], [2], [1, 5]]",
    ),
    "a list in itself": ("def f(l): l.append(l); return l", "a = [1]\nassert f(a) is a\nassert a[1] is a"),
    "kinds": (
        "def f(d, s, b, q, c): d['x'] = 1; s.add(9); b += b'z'; q.rotate(1); c.update('aa'); return len(d)",
        (
            "from collections import deque, Counter\nd, s, b, q, c = {'a': 0}, {1}, bytearray(b'y'), deque([1, 2]), Counter()\n"
            "assert f(d, s, b, q, c) == 2\nassert (d, s, b, q, c) == ({'a': 0, 'x': 1}, {1, 9}, b'yz', deque([2, 1]), {'a': 2})"
        ),
    ),
    "ordered": (
        "def f(d): d.move_to_end('a')",
        "from collections import OrderedDict\nd = OrderedDict(a=1, b=2)\nf(d)\nassert list(d) == ['b', 'a']",
    ),
    "default": (
        "from collections import defaultdict\ndef f(): return defaultdict(list)",
        "d = f()\nd['a'].append(1)\nassert d == {'a': [1]}",
    ),
    "by keyword": ("def f(*, l): l.clear(); return 1", "a = [1]\nassert f(l=a) == 1 and a == []"),
    "in a tuple": ("def f(t): t[1].append(1); return 0", "a = []\nf((1, a))\nassert a == [1]"),
    "big": (
        "def f(l): l.append(0); return len(l)",
        "a = list(range(100000))\nassert f(a) == 100001 and a[-1] == 0",
    ),
    "many": (
        "def f(l): l[0] += 1; return l",
        "rows = [[i] for i in range(300)]\nassert all(f(r) is r for r in rows) and rows[7] == [8]",
    ),
    # what objects hold
    "fluent": (
        "class S:\n    def __init__(self): self.l = []\n    def push(self, x): self.l.append(x); return self\n",
        "s = S()\nassert s.push(1).push(2) is s and s.l == [1, 2]",
    ),
    "linked": (
        (
            "class Node:\n    def __init__(s, v, n=None): s.v, s.next = v, n\n"
            "def rev(h):\n    p = None\n    while h: h.next, p, h = p, h, h.next\n    return p\n"
        ),
        "h = Node(1, Node(2))\nt = h.next\nr = rev(h)\nassert r is t and r.v == 2 and r.next is h and h.next is None",
    ),
    # what a handle can do
    "texts and equality": (
        VECTOR,
        "v = V(3)\nassert repr(v) == 'V(3)' and str(v) == 'V(3)' and f'{v:03d}' == '<003>' and v == V(3) and v != V(4) and v is not None and v != None",
    ),
    "enum": (
        "import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\ndef f(): return E.A\n",
        "assert f() is E.A and f() == E.A and f() != E.B and E(1) is E.A and E.B.value == 2 and len(E) == 2 and list(E)[1] is E.B",
    ),
    "data class": (
        "from dataclasses import dataclass, field\n@dataclass\nclass P:\n    x: int\n    l: list = field(default_factory=list)\n",
        "assert P(1).l == [] and P(1) == P(1, []) and P(1) != P(2) and repr(P(1)) == 'P(x=1, l=[])'",
    ),
    "values named": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\ndef f(p): return p._replace(x=p.x + 1)\n",
        "assert P(1) == (1,) and P(1).x == 1 and f(P(3)) == P(4)",
    ),
    "iteration": (
        "class R:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return iter(range(self.n))\n    def __len__(self): return self.n\n    def __call__(self, x): return x + self.n\n",
        "r = R(3)\nassert list(r) == [0, 1, 2] and len(r) == 3 and r(1) == 4 and [*zip(r, 'ab')] == [(0, 'a'), (1, 'b')]\nassert not R(0) and sum(r) == 3 and next(iter(r)) == 0",
    ),
    "a list's class with methods": (
        STACK,
        "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.peek() == 2 and s.pop() == 20 and list(s) == [1] and s",
    ),
    "passed classes": (
        "def f(g, kinds):\n    try:\n        return g(3)\n    except kinds as e:\n        return type(e).__name__\n",
        "assert f(str, ValueError) == '3' and f(len, (TypeError, ValueError)) == 'TypeError'",
    ),
    "returned classes": ("def f(x): return type(x)", "assert f(3) is int and f('') == str"),
    "leetcode": (
        "class Solution:\n    def move(self, nums):\n        nums.sort(key=lambda n: n == 0)\n        return len(nums)\n",
        "s = Solution()\na = [0, 1, 0, 3]\nassert s.move(a) == 4 and a == [1, 3, 0, 0]",
    ),
    # exceptions
    "library's exceptions": (
        "import json\ndef f(x): return json.loads(x)\ndef g(d): return d['k']\ndef h(): raise OSError(2, 'no')\n",
        (
            "import json\ntry:\n    f('[')\n    assert False\nexcept json.JSONDecodeError:\n    pass\ntry:\n    g({})\n    assert False\nexcept KeyError as e:\n    assert e.args == ('k',) and str(e) == \"'k'\"\n"
            "try:\n    h()\n    assert False\nexcept FileNotFoundError as e:\n    assert e.errno == 2"
        ),
    ),
    "lists in lists": (
        "def f(n):\n    d = []\n    for _ in range(n): d = [d]\n    return d\ndef depth(d):\n    n = 0\n    while d: d, n = d[0], n + 1\n    return n",
        "assert depth(f(900)) == 900\nd, n = f(900), 0\nwhile d: d, n = d[0], n + 1\nassert n == 900",
    ),
    # output
    "printed": (
        "def f(n):\n    print('hi', n)\n    return n",
        "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    f(1)\n    print('and')\n    assert f(2) == 2\nf(3)\nassert b.getvalue() == 'hi 1\\nand\\nhi 2\\n'",
    ),
    "printed to sys.stdout": (
        "import sys\ndef f():\n    sys.stdout.write('x')\n    raise ValueError",
        "import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\ntry:\n    f()\nexcept ValueError:\n    pass\ntext, sys.stdout = sys.stdout.getvalue(), old\nassert text == 'x'",
    ),
}

WRONG: dict[str, tuple[str, str]] = {
    "not changed": ("def f(l): return l[-1]", "a = [1, 2]\nassert f(a) == 2 and a == [1]"),
    "copied": ("def f(l): return list(l)", "a = [1]\nassert f(a) is a"),
    "not fluent": ("class S:\n    def push(self, x): return S()\n", "s = S()\nassert s.push(1) is s"),
    "never equal": (
        "class V:\n    def __init__(self, x): self.x = x\n",
        "assert V(1).x == 1 and V(1) == V(1)",
    ),
    "not printed": (
        "def f(): return 'hi'",
        "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    f()\nassert b.getvalue() == 'hi\\n'",
    ),
    "another member": (
        "import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\ndef f(): return E.B",
        "assert f() is E.A",
    ),
}

# Tests whose text says that they need the program's own process, with right programs.
IN_PROCESS: dict[str, tuple[str, str]] = {
    "enum of numbers": (
        (
            "from enum import Enum, IntEnum\nclass C(IntEnum):\n    A = 1\n    B = 2\nclass S(str, Enum):\n    A = 'a'\n"
            "def f(): return C.B\ndef g(c): return c is C.B and type(c) is C\n"
        ),
        (
            "assert f() is C.B and f() == 2 and f().name == 'B' and f().value == 2 and g(f()) and f() + 1 == 3\n"
            "assert S('a') is S.A and S.A == 'a' and S.A.value == 'a' and S.A.upper() == 'A' and {S.A: 1}['a'] == 1 and isinstance(f(), C)"
        ),
    ),
    "types": (
        "class A: 'An A.'\nclass B(A): pass\ndef f(): return B()\n",
        (
            "assert type(f()) is B and type(f()).__name__ == 'B' and f().__class__ is B and f().__class__.__name__ == 'B'\n"
            "assert type(3) is int and ''.__class__ is str\nassert A.__doc__ == 'An A.'\n"
            "assert '__init__' in dir(A())"
        ),
    ),
    "namedtuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)\ndef g(p): return p._replace(x=9)\n",
        "assert f().x == 1 and f() == P(1, 2) == (1, 2) and isinstance(f(), P) and isinstance(f(), tuple)\nassert g(f()) == P(9, 2) and repr(f()) == 'P(x=1, y=2)'",
    ),
    "classes": (
        "class A:\n    kinds = []\n    @classmethod\n    def make(cls): return cls()\n    @staticmethod\n    def two(): return 2\n    @property\n    def p(self): return self.two()\nclass B(A): pass\n",
        "assert isinstance(B(), A) and not isinstance(A(), B) and issubclass(B, A) and isinstance(B.make(), B)\nassert B.two() == A().p == 2 and B.__name__ == 'B'\nA.kinds.append(1)\nassert B.kinds == [1]",
    ),
    "own exceptions": (
        BANK,
        (
            "a = Account(5)\ntry:\n    a.draw(9)\n    assert False\nexcept BankError as e:\n    assert e.amount == 9 and e.balance == 5 and str(e) == '9 of 5' and isinstance(e, Overdrawn) and type(e).__name__ == 'Overdrawn'\n"
            "assert a.log == [9] and a.draw(2) is a\ntry:\n    a.close()\n    assert False\nexcept Account.Closed as e:\n    assert str(e) == 'closed'"
        ),
    ),
    "classes are what they are": (
        "class Stack:\n    def push(self, x): return self",
        "s = Stack()\nassert type(s) is Stack and s.push(1) is s and s.__class__ is Stack and type(Stack()) is Stack",
    ),
    "a file": (
        "def f(p):\n    with open(p, 'w') as o: o.write('hi')",
        "import os, tempfile\np = os.path.join(tempfile.mkdtemp(), 'x')\nf(p)\nassert open(p).read() == 'hi'",
    ),
    "input": (
        "def f(): return int(input()) + 1",
        "import io, sys\nsys.stdin = io.StringIO('4\\n')\nassert f() == 5\nsys.stdin = sys.__stdin__",
    ),
    "coroutine": ("async def f(): return 3", "import asyncio\nassert asyncio.run(f()) == 3"),
    "callback": (
        "def f(g, x): return g(x)",
        "seen = []\nf(seen.append, 2)\nassert f(lambda v: v + 1, 2) == 3 and seen == [2]",
    ),
}

# The same with wrong programs.
WRONG_IN_PROCESS: dict[str, tuple[str, str]] = {
    "not raised": (
        BANK.replace("raise Over", "Over"),
        "try:\n    Account(5).draw(9)\n    assert False\nexcept BankError:\n    pass",
    ),
}

# Right programs that a test asks for more than a handle can do.
UNSUPPORTED: dict[str, tuple[str, str]] = {
    "an argument in itself": ("def f(l): return 1", "a = []\na.append(a)\nassert f(a) == 1"),
    "an answer in itself": ("def f():\n    a = [1]\n    a.append(a)\n    return a", "assert f()[0] == 1"),
    "a long answer": ("def f(): return 'x' * (33 << 20)", "assert len(f()) == 33 << 20"),
    "operators": (
        VECTOR,
        (
            "assert V(1) < V(2) and V(2) > V(1)\nassert (V(1) + V(2)).x == 3 and V(1) + V(2) == V(3)\nassert 1 in V(1) and 2 not in V(1)\n"
            "assert V(1) != V(2) and V(2) * V(3) == 6\nassert sorted([V(2), V(1)])[0].x == 1 and max([V(1), V(2)]).x == 2"
        ),
    ),
    "operators with numbers": (
        VECTOR,
        (
            "v = V(3)\nassert v == 3 and v < 4 and v * 2 == V(6) and 1 + v == V(4) and (v * 2 * 2).x == 12\nassert -v == V(-3) and abs(V(-2)) == 2\n"
            "assert float(v) == 3.0 and round(V(1.26), 1) == 1.3\nw = v\nv += 2\nassert v is w and v == 5 and sum([V(1), V(2)]).x == 3"
        ),
    ),
    "hash": (
        VECTOR,
        "assert len({V(1), V(1), V(2)}) == 2 and {V(1): 'a'}[V(1)] == 'a' and hash(V(5)) == hash(5)",
    ),
    "with": (
        "class C:\n    def __enter__(s): s.l = ['in']; return s\n    def __exit__(s, kind, error, tb): s.l.append(kind and kind.__name__); return kind is KeyError\n",
        (
            "with C() as c:\n    assert c.l == ['in']\nassert c.l == ['in', None]\nwith C() as c:\n    raise KeyError('x')\nassert c.l == ['in', 'KeyError']\n"
            "try:\n    with C() as c:\n        raise ValueError\n    assert False\nexcept ValueError:\n    assert c.l[1] == 'ValueError'"
        ),
    ),
    "a list's class": (
        STACK,
        "s = Stack()\nassert s == [] and s != [1]\ns.push(1).push(2)\nassert len(s) == 2 and s.peek() == 2 and s.pop() == 20 and list(s) == [1] and 1 in s and s",
    ),
    "a copy": (
        "import copy\nclass A:\n    def __init__(self): self.l = [1]\n",
        "import copy\na = A()\nassert copy.copy(a).l == [1]",
    ),
    "a function found while it runs": (
        "def f(g): return g[0](3)",
        "import math as m\nassert f([m.factorial]) == 6",
    ),
    "equal to data": (
        "class L:\n    def __init__(s, v): s.v = v\n    def __eq__(s, o): return s.v == o\n",
        "assert L(3) == 3",
    ),
    "a method's result": (VECTOR, "assert V(1).more() == 2"),
    "suppressed": (
        "class C:\n    def __enter__(s): return s\n    def __exit__(s, *a): return True\n",
        "with C():\n    assert False\n",
    ),
}
