"""Laws of the pages: each link leads somewhere, each command in them is one that evalspan takes today, a picture says in words what it
shows, maps name what is there, and the reference is what the code says now.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import click
import pytest
import typer
from docs_lib.reference import FOLDER, stale
from docs_lib.reference import PAGES as REFERENCE

from coordinator.errors import ExitCode
from coordinator.interface.cli import COMMAND_EXIT_CODES, GROUPS, app
from coordinator.interface.cli.lm_eval_flags import LmEvalCommand
from coordinator.operations.monitor.metrics import Metrics
from coordinator.site.config.schema import Config, all_settings
from coordinator.site.config.template import text_of
from evaljobs.contract.specs import TaskEntry

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
COMMAND: Any = typer.main.get_command(app)
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SVG = "{http://www.w3.org/2000/svg}"
TOML = re.compile(r"^```toml(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Names of the page's headings in links, by GitHub's rule."""
    seen: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        names.add(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, 0) + 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_of_a_page_leads_to_a_file_and_a_heading(page):
    lost = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            lost.append(link)
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_on_a_page_is_not_broken_over_lines(page):
    """Nor other inline code: a reader copies it whole."""
    text = re.sub(r"^ *```[^\n]*\n.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [span for span in re.findall(r"`[^`]+`", text) if "\n" in span] == []


def test_every_page_is_reached_from_the_readme():
    """By links of pages that are reached themselves."""
    reached, next_ones = set(), [ROOT / "README.md"]
    while next_ones:
        page = next_ones.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = (link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link)
            next_ones += [(page.parent / link).resolve() for link in links if link]
    assert set(PAGES) <= reached


def _calls(page: Path) -> Iterator[tuple[str, bool]]:
    """Each call of evalspan on a page; whether it stands in a block, to be typed as it is."""
    text = page.read_text()
    blocks = "\n".join(FENCE.findall(text) + re.findall(r"^ {4}(\S.*)$", FENCE.sub("", text), re.MULTILINE))
    for line in blocks.replace("\\\n", " ").splitlines():
        if found := re.match(r"\s*(?:\$ )?(?:\S*/bin/)?evalspan (.*)", line):
            yield found[1], True
    for span in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        if found := re.match(r"(?:\S*/bin/)?evalspan (.*)", " ".join(span.split())):
            yield found[1], False


def _words(call: str) -> list[str]:
    """Words of a call, without its comment, redirection and following commands; optional ones count as given."""
    before = re.split(r"\s#\s|\s[|>;&]+\s|\s2?>", call, maxsplit=1)[0]
    return [
        word for word in shlex.split(before.replace("[", " ").replace("]", " ")) if word not in {"…", "..."}
    ]


def _command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words call, and the words after it."""
    command, rest = COMMAND, list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return command, rest


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_is_one_that_evalspan_takes(page):
    """A call in a block parses whole; of one within a sentence the command and the names of its options exist."""
    refused = []
    for call, whole in _calls(page):
        # README's overview names several commands in a line
        for one in call.split(" · "):
            command, rest = _command(_words(one))
            try:
                if rest[:1] == ["COMMAND"]:
                    continue
                if command is COMMAND and not (rest and rest[0].startswith("-")):
                    raise click.UsageError("no such command")
                if whole and not getattr(command, "commands", None):
                    with command.make_context("evalspan", list(rest)):
                        pass
                names = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
                for word in itertools.takewhile(lambda word: word != "--", rest):
                    name = word.partition("=")[0]
                    if isinstance(command, LmEvalCommand):  # as lm_eval spells it
                        name = name.replace("_", "-")
                    if word.startswith("--") and name not in {*names, "--help", "-h"}:
                        raise click.UsageError(f"no option {word}")
            except (click.exceptions.Exit, SystemExit):
                pass  # --help and --version end there
            except click.ClickException as error:
                refused.append(f"evalspan {one}: {error.format_message()}")
    assert not refused, "\n".join(refused)


def test_every_setting_on_a_page_is_one_of_evalspan_toml():
    """Blocks of TOML are settings, but for a suite's, which is known by its tasks, or by a name of its own."""
    found = [
        (page, title, tomllib.loads(text)) for page in PAGES for title, text in TOML.findall(page.read_text())
    ]
    assert len(found) > 5
    for page, title, block in found:
        name = f"{page.name}: {title or 'toml'}"
        if "task" in block:
            assert Path(title).name != "evalspan.toml", name
            for task in block["task"]:
                TaskEntry.model_validate(task)
            continue
        if title and Path(title).name not in {"evalspan.toml", ".evalspan.toml"}:
            continue  # another program's file
        known = Config.model_validate_json(json.dumps(block)).model_dump()
        for section, table in block.items():
            assert section in known, (name, section)
            for key in table if isinstance(table, dict) else ():
                assert key in known[section], (name, section, key)


@pytest.mark.parametrize("name", ["exactness", "machine", "overview", "phases", "screen", "staging", "time"])
def test_a_picture_of_the_explanation_loads_nothing_and_says_in_words_what_it_shows(name):
    text = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
    assert not re.search(r"url\(|@import|<image|<script|href", text)
    root = ET.fromstring(text)  # noqa: S314 (our own file)
    assert root.get("role") == "img"
    assert len(root.findtext(f"{SVG}title") or "") > 20
    assert len(root.findtext(f"{SVG}desc") or "") > 80


ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PLACE = re.compile(r"`([\w/]+(?:\.py|/))`(?:: | \()?((?:`[A-Za-z_][\w.]*`(?:, )?)*)")
NAME = re.compile(r"`([\w.]+)`")


def section(page: str, heading: str) -> str:
    return page.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    """Cells of the rows below a table's head."""
    found = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return [row for row in found if row[0].strip("-") and not re.fullmatch(r"-*", row[-1] or "x")]


def names_in(file: Path) -> set[str]:
    """What a module defines: functions, classes, constants, and `Class.member`."""

    def defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield prefix + name
                case ast.ClassDef(name=name, body=members):
                    yield from (name, *defined(members, f"{name}."))
                    yield from defined(members)
                case ast.Assign(targets=targets):
                    yield from (prefix + t.id for t in targets if isinstance(t, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield prefix + name

    return set(defined(ast.parse(file.read_text()).body))


def lost(text: str) -> list[str]:
    """Places and names of a text that are not there; a file without a folder lies in that of the file before it."""
    missing, folder = [], ROOT
    for place, names in PLACE.findall(text):
        file = ROOT / place if "/" in place else folder / place
        folder = file.parent
        if not file.exists():
            missing.append(place)
        elif file.suffix:
            missing += [f"{place}: {name}" for name in NAME.findall(names) if name not in names_in(file)]
    return missing


def test_each_place_that_an_architecture_row_names_is_there() -> None:
    """The index and the reading tour: `file: function or constant`, or a word on where else to look."""
    index = section(ARCHITECTURE, "Where is it decided?")
    assert lost(section(ARCHITECTURE, "Reading tour") + index) == []
    assert [question for question, place in rows(index)[1:] if "`" not in place and "](" not in place] == []


def test_each_place_that_contributing_names_is_there() -> None:
    """A file of the list that has NAME in it is one to be made."""
    listed = "\n".join(" ".join(row) for row in rows(section(CONTRIBUTING, "How to add")))
    assert [
        place for place in lost(listed + section(CONTRIBUTING, "Where things go")) if "NAME" not in place
    ] == []


def test_the_table_of_rooms_is_that_of_the_folders() -> None:
    """Each room once, and the file at which its reading starts."""
    named = []
    text = section(ARCHITECTURE, "Rooms")
    for house, table in zip(("coordinator", "evaljobs"), text.split("| room of `")[1:], strict=True):
        for rooms, _holds, start in rows("|" + table)[1:]:
            for place in (ROOT / house / room for room in re.findall(r"`([\w/.]+)`", rooms)):
                named += [place] * place.is_dir()
                assert place.exists(), place
                assert all((place / file).exists() for file in NAME.findall(start)), (place, start)
    levels = (("coordinator", "*/"), ("coordinator", "*/*/"), ("evaljobs", "*/"))
    there = [init.parent for house, level in levels for init in (ROOT / house).glob(level + "__init__.py")]
    assert sorted(named) == sorted(there)


def test_each_word_of_the_table_is_used_in_code() -> None:
    source = " ".join(
        file.read_text().lower()
        for room in ("coordinator", "evaljobs", "priors")
        for file in (ROOT / room).rglob("*.py")
    )
    words = [word for row in rows(GLOSSARY) for word in row[0].lower().split(", ")]
    assert len(words) > 40
    assert [word for word in words if word not in source] == []


# --- the reference -----------------------------------------------------------------------------------------------------


CODES, METRICS = (
    (ROOT / "docs" / page).read_text() for page in ("evaluating/command-line.md", "results/alerts.md")
)


def test_each_page_of_the_reference_is_what_the_code_says() -> None:
    assert stale() == {}, "`scripts/docs reference` writes these pages again"


@pytest.mark.parametrize("name", REFERENCE)
def test_each_row_says_what_it_means_and_no_code_in_it_has_a_bar(name: str) -> None:
    """The last cell holds the meaning. A forge takes the escape before a bar away, the site shows it."""
    assert [row for row in rows((FOLDER / name).read_text()) if not row[-1]] == []
    assert [
        code
        for row in rows((FOLDER / name).read_text())
        for x in row
        for code in re.findall(r"`[^`]*`", x)
        if "|" in code
    ] == []


def test_each_setting_command_and_option_has_a_text() -> None:
    assert [location for location, _ in all_settings() if not text_of(location)] == []
    silent = []
    for name, command in typer.main.get_command(app).commands.items():
        for each in (command, *getattr(command, "commands", {}).values()):
            silent += [f"{name} {p.name}" for p in each.params if not p.help and p.name != "help"]
            silent += [] if each.help else [name]
    assert silent == []


def test_each_command_ends_with_a_code_of_the_table() -> None:
    """No command exits with a bare number: codes and meanings stand in one place. A script says its own in its head."""
    bare = []
    for file in (ROOT / "coordinator").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"typer.Exit", "sys.exit"}:
                bare += [
                    f"{file}:{node.lineno}" for x in node.args if isinstance(x, ast.Constant) and x.value
                ]
    assert bare == []
    assert set(COMMAND_EXIT_CODES) <= {name for names in GROUPS.values() for name in names}
    table = {row[0]: set(re.findall(r"`([\w-]+)`", row[3])) for row in rows(section(CODES, "Exit codes"))[1:]}
    assert list(table) == [str(int(code)) for code in ExitCode]
    for code in ExitCode:
        of = {name for name, more in COMMAND_EXIT_CODES.items() if code in more}
        assert table[str(int(code))] in (of, set()), code
    texts = [
        f.read_text()
        for f in (ROOT / "scripts").iterdir()
        if f.is_file() and not f.name.startswith("_") and f.suffix != ".py"
    ]
    assert [text for text in texts if "Exit codes:" not in text and "/_python.sh" not in text] == []


def test_each_metric_is_in_the_table() -> None:
    made = Metrics("127.0.0.1:0", lambda: 0.0)
    try:
        names = {
            f.name + {"counter": "_total", "info": "_info"}.get(f.type, "") for f in made.registry.collect()
        }
    finally:
        made.close()
    assert {row[0].strip("`") for row in rows(section(METRICS, "What the metrics mean"))[1:]} == names
