"""Laws of the command line: help that is true, one line for a mistake, output that fits where it goes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.trainings import leave
from typer.testing import CliRunner

import coordinator
import evalspan as evalspan_package
from coordinator.cli import GROUPS, app
from coordinator.errors import OperatorError

EVALSPAN = "import sys; from coordinator.cli import main; sys.argv[0] = 'evalspan'; main()"
COMMAND = typer.main.get_command(app)


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = dict(commands(COMMAND))
EXAMPLES = [
    line.strip()
    for command in ALL.values()
    for line in (command.help or "").splitlines()
    if line.strip().startswith("evalspan ")
]


def evalspan(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("EVALSPAN_") and k not in ("COLUMNS", "NO_COLOR")
    }
    return subprocess.run(
        [sys.executable, "-c", EVALSPAN, *arguments],
        cwd=folder,
        env={**clean, "HOME": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a work folder of three checkpoints, the last of which fell."""
    (tmp_path / "evalspan-work").mkdir(mode=0o700)
    leave(tmp_path / "evalspan-work", 10, 0.2)
    leave(tmp_path / "evalspan-work", 20, 0.6)
    leave(tmp_path / "evalspan-work", 30, 0.3)
    return tmp_path


def test_every_command_is_in_one_group_of_the_help_and_eval_is_the_first():
    """`evalspan -h` begins with what a new user types."""
    listed = [name for names in GROUPS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert COMMAND.commands.keys() <= set(listed)
    done = CliRunner().invoke(app, ["-h"], env={"COLUMNS": "100"})
    places = [done.output.index(f"│ {name} ") for name in listed if name in COMMAND.commands]
    assert places == sorted(places)
    assert listed[0] == "eval"


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_in_the_help_is_a_valid_call(example):
    """Every option and argument is taken by the parser of today; nothing is run."""
    _, *words = shlex.split(example)
    path = next(p for p in ALL if tuple(words[: len(p)]) == p)
    with ALL[path].make_context(" ".join(path), words[len(path) :]):
        pass


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_has_help_that_fits(path):
    """-h works, says what the command does, with an example, and what each option is for, in 40 columns too."""
    done = CliRunner().invoke(app, [*path, "-h"], env={"COLUMNS": "40", "TERMINAL_WIDTH": "40"})
    assert done.exit_code == 0, done.output
    assert f"evalspan {' '.join(path)}" in (ALL[path].help or ""), "no example"
    for parameter in ALL[path].params:
        assert getattr(parameter, "help", None), f"{' '.join(path)} {parameter.opts[0]} has no help"


def test_a_step_below_0_is_refused_by_command_and_call(site, tiny_model_dir):
    """The command's refusal is in the table of refusals."""
    with pytest.raises(OperatorError):
        evalspan_package.submit(tiny_model_dir, "quickstart", step=-5, work_dir=site / "w")


COLOUR = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}


@pytest.mark.parametrize(
    ("env", "painted"),
    [(COLOUR, True), ({**COLOUR, "NO_COLOR": "1"}, False), ({"PYTHONIOENCODING": "ascii"}, False)],
)
def test_a_flagged_row_is_painted_where_asked_and_written_in_any_case(site, env, painted):
    """FORCE_COLOR paints it; NO_COLOR wins over it; in ASCII alone nothing breaks and nothing is missing."""
    done = evalspan("report", "--series", "/runs/a", folder=site, **env)
    assert done.returncode == 0, done.stderr
    assert "0.3000!" in done.stdout
    assert ("\x1b[31m" in done.stdout) == painted


def test_json_and_csv_are_the_only_things_on_stdout(site):
    """Machines read them: versioned JSON, a header line of CSV."""
    read = json.loads(evalspan("report", "--series", "/runs/a", "--json", folder=site, COLUMNS="40").stdout)
    assert read["schema_version"] == 1
    assert [p["step"] for p in read["points"]] == [10, 20, 30]
    lines = evalspan("report", "--series", "/runs/a", "--csv", folder=site).stdout.splitlines()
    assert lines[0].startswith("suite,step,checkpoint")
    assert len(lines) == 1 + 3 * 2
    new = json.loads(evalspan("status", "--json", "--work-dir", "new", folder=site).stdout)
    assert new["schema_version"] == 1
    assert not (site / "new").exists()


@pytest.mark.parametrize("to", ["csv", "json", "lm-eval"])
def test_an_export_writes_the_files_that_it_names(site, to):
    """One path a line, each there, the same ones at a second export. A path that ends as its format is that file; a
    folder stays a folder; without --out it is standard output.
    """

    def export(*out: str) -> str:
        done = evalspan("export", "--series", "/runs/a", "--to", to, *out, folder=site)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = export("--out", "out")
    assert first
    assert all((site / line).is_file() for line in first.splitlines())
    assert export("--out", "out") == first
    if to == "lm-eval":
        return
    (site / f"old.{to}").mkdir()
    assert export("--out", f"new/curve.{to}") == f"new/curve.{to}\n"
    text = (site / f"new/curve.{to}").read_text()
    assert export() == text
    for folder in ("plain", "run.1", f"old.{to}"):
        assert export("--out", folder) == f"{folder}/series.{to}\n"
        assert (site / folder / f"series.{to}").read_text() == text


def test_an_export_of_what_still_runs_says_so(site):
    """What has ended is written; the rest is counted on stderr. (That nothing has ended is in the table of refusals.)"""
    leave(site / "evalspan-work", 40, None)
    done = evalspan("export", "--series", "/runs/a", "--to", "csv", "--out", "out", folder=site)
    assert (done.returncode, done.stderr) == (0, "1 still running: export again when they have ended\n")


def test_an_export_for_which_a_package_is_missing_leaves_no_folder(site):
    """The next one may name another folder."""
    (site / "missing").mkdir()
    (site / "missing" / "wandb.py").write_text("raise ImportError('none')\n")
    words = ("export", "--series", "/runs/a", "--to", "wandb", "--out", "runs")
    done = evalspan(
        *words, folder=site, PYTHONPATH=f"{Path(coordinator.__file__).parents[1]}:{site / 'missing'}"
    )
    assert done.returncode == 2, done.stderr
    assert "wandb is not installed" in done.stderr
    assert not (site / "runs").exists()


def test_a_reader_that_has_ended_is_no_failed_task(site):
    """As of `evalspan report | head`: exit code 1 would mean that tasks failed."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "coordinator", "report", "--series", "/runs/a"],
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(Path(coordinator.__file__).parents[1])},
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert done.returncode == 141, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_tab_completes_commands(site, shell):
    """The shell's own question is answered with the commands that begin so."""
    env = {"bash": {"COMP_WORDS": "evalspan re", "COMP_CWORD": "1"}}.get(
        shell, {"_TYPER_COMPLETE_ARGS": "evalspan re", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    )
    done = evalspan(folder=site, _EVALSPAN_COMPLETE=f"complete_{shell}", **env)
    assert {"report", "retry", "release"} <= set(re.findall(r"[a-z]+", done.stdout))


HEAVY = (
    "coordinator.runtime",
    "lm_eval",
    "pyslurm",
    "redis",
    "requests",
    "rq",
    "torch",
    "tensorboard",
    "wandb",
    "mlflow",
)
LOADED = f"""
import sys
from coordinator.cli import GROUPS, app
from coordinator.errors import OperatorError
for words in {[(), *ALL]}:
    app([*words, "--help"], standalone_mode=False)
print([name for name in {HEAVY} if name in sys.modules])
"""


def test_help_loads_no_client_and_no_coordinator():
    """Of evalspan and of each command: only what a person waits for."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout[-200:] + done.stderr[-2000:]
    assert "evalspan release node17" in done.stdout


def test_a_submission_loads_no_client(tmp_path, tiny_model_dir):
    """Training calls it for each checkpoint."""
    body = (
        "import sys\nfrom coordinator.cli import app\n"
        f"app({['submit', str(tiny_model_dir), '--suite', 'quickstart', '--json']}, standalone_mode=False)\n"
        f"print([name for name in {HEAVY[1:]} if name in sys.modules])"
    )
    env = {**os.environ, "EVALSPAN_WORK_DIR": str(tmp_path / "w")}
    done = subprocess.run(
        [sys.executable, "-c", body], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout[-200:] + done.stderr[-2000:]


def test_clean_tells_people_in_words_and_programs_in_json(site):
    """An empty root: nothing removed, in a line or as versioned JSON of every root."""
    root = site / "memory"
    root.mkdir()
    roots = {"EVALSPAN_STAGE_ROOTS": json.dumps([str(root)])}
    told = evalspan("clean", folder=site, **roots)
    assert (told.returncode, told.stdout) == (0, f"{root}: removed 0 checkpoints, 0 B\n"), told.stderr
    read = json.loads(evalspan("clean", "--json", folder=site, **roots).stdout)
    assert (read["schema_version"], [r["root"] for r in read["roots"]]) == (1, [str(root)])


def test_init_writes_settings_that_are_taken_and_keeps_those_that_are_there(site):
    """For this machine where asked so, whatever Slurm's commands say; a second time it refuses."""
    first = evalspan("init", "--cluster", "local", folder=site)
    assert first.returncode == 0, first.stderr
    assert 'kind = "local"' in (site / "evalspan.toml").read_text()
    second = evalspan("init", "--cluster", "local", folder=site)
    assert (second.returncode, len(second.stderr.splitlines())) == (2, 1)
    assert evalspan("status", "--json", folder=site).returncode == 0


def test_a_bug_is_exit_code_3_and_asks_for_a_report() -> None:
    """It is no failed entry (1): a wrapper or a person must be able to tell."""
    broken = "from coordinator import cli\n@cli.app.command('broken')\ndef broken(): {}['x']\ncli.main()"
    ran = subprocess.run(
        [sys.executable, "-c", broken, "broken"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 3
    assert "bug report" in ran.stderr
    assert "KeyError: 'x'" in ran.stderr
