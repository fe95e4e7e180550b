"""Laws of the command line: help that is true, one line for a mistake, output that fits where it goes."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from support.commands import typed
from support.ended import leave_ended
from support.trainings import leave

import coordinator
from coordinator.errors import OperatorError
from coordinator.interface.cli import GROUPS, app
from evaljobs.contract.outcomes import Failed

EVALSPAN = "import sys; from coordinator.interface.cli import main; sys.argv[0] = 'evalspan'; main()"
COMMAND = typer.main.get_command(app)


def commands(group, path=()):
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


def evalspan(*arguments, folder, **env):
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
def site(tmp_path):
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
    done = typed("-h", env={"COLUMNS": "100"})
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
    typed(*path, "-h", env={"COLUMNS": "40", "TERMINAL_WIDTH": "40"})
    paragraphs = (ALL[path].help or "").split("\n\n")
    assert any(f"evalspan {' '.join(path)}" in each for each in paragraphs), "no example"
    assert not [each for each in paragraphs if re.search(r"\S\s+Examples?:$", each)], (
        "its heading ends a paragraph"
    )
    for parameter in ALL[path].params:
        assert getattr(parameter, "help", None), f"{' '.join(path)} {parameter.opts[0]} has no help"


COLOUR = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}


@pytest.mark.parametrize(
    ("env", "painted"),
    [(COLOUR, True), ({**COLOUR, "NO_COLOR": "1"}, False), ({"PYTHONIOENCODING": "ascii"}, False)],
)
def test_a_flagged_row_is_painted_where_asked_and_written_in_any_case(site, env, painted):
    """FORCE_COLOR paints it; NO_COLOR wins over it; in ASCII alone nothing breaks and nothing is missing."""
    for step in range(41, 55):
        leave(site / "evalspan-work", step, 0.1 if step == 54 else 0.6 + step % 3 / 100, parent="/runs/c")
    done = evalspan("report", "--series", "/runs/c", folder=site, **env)
    assert done.returncode == 0, done.stderr
    assert "0.1000!" in done.stdout
    assert ("\x1b[31m" in done.stdout) == painted


@pytest.mark.parametrize("to", ["csv", "json", "lm-eval"])
def test_an_export_writes_the_files_that_it_names(site, monkeypatch, to):
    """One path a line, each there, the same ones at a second export. A path that ends as its format is that file; a folder stays
    a folder; without --out it is standard output. What still runs is counted on stderr, at exit code 0.
    """
    monkeypatch.chdir(site)

    def export(*out):
        return typed("export", "--series", "/runs/a", "--to", to, *out)

    first = export("--out", "out").stdout
    assert first
    assert all((site / line).is_file() for line in first.splitlines())
    assert export("--out", "out").stdout == first
    if to == "lm-eval":
        return
    (site / f"old.{to}").mkdir()
    assert export("--out", f"new/curve.{to}").stdout == f"new/curve.{to}\n"
    text = (site / f"new/curve.{to}").read_text()
    assert export().stdout == text
    for folder in ("plain", "run.1", f"old.{to}"):
        assert export("--out", folder).stdout == f"{folder}/series.{to}\n"
        assert (site / folder / f"series.{to}").read_text() == text
    leave(site / "evalspan-work", 40, None)
    assert export().stderr == "1 still running: export again when they have ended\n"


def test_an_export_for_which_a_package_is_missing_leaves_no_folder(site):
    """The next one may name another folder."""
    (site / "missing").mkdir()
    (site / "missing" / "wandb.py").write_text("raise ImportError('none')\n")
    path = f"{Path(coordinator.__file__).parents[1]}:{site / 'missing'}"
    words = ("export", "--series", "/runs/a", "--to", "wandb", "--out", "runs")
    done = evalspan(*words, folder=site, PYTHONPATH=path)
    assert (done.returncode, "wandb is not installed" in done.stderr) == (2, True), done.stderr
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


TYPED = {  # what is typed -> what Tab offers
    "evalspan re": {"report", "resume", "retry", "release", "rescore"},
    "evalspan report step-": {f"step-{step}-mini-{step:08d}" for step in (10, 20, 30)},
    "evalspan compare step-20-mini-00000020 step-3": {"step-30-mini-00000030"},
    "evalspan logs --work-dir no-folder step": set(),
    "evalspan eval ckpt --suite qu": {"quickstart"},
    "evalspan ls --suite po": {"portfolio"},
}


def test_tab_completes_commands(site, monkeypatch):
    """The shell's own question is answered with those that begin so, by each shell; evaluations are the work folder's."""
    for step in (10, 20, 30):
        (site / "evalspan-work" / f"step-{step}-mini-{step:08d}" / "journal.jsonl").touch()
    monkeypatch.chdir(site)
    for line, offered in TYPED.items():
        for shell in ("bash", "zsh", "fish"):
            others = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
            env = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))} if shell == "bash" else others
            env["_EVALSPAN_COMPLETE"] = f"complete_{shell}"
            words = set(re.findall(r"[\w-]+", typed(env=env, prog_name="evalspan").stdout))
            assert offered <= words if shell != "bash" else offered == words, (shell, line, words)


def test_logs_are_followed_until_the_evaluation_has_ended(site, monkeypatch):
    """Whole lines, and logs that are new; a metric job, which has no log, shows its traceback. What has ended is printed once."""
    _, paths = leave_ended(site / "evalspan-work", 1, 1, tasks=1)
    name, log = paths.root.name, paths.log("es-1-trial-n1-a0.0")
    for old in paths.logs.iterdir():
        old.unlink()
    log.write_text("first\n")
    failed = Failed(
        name="score-0-0", job="score", blame="operator", error="KeyError", detail="Traceback: here"
    )
    paths.outcome("failed", failed.name).write_text(failed.model_dump_json())
    monkeypatch.chdir(site)
    assert "Traceback: here" in typed("logs", name, failed.name).stdout
    assert typed("logs", name, "trial", "-f").stdout == f"== {log}\nfirst\n"
    status, journal = paths.status.read_bytes(), paths.journal.read_bytes()
    paths.status.unlink()
    paths.journal.write_bytes(journal[: journal.rindex(b'{"at"')])  # without its end
    argv = [sys.executable, "-c", EVALSPAN, "logs", name, "trial", "-f", "--work-dir", "evalspan-work"]
    with subprocess.Popen(argv, cwd=site, stdout=subprocess.PIPE, text=True) as following:
        said = [following.stdout.readline() for _ in range(2)]
        with log.open("a") as file:
            file.write("second\nhalf")
        said.append(following.stdout.readline())
        (other := log.with_name("es-1-trial-n2-a0.0.log")).write_text("third\n")
        said += [following.stdout.readline() for _ in range(2)]
        paths.journal.write_bytes(journal)
        paths.status.write_bytes(status)
        said.append(following.stdout.read())
    assert following.returncode == 0
    assert said == [f"== {log}\n", "first\n", "second\n", f"== {other}\n", "third\n", ""]


CLIENTS = ["lm_eval", "pyslurm", "redis", "requests", "rq", "torch", "tensorboard", "wandb", "mlflow"]
HELP = f"""
for words in {[(), *ALL]}:
    app([*words, "--help"], standalone_mode=False)
"""


@pytest.mark.parametrize(("submits", "heavy"), [(False, [*CLIENTS, "coordinator.runtime"]), (True, CLIENTS)])
def test_help_and_a_submission_load_no_client(site, tiny_model_dir, submits, heavy):
    """Of evalspan and of each command only what a person waits for; training submits each checkpoint."""
    words = ["submit", str(tiny_model_dir), "--suite", "quickstart", "--json"]
    act = f"app({words}, standalone_mode=False)" if submits else HELP
    code = f"import sys\nfrom coordinator.interface.cli import app\n{act}\nprint([n for n in {heavy} if n in sys.modules])"
    env = {**os.environ, "EVALSPAN_WORK_DIR": str(site / "w")}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=site, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout[-200:] + done.stderr[-2000:]


def test_clean_tells_people_in_words_and_programs_in_json(site, monkeypatch):
    """An empty root: nothing removed, in a line or as versioned JSON of every root."""
    monkeypatch.chdir(site)
    root = site / "memory"
    root.mkdir()
    env = {"EVALSPAN_STAGE_ROOTS": json.dumps([str(root)])}
    assert typed("clean", env=env).stdout == f"{root}: removed 0 checkpoints, 0 B\n"
    read = json.loads(typed("clean", "--json", env=env).stdout)
    assert (read["schema_version"], [r["root"] for r in read["roots"]]) == (1, [str(root)])


def test_a_bug_is_exit_code_3_and_asks_for_a_report():
    """It is no failed entry (1): a wrapper or a person must be able to tell."""
    broken = (
        "from coordinator.interface import cli\n@cli.app.command('broken')\ndef broken(): {}['x']\ncli.main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", broken, "broken"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 3
    assert "please report it" in ran.stderr
    assert "KeyError: 'x'" in ran.stderr


def test_a_place_that_cannot_be_looked_at_is_one_line(tmp_path):
    """Whichever command looks at it: a name that is too long, or a folder that this user may not enter."""
    name = "x" * 300
    for words in (
        ["init", name],
        ["diagnose", name],
        ["validate", "--suite", name],
        ["supervise", "--checkpoints", name, "--", "true"],
    ):
        ran = evalspan(*words, folder=tmp_path)
        assert ran.returncode == 2
        assert re.fullmatch(r"evalspan: .*x(\.toml)?: File name too long\n", ran.stderr)


@pytest.mark.parametrize(
    "words",
    [
        ("supervise", "--pause", "inf"),
        ("supervise", "--hang", "inf"),
        ("report", "x", "--gpu-hour-price", "inf"),
        ("plan", "--detect", "nan"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(words):
    """Before the command looks at anything."""
    done = typed(*words, code=1)
    assert isinstance(done.exception, OperatorError), done.output
    assert str(done.exception) == f"{words[-2]} is {words[-1]}: name a finite number"
