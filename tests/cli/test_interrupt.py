"""Laws of Ctrl-C, in a real terminal: a one-shot evaluation asks once and leaves nothing; a watched one goes on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.terminal import Terminal
from dev_cluster.testing import wait_until
from support.sites import running
from support.toys import TASKS

pytestmark = pytest.mark.model
SUITE = f'name = "toys"\ninclude_path = ["{TASKS}"]\nbatch_size = 8\n[[task]]\nname = "toy_choice"\n'
# a job that runs until it is killed, whatever else takes its time
ENDLESS = "import time\n\n\ndef choice(**_metadata):\n    while True:\n        time.sleep(1)\n"
CONFIG = '[trial]\nthreads = 1\ndevice = "cpu"\n[metric]\nbootstrap_iters = 10\n'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "evalspan.toml").write_text(CONFIG)
    (tmp_path / "toys.toml").write_text(SUITE)
    yield tmp_path
    for number in (signal.SIGTERM, signal.SIGKILL):  # told first: a holder clears node memory
        for pid in _left(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not _left(tmp_path), "its processes end", 20.0)


def _left(folder):
    """Processes that work in the folder: jobs, Redis."""
    return [pid for pid, _, _ in running(folder / "work")]


def _kinds(folder):
    texts = [f.read_bytes() for f in (folder / "work").glob("*/journal.jsonl")]
    # the last line may be half written
    return [json.loads(line)["kind"] for text in texts for line in text.split(b"\n")[:-1]]


def _nothing_left(folder):
    """What was killed last may still be about to end."""
    wait_until(lambda: not _left(folder), "no process is left", 30.0)


# SIGINT at the moment at which a module is imported for the first time
AT_IMPORT = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["evalspan", *{arguments!r}]
runpy.run_module("coordinator", run_name="__main__", alter_sys=True)
"""


# of a weak reference, such as those of Python's imports: no exception leaves it
CALLBACK = "__import__('weakref').ref(type('Gone', (), {})(), lambda _: [os.kill(os.getpid(), signal.SIGINT), len('')])"
OF_SUITE = ["model", "--suite", "core"]


@pytest.mark.parametrize(
    ("module", "arguments", "raised"),
    [
        ("coordinator.interface.cli", ["eval", *OF_SUITE], ""),
        ("typer", ["submit", *OF_SUITE], ""),
        ("typer", ["status"], CALLBACK),
        ("rich.console", ["status"], ""),
        ("pydantic", ["report", "x"], ""),
    ],
)
def test_ctrl_c_during_the_imports_is_one_line(tmp_path, module, arguments, raised):
    """Exit code 130 and no traceback, whatever is being loaded, also where a callback swallows the exception."""
    code = AT_IMPORT.format(module=module, arguments=[*arguments, "--work-dir", str(tmp_path)])
    if raised:
        code = code.replace("os.kill(os.getpid(), signal.SIGINT)", raised)
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "evalspan: interrupted\n")


def test_ctrl_c_while_lm_eval_is_asked_ends_the_question(folder, tiny_model_dir):
    """The child that was asked ends, too; nothing was submitted."""
    python, asked = folder / "python", folder / "asked"
    python.write_text(f'#!/bin/sh\necho $$ > "{asked}.new"; mv "{asked}.new" "{asked}"; exec sleep 600\n')
    python.chmod(0o755)
    (folder / "evalspan.toml").write_text(f'[trial]\npython = "{python}"\n')
    command = Terminal(folder, "eval", str(tiny_model_dir), "--suite", str(folder / "toys.toml"))
    command.until(asked.exists, "the interpreter of trials is asked")
    command.type("\x03")
    assert command.ends() == 130
    assert command.said.count("evalspan: interrupted") == 1
    assert "Traceback" not in command.said
    assert not Path("/proc", asked.read_text().strip()).exists()
    assert _kinds(folder) == []


def test_ctrl_c_asks_once_and_then_cancels_and_leaves_nothing(folder, tiny_model_dir):
    """ "n": it goes on, while it asked as well. Ctrl-C twice: exit code 130, no job, no Redis, the results of a cancelled
    evaluation. The same command goes on with what was cancelled.
    """
    command = ("eval", str(tiny_model_dir), "--suite", str(folder / "toys.toml"))
    first = Terminal(folder, *command)
    first.until(lambda: "job-started" in _kinds(folder), "a job runs")
    first.type("\x03")
    first.until(lambda: "Cancel this evaluation?" in first.said, "the question")
    seen = len(_kinds(folder))
    first.until(lambda: len(_kinds(folder)) > seen, "it goes on while it asks")
    first.type("n\n")
    first.until(lambda: "-toys-" in first.said.rpartition("[y/N]")[2], "the screen is back")
    assert "cancel-asked" not in _kinds(folder)
    first.type("\x03")
    first.until(lambda: first.said.count("Cancel this evaluation?") == 2, "the question, again")
    first.type("\x03")
    assert first.ends() == 130
    assert "cancelling" in first.said
    assert "Traceback" not in first.said
    _nothing_left(folder)
    assert len(list((folder / "work").glob("*/results.json"))) == 1

    again = Terminal(folder, *command)
    again.until(lambda: "retry-asked" in _kinds(folder), "the retry is journalled")
    again.type("\x03")
    again.until(lambda: "Cancel this evaluation?" in again.said, "the question")
    again.type("\x03")
    assert again.ends() == 130
    _nothing_left(folder)


def test_sigterm_leaves_the_evaluation_to_the_next_run(folder, tiny_model_dir):
    """Exit code 143, nothing is cancelled, and the same command goes on and ends with scores."""
    command = ("eval", str(tiny_model_dir), "--suite", str(folder / "toys.toml"))
    first = Terminal(folder, *command)
    first.until(lambda: "job-started" in _kinds(folder), "a job runs")
    first.process.send_signal(signal.SIGTERM)
    assert first.ends() == 143
    assert "the same command resumes it" in first.said
    assert {"cancel-asked", "ended"}.isdisjoint(_kinds(folder))
    again = Terminal(folder, *command)
    assert again.ends() == 0
    kinds = _kinds(folder)
    assert kinds.count("restarted") == 1
    assert {"cancel-asked", "retry-asked"}.isdisjoint(kinds)
    _nothing_left(folder)


def test_ctrl_c_leaves_a_daemons_evaluation_alone(folder, tiny_model_dir):
    """`watch` ends with 0 and nothing is cancelled; the daemon's own Ctrl-C cancels nothing either."""
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "choice.yaml").write_text((TASKS / "choice.yaml").read_text().replace("rows.", "endless."))
    (tasks / "endless.py").write_text(ENDLESS)
    (folder / "toys.toml").write_text(SUITE.replace(str(TASKS), str(tasks)))
    daemon = Terminal(folder, "daemon")
    submitted = Terminal(folder, "submit", str(tiny_model_dir), "--suite", str(folder / "toys.toml"))
    assert submitted.ends() == 0
    daemon.until(lambda: "job-started" in _kinds(folder), "a job runs")
    watch = Terminal(folder, "watch")
    watch.until(lambda: "-toys-" in watch.said, "the screen")
    watch.type("\x03")
    assert watch.ends() == 0
    assert daemon.process.poll() is None
    daemon.type("\x03")
    assert daemon.ends() == 0
    assert {"cancel-asked", "ended"}.isdisjoint(_kinds(folder))
    assert "Traceback" not in watch.said + daemon.said
