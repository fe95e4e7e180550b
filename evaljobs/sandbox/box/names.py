"""Which names of a test the candidate's program may supply.

Rule: decided from the test's text alone, so a program cannot choose what it replaces. Names that the test binds, and
built-ins, are the test's own; names of well-known library functions come from the library as soon as another name is
there to be tested. What is left are the targets.
It does not know: the program, or how a name is fetched from it.
"""

from __future__ import annotations

import ast
import builtins
import collections
import copy
import functools
import importlib
import itertools
import math
import re
import symtable
import sys
import types
from typing import Any, Final, NamedTuple

_BUILTINS: Final = frozenset(dir(builtins))
_LIBRARY_OBJECTS: Final[dict[str, str]] = {
    **dict.fromkeys(functools.__all__, "functools"),
    **{name: "itertools" for name in dir(itertools) if not name.startswith("_")},
    **dict.fromkeys(collections.__all__, "collections"),
    **dict.fromkeys(copy.__all__, "copy"),
    **{name: "math" for name in dir(math) if not name.startswith("_")},
    "Decimal": "decimal",
    "Fraction": "fractions",
}
_ALIASES: Final = {"np": "numpy"}


class Needs(NamedTuple):
    """`targets` are served by the candidate; `library` are library names that it must have imported, or NameError."""

    targets: frozenset[str]
    library: frozenset[str]


def free_globals(source: str) -> frozenset[str]:
    """Global names that `source` reads and never binds. SyntaxError and ValueError as compile() raises them."""
    table = symtable.symtable(source, "<test>", "exec")
    read: set[str] = set()
    bound: set[str] = set()
    scopes = [table]
    while scopes:
        scope = scopes.pop()
        top = scope.get_type() == "module"
        for symbol in scope.get_symbols():
            if not (top or symbol.is_global()):
                continue
            if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                bound.add(symbol.get_name())
            if symbol.is_referenced():
                read.add(symbol.get_name())
        scopes += scope.get_children()
    return frozenset(read - bound)


def unbound(source: str) -> frozenset[str]:
    """Names that a test reads and that neither it, nor Python, nor a well-known library binds. Raises as `free_globals`."""
    return frozenset(n for n in free_globals(source) - _BUILTINS if not is_library(n))


def bound_by_prompt(prompt: str, entry_point: str) -> frozenset[str]:
    """Names that `prompt_helpers` binds. SyntaxError, ValueError, RecursionError or MemoryError where it is no program."""
    found: set[str] = set()
    for node in _helpers(ast.parse(prompt), entry_point):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        else:
            found |= {
                n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
    return frozenset(found)


def code_names(code: types.CodeType) -> set[str]:
    """All names that compiled code mentions, attributes and its own among them."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= code_names(constant)
    return found


def needs(source: str, code: types.CodeType, entry_point: str | None) -> Needs:
    """What a test, as text and compiled, needs of a candidate. With an entry point that is the only target."""
    if entry_point is not None:
        # A test may also use helpers of the prompt; they come from the prompt. Names that the test binds itself may be
        # among these: it then binds them over what it is given.
        library = {name for name in code_names(code) if is_library(name)}
        return Needs(targets=frozenset({entry_point}), library=frozenset(library - {entry_point}))
    free = free_globals(source)
    library = {name for name in free if name not in _BUILTINS and is_library(name)}
    targets = free - _BUILTINS - library
    if not targets:  # a task may be named after a library function (gcd) or a built-in (sum)
        objects = {name for name in library if name not in sys.stdlib_module_names and name not in _ALIASES}
        targets = frozenset(objects) or free & _BUILTINS
        library -= objects
    return Needs(targets=frozenset(targets), library=frozenset(library))


def is_library(name: str) -> bool:
    """Whether a bare name means a standard library module, or a well-known object of one."""
    return name in _LIBRARY_OBJECTS or name in sys.stdlib_module_names or name in _ALIASES


def library_object(name: str) -> Any:
    """The library's own object of that name."""
    if name in _LIBRARY_OBJECTS:
        return getattr(importlib.import_module(_LIBRARY_OBJECTS[name]), name)
    return importlib.import_module(_ALIASES.get(name, name))


def is_trusted_module(name: str) -> bool:
    """Whether the checker may import a module that the candidate's program imported."""
    return name.partition(".")[0] in sys.stdlib_module_names or name.partition(".")[0] == "numpy"


def prompt_helpers(prompt: str, entry_point: str, used: set[str]) -> ast.Module:
    """The prompt's own imports and finished functions.

    A test may call them (HumanEval/32, /38, /50): taken from the prompt, not from the program, which could redefine
    them. Functions of which the prompt has the docstring only, and the entry point, are left out. Empty if the prompt
    mentions no name of `used`, the test's.
    """
    if not any(name in prompt for name in used - _BUILTINS - {entry_point}):
        return ast.Module(body=[], type_ignores=[])
    try:
        tree = ast.parse(prompt)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])
    return ast.Module(body=_helpers(tree, entry_point), type_ignores=[])


def _helpers(tree: ast.Module, entry_point: str) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    for node in tree.body:
        stub = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and all(
            isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
            for s in node.body
        )
        if not stub and getattr(node, "name", None) != entry_point:
            kept.append(node)
    return kept


_IN_PROCESS_MODULES: Final = frozenset(
    {"asyncio", "inspect", "unittest", "pytest", "ast", "dis", "tempfile", "pathlib", "shutil"}
)
_IN_PROCESS_NAMES: Final = frozenset({"globals", "exec", "open"})


def must_share_process(source: str) -> bool:
    """Whether a test needs the program's objects or files themselves: it inspects objects, awaits them or inherits from
    them, opens files, or feeds standard input.
    """
    if not any(
        word in source for word in (*_IN_PROCESS_MODULES, *_IN_PROCESS_NAMES, "await", "class ", "stdin")
    ):
        return False
    own = {n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)} | _BUILTINS
    return any(_shares(node, own) for node in ast.walk(ast.parse(source)))


def _shares(node: ast.AST, own: frozenset[str] | set[str]) -> bool:
    match node:
        case ast.Await() | ast.Attribute(attr="stdin"):
            return True
        case ast.Import(names=aliases):
            return any(alias.name.partition(".")[0] in _IN_PROCESS_MODULES for alias in aliases)
        case ast.ImportFrom(module=module):
            return (module or "").partition(".")[0] in _IN_PROCESS_MODULES
        case ast.Call(func=ast.Name(id=name)):
            return name in _IN_PROCESS_NAMES
        case ast.ClassDef(bases=bases):
            return any(isinstance(base, ast.Name) and base.id not in own for base in bases)
        case _:
            return False


_ATTRIBUTE: Final = re.compile(r"(\w*)[ \t]*\.[ \t]*([A-Za-z_]\w*)")
_WITH: Final = re.compile(r"(?m)^\s*with\b")
# Attributes that plain data has, and what else a program's functions may give: arrays, numbers, times, matches.
_DATA_ATTRIBUTES: Final = frozenset(
    name
    for kind in (
        *(str, int, float, complex, bytes, bytearray, list, tuple, dict, set, frozenset, range, type),
        *(collections.deque, collections.Counter, collections.OrderedDict, collections.defaultdict),
        *(types.FunctionType, types.GeneratorType, types.CoroutineType, re.Match, re.Pattern),
    )
    for name in dir(kind)
) | frozenset(
    [
        "shape",
        "dtype",
        "ndim",
        "size",
        "T",
        "flat",
        "all",
        "any",
        "sum",
        "min",
        "max",
        "mean",
        "std",
        "var",
        "prod",
        "tolist",
        "reshape",
        "astype",
        "ravel",
        "flatten",
        "item",
        "dot",
        "round",
        "argmax",
        "argmin",
        "cumsum",
        "transpose",
        "nonzero",
        "quantize",
        "normalize",
        "sqrt",
        "exp",
        "ln",
        "log10",
        "as_tuple",
        "is_nan",
        "is_infinite",
        "compare",
        "to_integral_value",
        "limit_denominator",
        "year",
        "month",
        "day",
        "hour",
        "minute",
        "second",
        "microsecond",
        "date",
        "time",
        "weekday",
        "isoweekday",
        "isoformat",
        "strftime",
        "days",
        "seconds",
        "microseconds",
        "total_seconds",
        "timestamp",
        "tzinfo",
    ]
)


def subjects(source: str, targets: frozenset[str]) -> frozenset[str]:
    """Targets that a test uses as classes of its own objects: named as classes are, and what calling one gives has attributes
    that no data has, or is what a `with` block enters. The objects are then what is tested, and not a value that the
    test expects.
    """
    targets = frozenset(name for name in targets if name.lstrip("_")[:1].isupper())
    if not targets or not _may_use_objects(source):
        return frozenset()
    nodes = list(ast.walk(ast.parse(source)))
    makers = {name: frozenset({name}) for name in targets}  # a name → the targets that it may stand for
    for node in nodes:  # HumanEval's check(candidate) is called with the target
        if (
            isinstance(node, ast.FunctionDef)
            and node.name == "check"
            and node.args.args
            and len(targets) == 1
        ):
            makers[node.args.args[0].arg] = targets
    made: dict[str, frozenset[str]] = {}  # a name → the targets whose objects it may hold
    binds = [bind for node in nodes for bind in _binds(node)]
    before = None
    while made != before:
        before = dict(made)
        for name, value in binds:
            made[name] = made.get(name, frozenset()) | _made_by(value, makers, made)
    used = [value for node in nodes for value in _used_as_objects(node)]
    return frozenset(name for value in used for name in _made_by(value, makers, made))


def _may_use_objects(source: str) -> bool:
    """Whether a parse, which would cost as much as all the rest, might find something."""
    matches = _ATTRIBUTE.finditer(source)
    found = any(match[2] not in _DATA_ATTRIBUTES and not is_library(match[1]) for match in matches)
    return found or _WITH.search(source) is not None


def _used_as_objects(node: ast.AST) -> list[ast.expr]:
    """What a node takes for an object that is no data."""
    if isinstance(node, ast.Attribute):
        return [] if node.attr in _DATA_ATTRIBUTES else [node.value]
    return [item.context_expr for item in node.items] if isinstance(node, ast.With) else []


def _binds(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """Names that a node binds, each with the expression whose value it gets."""
    match node:
        case ast.Assign(targets=places, value=ast.Tuple(elts=values)) if (
            len(places) == 1 and isinstance(places[0], ast.Tuple) and len(places[0].elts) == len(values)
        ):
            pairs = zip(places[0].elts, values, strict=True)
            return [(place.id, value) for place, value in pairs if isinstance(place, ast.Name)]
        case ast.Assign(targets=places, value=value):
            return [(place.id, value) for place in places if isinstance(place, ast.Name)]
        case ast.NamedExpr(target=ast.Name(id=name), value=value):
            return [(name, value)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return [(name, value)]
        case ast.With(items=entered):
            return [
                (item.optional_vars.id, item.context_expr)
                for item in entered
                if isinstance(item.optional_vars, ast.Name)
            ]
        case _:
            return []


def _made_by(
    node: ast.expr, makers: dict[str, frozenset[str]], made: dict[str, frozenset[str]]
) -> frozenset[str]:
    """The targets whose objects an expression may give: called, bound to its name, or combined by operators."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return makers.get(name, frozenset())
        case ast.Name(id=name):
            return made.get(name, frozenset())
        case ast.BinOp(left=left, right=right):
            return _made_by(left, makers, made) | _made_by(right, makers, made)
        case ast.UnaryOp(operand=operand):
            return _made_by(operand, makers, made)
        case _:
            return frozenset()


TYPE_OF: Final = "__type_of__"


class _TypeAsker(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1:
            node.func = ast.copy_location(ast.Name(TYPE_OF, ast.Load()), node.func)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr != "__class__" or not isinstance(node.ctx, ast.Load):
            return node
        call = ast.Call(ast.Name(TYPE_OF, ast.Load()), [node.value], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def ask_for_types(source: str) -> ast.Module:
    """A test whose `type(x)` and `x.__class__` call TYPE_OF."""
    tree: ast.Module = _TypeAsker().visit(ast.parse(source))
    return tree
