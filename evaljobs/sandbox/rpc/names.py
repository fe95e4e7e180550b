"""Analyses a test's text: names for the program to supply, and whether they must share a process.

Rule: decided from the test's text alone, so a program cannot choose what it replaces or how it is
judged. Names that the test binds, and built-ins, are the test's own. Names of well-known library
functions come from the library, if there is another name to test. The rest are the targets. Called
from `records` before anything runs, and from `checker` and `code_eval`.
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
    """`targets` come from the candidate; `library` are library names it must have imported."""

    targets: frozenset[str]
    library: frozenset[str]


def free_globals(source: str) -> frozenset[str]:
    """Global names that `source` reads and never binds. Raises as compile() does."""
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
            if _binds(symbol):
                bound.add(symbol.get_name())
            if symbol.is_referenced():
                read.add(symbol.get_name())
        scopes += scope.get_children()
    return frozenset(read - bound)


def unbound(source: str) -> frozenset[str]:
    """Names that a test reads and that neither it, Python nor a well-known library binds."""
    return frozenset(n for n in free_globals(source) - _BUILTINS if not is_library(n))


def bound_by_prompt(prompt: str, entry_point: str) -> frozenset[str]:
    """Names that `prompt_helpers` binds. Raises as compile() does where it is no program."""
    helpers = ast.unparse(ast.Module(body=_helpers(ast.parse(prompt), entry_point), type_ignores=[]))
    symbols = symtable.symtable(helpers, "<prompt>", "exec").get_symbols()
    return frozenset(symbol.get_name() for symbol in symbols if _binds(symbol))


def _binds(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def code_names(code: types.CodeType) -> set[str]:
    """All names in compiled code, with its attributes."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= code_names(constant)
    return found


def needs(source: str, code: types.CodeType, entry_point: str | None) -> Needs:
    """What a test needs of a candidate. An entry point is the only target."""
    if entry_point is not None:
        # A test may also use helpers of the prompt; they come from the prompt. Names that the test
        # binds itself may be among these: it then binds them over what it is given.
        library = {name for name in code_names(code) if is_library(name)}
        return Needs(targets=frozenset({entry_point}), library=frozenset(library - {entry_point}))
    free = free_globals(source)
    library = {name for name in free if name not in _BUILTINS and is_library(name)}
    targets = free - _BUILTINS - library
    if not targets:  # a task may have the name of a library function (gcd) or a built-in (sum)
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


def prompt_helpers(prompt: str, entry_point: str, used: set[str]) -> ast.Module:
    """The prompt's imports and finished functions; empty if it has no name of `used`, the test's.

    A test may call them (HumanEval/32, /38, /50): they come from the prompt, since the program
    could redefine them. The entry point, and functions with a docstring only, are left out.
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


# --- one process or two -----------------------------------------------------------------------------------------------

_IN_PROCESS_MODULES: Final = frozenset(
    {"asyncio", "inspect", "unittest", "pytest", "ast", "dis", "tempfile", "pathlib", "shutil"}
)
_IN_PROCESS_NAMES: Final = frozenset({"globals", "exec", "open"})
_MAKERS: Final = frozenset(
    {"map", "filter", "zip", "enumerate", "iter", "reversed"}
)  # they return objects that are not data
_LIBRARIES: Final = frozenset({*_LIBRARY_OBJECTS.values(), "operator"})
_DATA: Final = (str, bytes, list, tuple, dict, set, collections.deque)


class _Names(NamedTuple):
    """The meaning of a test's names."""

    program: frozenset[str]  # may be an object of the program
    objects: frozenset[str]  # functions, classes and objects of the test or a library
    makers: frozenset[str]  # callables that return an object that is not data


@functools.lru_cache(maxsize=1024)
def needs_shared_process(test: str) -> bool:
    """Whether a test needs the program's objects or files themselves.

    It does where it inspects or awaits objects, uses their classes, passes functions or objects of
    its own, opens files, or feeds standard input.
    """
    try:
        nodes = list(ast.walk(ast.parse(test)))
        free = unbound(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # the run reports the error
    classes = frozenset(node.name for node in nodes if isinstance(node, ast.ClassDef))
    functions = frozenset(n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    parameters = frozenset(node.arg for node in nodes if isinstance(node, ast.arg))
    stored = frozenset(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    known = _Names(
        program=(free | parameters) - functions,
        objects=classes | functions | (_library_functions() - parameters - stored),
        makers=classes | _MAKERS,
    )
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_object(node.value, known):
            places = (place.id for place in node.targets if isinstance(place, ast.Name))
            known = known._replace(objects=known.objects.union(places))
    return any(_uses_files(n) or _needs_class(n, known) or _hands_over(n, known) for n in nodes)


@functools.cache
def _library_functions() -> frozenset[str]:
    return frozenset(name for name in _LIBRARY_OBJECTS if callable(library_object(name)))


def _uses_files(node: ast.AST) -> bool:
    match node:
        case ast.Await() | ast.Attribute(attr="stdin"):
            return True
        case ast.Import(names=aliases):
            return any(alias.name.partition(".")[0] in _IN_PROCESS_MODULES for alias in aliases)
        case ast.ImportFrom(module=module):
            return (module or "").partition(".")[0] in _IN_PROCESS_MODULES
        case ast.Call(func=ast.Name(id=name)):
            return name in _IN_PROCESS_NAMES
        case _:
            return False


def _needs_class(node: ast.AST, known: _Names) -> bool:
    """Whether a node needs a class of the program itself, not only its instances."""
    match node:
        case ast.ClassDef(bases=bases):
            own = known.objects | _BUILTINS
            return any(isinstance(base, ast.Name) and base.id not in own for base in bases)
        case ast.ExceptHandler(type=ast.expr() as named):
            kinds = named
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
            pass
        case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=[kinds]):
            pass
        case _:
            return False
    alternatives = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    return any(isinstance(kind, ast.Name) and kind.id in known.program for kind in alternatives)


def _hands_over(node: ast.AST, known: _Names) -> bool:
    """Whether a node calls the program with an argument that is not data."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            calls_program = name in known.program
        case ast.Call(func=ast.Attribute(value=value, attr=name)):
            of_library = isinstance(value, ast.Name) and is_library(value.id)
            calls_program = not of_library and not any(hasattr(kind, name) for kind in _DATA)
        case _:
            return False
    values = (*node.args, *(keyword.value for keyword in node.keywords))
    return calls_program and any(_is_object(value, known) for value in values)


def _is_object(node: ast.AST, known: _Names) -> bool:
    """Whether an expression is, or holds, a function or object that is not data."""
    match node:
        case ast.Lambda() | ast.GeneratorExp():
            return True
        case ast.Name(id=name):
            return name in known.objects
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in _LIBRARIES:
            return callable(getattr(library_object(module), name, None))
        case ast.Attribute(value=ast.Name(id=name)) if name in _BUILTINS:  # str.upper
            return True
        case ast.Call(func=function):
            return isinstance(function, ast.Name) and function.id in known.makers
        case _:
            return any(_is_object(child, known) for child in ast.iter_child_nodes(node))
