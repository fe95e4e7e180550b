"""Laws of the reference: each page is what the code says now, tables kept by hand name all that is there, and each row says what it means."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer
from docs_lib.reference import FOLDER, PAGES, stale
from support.toys import config_text, suite_text

import evalspan
from coordinator.cli import GROUPS, MORE, app
from coordinator.config.schema import settings
from coordinator.config.template import text_of
from coordinator.errors import ExitCode
from coordinator.monitor.metrics import Metrics
from evaljobs.contract.paths import WorkPaths

ROOT = Path(__file__).resolve().parents[2]
CODES, METRICS = (ROOT / "docs" / page for page in ("evaluating/command-line.md", "results/alerts.md"))


def rows(page: Path, heading: str = "") -> list[list[str]]:
    """Cells of the tables of a page, or below a heading of it."""
    text = (
        page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        if heading
        else page.read_text()
    )
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def commented() -> list[str]:
    """What the code's comments "File PATTERN: …" name."""
    code = [file for room in ("coordinator", "evaljobs", "priors") for file in (ROOT / room).rglob("*.py")]
    return [name for file in code for name in re.findall(r"# File (\S+): ", file.read_text())]


def listed_files() -> list[str]:
    """The same as regular expressions of a path below `work`, or of a full one."""
    parts = [re.split(r"([A-Z]+(?:_[A-Z]+)*|…)", name.replace("WORK_DIR", "work")) for name in commented()]
    return [
        "".join({"…": ".+"}.get(x, "[^/]+" if x.isupper() else re.escape(x)) for x in each) for each in parts
    ]


def test_each_page_of_the_reference_is_what_the_code_says() -> None:
    assert stale() == {}, "`scripts/docs reference` writes these pages again"


@pytest.mark.parametrize("name", PAGES)
def test_each_row_says_what_it_means_and_no_code_in_it_has_a_bar(name: str) -> None:
    """The last cell holds the meaning. A forge takes the escape before a bar away, the site shows it."""
    assert [row for row in rows(FOLDER / name) if not row[-1]] == []
    assert [
        code for row in rows(FOLDER / name) for x in row for code in re.findall(r"`[^`]*`", x) if "|" in code
    ] == []


def test_each_setting_command_and_option_has_a_text() -> None:
    assert [location for location, _ in settings() if not text_of(location)] == []
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
    assert set(MORE) <= {name for names in GROUPS.values() for name in names}
    table = {row[0]: set(re.findall(r"`(\w+)`", row[3])) for row in rows(CODES, "Exit codes")[1:]}
    assert list(table) == [str(int(code)) for code in ExitCode]
    for code in ExitCode:
        of = {name for name, more in MORE.items() if code in more}
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
    assert {row[0].strip("`") for row in rows(METRICS, "What the metrics mean")[1:]} == names


def test_each_path_of_a_work_folder_has_a_comment() -> None:
    """A file that two processes agree on has a comment that says what it holds; of a folder, a file in it has one."""
    work = WorkPaths(Path("work"))
    places = [str(place) for place in [*vars(work).values(), *vars(work.evaluation("ID")).values()]]
    known = listed_files()
    starts = [name.replace("WORK_DIR", "work") for name in commented()]
    lost = [place for place in places if not any(re.fullmatch(each, place) for each in known)]
    assert [place for place in lost if not any(start.startswith(f"{place}/") for start in starts)] == []


@pytest.mark.model
def test_each_file_of_a_real_evaluation_has_a_comment(toy_model: Path, tmp_path: Path) -> None:
    """Also those that a command leaves and a running daemon would have taken."""
    (tmp_path / "evalspan.toml").write_text(f'work_dir = "work"\n{config_text()}')
    config, suite = tmp_path / "evalspan.toml", tmp_path / "suite.toml"
    suite.write_text(suite_text("toys", {"toy_choice": {"limit": 4}, "toy_programs": {"limit": 2}}))
    evalspan.evaluate(toy_model, suite, limit=4, config=config)
    evalspan.submit(toy_model, suite, limit=2, config=config)
    evalspan.notify(toy_model, 1, work_dir=tmp_path / "work")
    assert evalspan.flush()
    files = [file for file in (tmp_path / "work").rglob("*") if not file.is_dir()]
    names = [file.relative_to(tmp_path).as_posix() for file in files]
    known = listed_files()
    assert len({each for each in known for name in names if re.fullmatch(each, name)}) > 20
    assert [name for name in names if not any(re.fullmatch(each, name) for each in known)] == []
