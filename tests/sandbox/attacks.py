"""Programs that try to pass without a solution, beside the listed hostile ones."""

from __future__ import annotations

ADD_TEST = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n"
ADD = {"entry_point": "add", "test": ADD_TEST}
ROOT = {  # HumanEval/32: the test calls a helper of the prompt
    "prompt": "import math\n\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n"
    'def find_zero(xs):\n    """Find x with poly(xs, x) == 0."""\n',
    "entry_point": "find_zero",
    "test": "def check(candidate):\n    import random\n    rng = random.Random(42)\n    for _ in range(20):\n"
    "        cs = [rng.randint(-10, 10) or 1, rng.randint(1, 10)]\n"
    "        assert math.fabs(poly(cs, candidate(cs))) < 1e-4\n",
}

# An object whose every operation returns the value that a test expects.
_LIAR = """
class Liar:
    def _zero(self, *a, **k): return 0
    def _true(self, *a, **k): return True
    __sub__ = __rsub__ = __abs__ = __float__ = __int__ = __index__ = __round__ = __mod__ = __rmod__ = __pow__ = _zero
    __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = _zero
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = _true
    __hash__ = object.__hash__
    def __array__(self, *a, **k): return 0
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
"""

_RAW = """
import os, struct, sys, json
def frame(body):
    return struct.pack('!I', len(body)) + body
def say(*bodies):
    for body in bodies:
        os.write(3, frame(body))
"""


# In the test's own process, a pass is a token that a frame of the agent holds.
_FORGE = (
    _RAW
    + """
def forge():
    frame = sys._getframe()
    while frame:
        if 'token' in frame.f_locals:
            say(json.dumps(['v', frame.f_locals['token']]).encode())
            os._exit(0)
        frame = frame.f_back
"""
)


def _liar(test: str) -> dict[str, object]:
    return {"code": _LIAR + "def f(*a):\n    return Liar()\n", "test": test}


def _raw(after: str, **fields: object) -> dict[str, object]:
    return {
        **ADD,
        "code": _RAW + "def add(a, b):\n" + "".join(f"    {line}\n" for line in after.split("\n")),
        **fields,
    }


ATTACKS: list[tuple[str, dict[str, object]]] = [
    (
        "shadow-abs",
        {"code": "def f(x):\n    return 0\nabs = lambda x: -1\n", "test": "assert abs(f(3) - 9) < 1e-6"},
    ),
    (
        "shadow-builtins-module",
        {
            "code": "import builtins\nbuiltins.abs = lambda x: -1\ndef f(x): return 0\n",
            "test": "assert abs(f(3) - 9) < 1e-6",
        },
    ),
    (
        "shadow-math-class",
        {
            "code": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0\n",
            "test": "assert math.isclose(f(3), 9)",
        },
    ),
    (
        "shadow-math-patched",
        {
            "code": "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0\n",
            "test": "assert math.isclose(f(3), 9)",
        },
    ),
    (
        "shadow-isclose",
        {
            "code": "def isclose(*a, **k): return True\ndef f(x): return 0\n",
            "test": "assert isclose(f(3), 9)",
        },
    ),
    (
        "shadow-module-alias",
        {
            "code": "import operator as math\nmath.isclose = lambda *a: True\ndef f(x): return 0\n",
            "test": "assert math.isclose(f(3), 9)",
        },
    ),
    ("shadow-check", {**ADD, "code": "def add(a, b): return 0\ndef check(c): return None\n"}),
    (
        "decorate-test",
        {**ADD, "code": "def add(a, b): return 0\ndef skip(f): return lambda c: None\n@skip\\\n"},
    ),
    ("swallow-test", {**ADD, "code": "def add(a, b): return 0\ncheck = lambda c: None\n'''"}),
    ("redefine-helper", {**ROOT, "completion": "    return 1\n\ndef poly(xs, x):\n    return 0\n"}),
    ("redefine-fabs", {**ROOT, "completion": "    return 1\n\nmath.fabs = lambda x: 0\n"}),
    ("liar-tolerance", _liar("assert abs(f(3) - 9) < 1e-6")),
    ("liar-less", _liar("assert f(3) < 1e-6 and f(3) > 5")),
    ("liar-contains", _liar("assert 9 in f(3)")),
    ("liar-element", _liar("assert f(3) in [9, 10]")),
    (
        "liar-float",
        _liar("import math\nassert math.isclose(float(f(3)), 0.0, abs_tol=1e-9) or math.isclose(f(3), 9)"),
    ),
    ("liar-round", _liar("assert round(f(3), 2) == 0")),
    ("liar-list", _liar("assert [f(3)] == [9]")),
    ("liar-dict", _liar("assert {'a': f(3)} == {'a': 9}")),
    ("liar-reflected", _liar("assert 9 == f(3)")),
    ("liar-isinstance", _liar("assert isinstance(f(3), int)")),
    ("liar-type", _liar("assert type(f(3)) is int")),
    (
        "stop-iteration",
        {
            "code": "def f(x): raise StopIteration\n",
            "test": "for got, want in zip(map(f, [1, 2]), [1, 4]):\n    assert got == want",
        },
    ),
    (
        "stop-frame",
        {
            "code": _RAW + "def f(x):\n    say(b'[\"stop\"]')\n",
            "test": "for got, want in zip(map(f, [1, 2]), [1, 4]):\n    assert got == want",
        },
    ),
    (
        "raise-exit",
        {
            "code": "def f(x): raise SystemExit(0)\n",
            "test": "try:\n    assert f(2) == 4\nexcept Exception:\n    pass",
        },
    ),
    (
        "die-in-bare-except",
        {
            "code": "import os\ndef f(x): os._exit(0)\n",
            "test": "try:\n    assert f(2) == 4\nexcept:\n    pass",
        },
    ),
    (
        "babble-in-bare-except",
        {
            "code": _RAW + "def f(x):\n    say(b'[')\n",
            "test": "try:\n    assert f(2) == 4\nexcept:\n    pass",
        },
    ),
    ("frame-huge-length", _raw("os.write(3, b'\\xff' * 64)\nimport time; time.sleep(0.2)")),
    ("frame-nested", _raw("say(b'[\"v\",' + b'[' * 200000 + b']' * 200000 + b']')")),
    ("frame-nested-tags", _raw("say(b'[\"v\",' + b'{\"t\":[' * 50000 + b']}' * 50000 + b']')")),
    ("frame-not-json", _raw("say(bytes(range(256)))")),
    ("frame-empty", _raw("say(b'')")),
    ("frame-unknown-tag", _raw('say(b\'["v",{"__class__":1}]\')')),
    ("frame-two-tags", _raw('say(b\'["v",{"t":[],"d":[]}]\')')),
    ("frame-bad-handle", _raw('say(b\'["v",{"h":["x",1]}]\')')),
    ("frame-callable-everything", _raw('say(b\'["v",{"h":[0,1]}]\')')),
    ("frame-numpy-object", _raw('say(b\'["v",{"n":["O",[1],[5]]}]\')')),
    ("frame-datetime64", _raw('say(b\'["v",{"n":["<M8[s]",[1],[5]]}]\')')),
    ("frame-namedtuple-code", _raw('say(b\'["v",{"N":["x",["a: __import__(1)"],[5]]}]\')')),
    ("frame-huge-digits", _raw("say(b'[\"v\",' + b'9' * 1000000 + b']')")),
    ("frame-huge-decimal", _raw('say(b\'["v",{"D":"1E+999999999"}]\')')),
    ("frame-forged-verdict", _raw('say(b\'{"verdict":"pass","reason":""}\')')),
    ("frame-arguments-of-other-kind", _raw('say(b\'["v",null,[[9],{"d":[]}]]\')')),
    ("frame-exception-shape", _raw("say(b'[\"e\",{},[],3]')")),
    ("frame-many", _raw("say(*[b'[\"v\",0]'] * 20000)")),
    (
        "force-in-process",
        {  # a value that decodes but has no way back must not move the test into the program's process
            "code": _RAW
            + 'import sys\ndef enc(x):\n    say(b\'["v",{"T":["datetime","2020-01-01T00:00:00+00:00"]}]\')\n'
            + "def dec(x): return 0\n"
            + "import os\nif 'check_in_process' in dir(): os._exit(0)\n",
            "test": "assert dec(enc('a')) == 'a'",
        },
    ),
    # objects of the program beside expected values
    *(
        (f"class-{name}", {"code": _LIAR + code, "test": test})
        for name, code, test in [
            (
                "returns-self",
                "class Solution(Liar):\n    def f(self, x): return self\n",
                "assert Solution().f(3) == 9",
            ),
            (
                "returns-what-it-makes-next",
                (
                    "class Solution(Liar):\n    last = None\n    def __new__(cls):\n        cls.last = cls.last or object.__new__(cls)\n        return cls.last\n"
                    "    def f(self, x):\n        type(self).last = Liar()\n        return self.last\n"
                ),
                "r = Solution().f(3)\ns = Solution()\nassert s.f(1) and r == 9",
            ),
            (
                "puts-itself-in-a-list",
                "class Sorter(Liar):\n    old = []\n    def __init__(self, l):\n        for o, m in self.old: m[:] = [o] * len(m)\n        self.old.append((self, l))\n    def sort(self): return None\n",
                "a = [3, 1, 2]\nSorter(a).sort()\nb = [2, 1]\nSorter(b).sort()\nassert a == [1, 2, 3] and b == [1, 2]",
            ),
            (
                "puts-itself-in-a-list-in-place",
                "class Sorter(Liar):\n    def __init__(self, l): self.l = l\n    def __iadd__(self, x):\n        self.l[:] = [self]\n        return self\n    def height(self): return 1\n",
                "a = [3]\ns = Sorter(a)\ns += 1\nassert s.height() == 1 and a == [4]",
            ),
            (
                "product",
                "class V(Liar):\n    def __init__(self, x): self.x = x\n",
                "assert V(1).x == 1 and V(1) * V(2) == 2",
            ),
            (
                "product-within-tolerance",
                "class V(Liar):\n    def __init__(self, x): self.x = x\n    def __mul__(self, o): return V(0)\n",
                "assert V(1).x == 1 and abs(V(1) * V(2) - 2) < 1e-6",
            ),
            (
                "enters-itself",
                "class Open(Liar):\n    def __init__(self, *a): pass\n    def __enter__(self): return self\n    def __exit__(self, *a): return True\n",
                "with Open(3) as r:\n    assert r == 9",
            ),
            (
                "suppresses",
                "class Open(Liar):\n    def __init__(self, *a): pass\n    def __enter__(self): return 1\n    def __exit__(self, *a): return True\n",
                "with Open(3) as r:\n    assert r == 9",
            ),
            (
                "suppresses-type-error",
                "class Open(Liar):\n    def __init__(self, *a): pass\n    def __enter__(self): return None\n    def __exit__(self, *a): return True\n",
                "with Open(3) as r:\n    assert r[0] == 9",
            ),
            (
                "of-a-function",
                "class f(Liar):\n    def __init__(self, *a): self.x = 1\n",
                "assert f(3).x == 1 and f(3) == (1, 2)",
            ),
            (
                "hash",
                "def f(x): return Liar()\nLiar.__hash__ = lambda self: hash(9)\n",
                "assert f(3) in {9, 10} and {9: 1}[f(3)]",
            ),
            (
                "in-place-number",
                "def f(x): return Liar()\nLiar.__iadd__ = lambda self, o: 0\n",
                "r = f(3)\nr -= 9\nassert r == 0",
            ),
            (
                "from-data",
                "def f(x): return Liar()\n",
                "assert 9 - f(3) == 0 or 9 < f(3) or divmod(f(3), 9) == (0, 0)",
            ),
            ("negative", "def f(x): return Liar()\nLiar.__neg__ = Liar._zero\n", "assert -f(3) == 0"),
            (
                "named-tuple",
                "from collections import namedtuple\nclass P(namedtuple('P', 'x y')):\n    def __eq__(self, o): return True\ndef f(x): return P(0, 0)\n",
                "assert f(3) == (3, 9)",
            ),
            (
                "number-with-methods",
                "class L(int):\n    __eq__ = __sub__ = __lt__ = __abs__ = lambda self, *a: True\n    __hash__ = int.__hash__\ndef f(x): return L(7)\n",
                "assert f(3) == 9 or f(3) - 9 == 0 or abs(f(3) - 9) < 1e-6",
            ),
            (
                "spoofed",
                "class I:\n    __class__ = int\n    __eq__ = Liar._true\ndef f(x): return I()\n",
                "assert type(f(3)) is int or f(3).__class__ is int or isinstance(f(3), int)",
            ),
            (
                "type-patched",
                "import builtins, types\nkind = type\nbuiltins.type = lambda x: int\ndef f(x): return Liar()\n",
                "assert type(f(3)) is int",
            ),
            (
                "is-its-own-method",
                "class Solution(Liar): pass\nSolution.f = Solution\n",
                "assert Solution().f(3) == 9",
            ),
            (
                "under-another-name",
                "class Money(Liar): amount = 1\nf = Money\n",
                "assert Money().amount == 1 and f() == 9",
            ),
            (
                "in-a-list",
                "class Item(Liar): x = 1\ndef f(l): return l\n",
                "q = Item()\nassert q.x == 1\np = [q, (Item(),)]\nassert f(p) == [7, (9,)]",
            ),
            (
                "named-while-hashed",
                _RAW + "class Sorter:\n    def __new__(cls, l):\n"
                '        say(b\'["v",{"h":[78,true]},[{"e":[{"h":[79,true]}]}],[],""]\')\n        while True:\n'
                "            q = os.read(3, struct.unpack('!I', os.read(3, 4))[0])\n"
                '            if b\'"hash"\' in q: say(b\'["v",5,[{"m":[2,"l",[{"h":[78,true]}]]}],[],""]\')\n'
                '            else: say(b\'["v",{"h":[80,true]}]\' if b\'"get"\' in q or b\'"call"\' in q else b\'["v",true]\')\n',
                "b = [2]\ns = Sorter(b)\ns.run()\nassert b == [1]",
            ),
            (
                "data-with-methods",
                "class L(list):\n    def count(self, x): return 1\n    def __eq__(self, o): return True\ndef f(x): return L()\n",
                "assert f(3) == [9] or f(3).count(9) == 1",
            ),
        ]
    ),
    *(
        (f"frame-{name}", _raw(f"say({body!r})\nreturn 5"))
        for name, body in [
            ("shared-number-of-the-checker", b'["v",{"m":[1000,"l",[5]]}]'),
            ("shared-kind-changed", b'["v",5,[{"m":[2,"d",[1,2]]}],[],""]'),
            ("shared-odd-kind", b'["v",{"m":[1,"x",[5]]}]'),
            ("shared-endless-deque", b'["v",{"m":[1,"q99999999999999999999",[5]]}]'),
            ("shared-no-list", b'["v",{"m":[1,"l",{"t":[5]}]}]'),
            ("shared-forgotten-all", b'["v",0,[],[2,4,6,8,"x",null,{"t":[]}],""]'),
            ("builtin-function", b'["v",{"h":["eval",true]}]'),
            ("class-of-any-module", b'["e",{"t":[{"h":[0,1,"os",["system"]]},"m",null,null]}]'),
            ("class-without-names", b'["e",{"t":[{"h":[0,1,"os",[]]},"m",null,null]}]'),
            ("exception-no-class", b'["e",{"t":[5,"m",null,null]}]'),
            ("exception-of-answers", b'["e",{"t":[{"h":["KeyboardInterrupt",1]},"m",null,null]}]'),
            ("named-tuple-of-a-class", b'["v",{"N":["x",["a"],[5],0]}]'),
            ("named-tuple-short", b'["v",{"N":["x",["a","b"],[5],0]}]'),
            ("output", b'["v",0,[],[],"pass"]'),
            ("own-data-of-a-class", b'["v",{"S":[["int",1],7]}]'),
            ("own-data-of-no-kind", b'["v",{"S":[[0,1],{"t":[]}]}]'),
            ("own-data-twice", b'["v",[{"S":[[0,1],7]},{"S":[[0,1],"x"]}]]'),
        ]
    ),
    # answers in the codec's own form
    *(
        (f"answer-{name}", _raw(f"say({body!r})\nreturn 5"))
        for name, body in [
            ("changes-what-was-not-passed", b'["v",5,[[0,[1]]],""]'),
            ("changes-no-list", b'["v",5,7,""]'),
            ("changes-a-negative", b'["v",5,[[-1,[1]]],""]'),
            ("names-what-was-not-passed", b'["v",{"m":0}]'),
            ("numbers-a-value", b'["v",{"m":[0,[5]]}]'),
            ("factory", b'["v",{"M":["eval",[]]}]'),
            ("handle-function", b'["v",{"h":"eval"}]'),
            ("handle-exception", b'["v",{"h":"Exception"}]'),
            ("handle-negative", b'["v",{"h":-1}]'),
            ("raises-a-function", b'["e",[[["os","system"]],"m",null]]'),
            ("raises-an-exit", b'["e",[[["builtins","KeyboardInterrupt"]],"m",null]]'),
            ("raises-the-checkers-own", b'["e",[[["evaljobs.sandbox.rpc.link","FaultError"]],"m",null]]'),
            ("raises-nothing", b'["e",[[],"m",null]]'),
            ("prints", b'["v",0,[],"pass"]'),
            ("gives-no-value", b'["u","pass"]'),
        ]
    ),
    *(
        (
            f"answer-{name}",
            {"code": _RAW + f"def f(l):\n    say({body!r})\n", "test": "a = [3]\nf(a)\nassert a == [4]"},
        )
        for name, body in [
            ("changes-the-kind", b'["v",5,[[0,{"d":[4,4]}]],""]'),
            ("fills-with-handles", b'["v",5,[[0,[{"h":9}]]],""]'),
            ("fills-with-itself", b'["v",5,[[0,[{"m":0}]]],""]'),
        ]
    ),
    # classes that the program names
    *(
        (f"catches-{name}", {"code": f"class A:\n    Bad = {bad}\n    def f(self): return 0\n", "test": test})
        for name, bad in [
            ("all", "Exception"),
            ("assertions", "AssertionError"),
            ("one-of", "(KeyError, Exception)"),
        ]
        for test in ["try:\n    A().f()\n    assert False\nexcept A.Bad:\n    pass"]
    ),
    *(
        (
            f"makes-{kind}",
            {"code": f"{_FORGE}class A:\n    to = {kind}\n    def back(self, x): forge()\n", "test": test},
        )
        for kind in [
            "enumerate",
            "zip",
            "memoryview",
            "staticmethod",
            "ValueError",
            "type('Bad', (Exception,), {})",
        ]
        for test in ["assert A().back(A.to(b'a')) == b'a'"]
    ),
    (
        "makes-object",
        {"code": f"{_FORGE}make = object\ndef back(x): forge()\n", "test": "assert back(make()) == 1"},
    ),
    ("frame-builtin-loader", _raw('say(b\'["v",{"h":["__loader__",true]}]\')')),
    (
        "find-test-in-memory",
        {
            **ADD,
            "code": "def add(a, b):\n    import re\n    found = None\n    try:\n        maps = open('/proc/self/maps').read().splitlines()\n"
            "        mem = open('/proc/self/mem', 'rb', 0)\n        for line in maps:\n            span, mode = line.split()[:2]\n"
            "            if 'rw' not in mode: continue\n            lo, hi = (int(v, 16) for v in span.split('-'))\n            mem.seek(lo)\n"
            "            m = re.search(rb'candidate.%d, %d. == (-?\\d+)' % (a, b), mem.read(hi - lo))\n            if m: return int(m.group(1))\n"
            "    except OSError: pass\n    import gc\n    for o in gc.get_objects():\n        for r in gc.get_referents(o):\n"
            "            if isinstance(r, str) and 'assert candidate' in r:\n                m = re.search(r'candidate\\(%d, %d\\) == (-?\\d+)' % (a, b), r)\n"
            "                if m: return int(m.group(1))\n",
        },
    ),
    (
        "patch-agent",
        {
            **ADD,
            "code": "import sys\nfor name, module in list(sys.modules.items()):\n    if name.endswith('checker'):\n"
            "        module.judge = lambda *a: ('pass', '')\n        module._judge_test = lambda *a: ('pass', '')\n"
            "    if name.endswith('codec'):\n        module.Encoder.dumps = lambda self, v: '5'\n"
            "def add(a, b): return 0\n",
        },
    ),
    (
        "thread-babble",
        _raw(
            "import threading\nthreading.Thread(target=lambda: [say(b'[\"v\",5]', b'[\"v\",5]') for _ in range(99)], daemon=True).start()\nreturn 5"
        ),
    ),
    (
        "exit-thread",
        {
            **ADD,
            "code": "import threading, os\nthreading.Timer(0.0, os._exit, [0]).start()\ndef add(a, b):\n    import time; time.sleep(9)\n",
        },
    ),
    ("stdout-wrong", {"code": "print(input())\n", "stdin": "3\n", "stdout": "9\n"}),
    ("stdout-flood", {"code": "while True: print('9' * 10000)\n", "stdin": "3\n", "stdout": "9\n"}),
    ("stdout-then-fail", {"code": "print(9)\nraise SystemExit(1)\n", "stdin": "3\n", "stdout": "9\n"}),
    (
        "many-threads",
        {
            **ADD,
            "code": "import threading\ndef spin():\n    while True: pass\nfor _ in range(60): threading.Thread(target=spin, daemon=True).start()\ndef add(a, b): return 0\n",
        },
    ),
    (
        "many-locks",
        {
            **ADD,
            "code": "import fcntl, os, struct\ndef add(a, b):\n    f = os.open(os.__file__, os.O_RDONLY)\n    for i in range(20000):\n        fcntl.lockf(f, fcntl.LOCK_SH, 1, i * 2)\n    return 0\n",
        },
    ),
    (
        "pass-descriptors",
        {
            **ADD,
            "code": "import socket\ns = socket.socket(fileno=3)\ndef add(a, b):\n    for _ in range(50):\n        socket.send_fds(s, [b'\\0\\0\\0\\7[\"v\",0]'], [0, 1, 2])\n    return 0\n",
        },
    ),
]
