"""Runs the rows of the table in one process, each in a fork of it: python run_rows.py FOLDER > JSON.

Rule: a row sees a site of its own, an environment of its own and the command line's real `main`; what it writes to
stdout and stderr comes back with the exit code, and all that varies has a name in its place.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests"), str(REPO / "scripts")]

from support.ended import leave_ended  # noqa: E402 (the path first)
from support.node_memory import make_checkpoint  # noqa: E402
from support.trainings import leave  # noqa: E402

import coordinator.interface.cli  # noqa: E402
import evaljobs.__main__  # noqa: E402
import evaljobs.sandbox.__main__  # noqa: E402
from coordinator import api  # noqa: E402, F401 (imported before the forks, once)
from coordinator.errors import OperatorError  # noqa: E402
from coordinator.intake import admission, inbox, work_folder  # noqa: E402
from coordinator.runtime import observers, service, wiring  # noqa: E402, F401
from evaljobs.contract.paths import WorkPaths  # noqa: E402

SECONDS = 60  # of a row
SUITE = 'name = "mine"\ninclude_path = ["tasks"]\n[[task]]\nname = "own"\n'
TASK = "task: own\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
TASK += 'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_target: a\ndoc_to_choice: ["no", "yes"]\n'


def base(site):
    """A site whose every command works: a checkpoint, a suite with a task, ended evaluations in a work folder."""
    make_checkpoint(site / "ckpt" / "step-1", shards=2, size=512)
    (site / "suite.toml").write_text(SUITE)
    for folder in ("tasks", "home", "bin", "tmp"):
        (site / folder).mkdir()
    (site / "tasks" / "own.yaml").write_text(TASK)
    (site / "tasks" / "rows.jsonl").write_text('{"q": "1?", "a": 1}\n')
    for program in ("bash", "cat", "true", "dirname", "find", "stat", "mkdir", "rm", "ls", "id", "env"):
        (site / "bin" / program).symlink_to(str(shutil.which(program)))
    work = site / "evalspan-work"
    work.mkdir(mode=0o700)
    (work / "daemon.lock").touch()
    for step, value in ((10, 0.2), (20, 0.6), (30, None)):
        leave(work, step, value)
    leave_ended(work, 1, 1, tasks=2)
    # lm-eval's tasks, whose description takes seconds, once for all rows
    argv = [sys.executable, "-m", "evaljobs", "catalogue", str(WorkPaths(work).cache)]
    subprocess.run(argv, cwd=REPO, check=True)
    return site


def rows(names):
    """(name, file that holds the text or "", text, command) of each line of the tables that is a row."""
    for table in sorted(HERE.glob("*.rows")):
        file = command = ""
        for line in table.read_text().splitlines():
            if line.startswith("=="):  # == FILE: COMMAND
                file, _, command = (part.strip() for part in line.strip("= ").partition(":"))
            elif line and not line.startswith("#"):
                name, text, own = (
                    [part.strip() for part in re.split(r" \|(?= |$)", line, maxsplit=2)] + ["", ""]
                )[:3]
                name = f"{table.stem}: {name}"
                if not names or any(n in name for n in names):
                    yield name, file, text, own or command


def environment(site):
    return {
        "HOME": str(site / "home"),
        "PATH": str(site / "bin"),
        "TMPDIR": str(site / "tmp"),
        "LANG": "C.UTF-8",
        "COLUMNS": "400",
        "TERMINAL_WIDTH": "400",
        "TERM": "dumb",
        "TZ": "UTC",
        "HF_HUB_OFFLINE": "1",
        "HUB": os.environ.get("HUB", ""),
    }


def notice():
    """Print why the daemon refuses a member's notice for good (the one inner call; a notice has no exit code)."""
    settings = work_folder.load_settings(None)
    said, wrong = inbox.parse_notice(sys.argv[1].encode(), Path("a file of the inbox"))
    try:
        if not wrong:
            admission.admitted_suite(said, settings.watch, admission.suite_files(settings.watch))
            admission.check_place(said.checkpoint, settings.watch)
    except OperatorError as error:
        wrong = str(error)
    sys.stdout.write(f"refused: {wrong}\n" if wrong else "taken\n")


def call(words):
    """Be the program that these words start, in this process where it is Python."""
    mains = {
        "evalspan": coordinator.interface.cli.main,
        "evaljobs": lambda: sys.exit(evaljobs.__main__.main()),
        "notice": notice,
        "sandbox": lambda: sys.exit(evaljobs.sandbox.__main__.main()),
    }
    sys.argv = words
    if words[0] in mains:
        mains[words[0]]()
    else:
        os.execv("/bin/bash", ["bash", *words])  # noqa: S606


def child(site, command):
    """Be the command; never returns."""
    code = 0
    try:
        os.chdir(site)
        os.umask(0o022)
        clean = environment(site)
        os.environ.clear()
        os.environ.update(clean)
        with (site / "said").open("wb", buffering=0) as said, Path(os.devnull).open() as nothing:
            for number, file in ((0, nothing), (1, said), (2, said)):
                os.dup2(file.fileno(), number)
        words = shlex.split(
            command.replace("$REPO", str(REPO)).replace("$SITE", str(site)).replace("$HUB", os.environ["HUB"])
        )
        while re.match(r"[A-Z_]+=", words[0]):
            key, _, value = words.pop(0).partition("=")
            os.environ[key] = value
        signal.alarm(SECONDS)
        call(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:  # noqa: BLE001 (a traceback is shown as what the row says)
        traceback.print_exc()
        code = 99
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def plain(text, site):
    """The text without what another machine, folder, user, day or version would change."""
    for found, name in (
        (str(site), "$SITE"),
        (str(REPO), "$EVALSPAN"),
        (os.environ.get("HUB") or "no hub", "$HUB"),
        (sys.executable, "$PYTHON"),
    ):
        text = text.replace(found, name)
    text = re.sub(r"(?ms)^Traceback .*(?=^evalspan: )", "(traceback)\n", text)  # of a log
    text = re.sub(r"pydantic\.dev/[\d.]+/", "pydantic.dev/VERSION/", text)
    text = re.sub(r"[│╭╮╰╯─┌└┐┘]+", " ", text)  # a usage error's frame
    text = re.sub(r"\b\d+\.\d+\.\d+\.dev\S+|\b0\.\d+\.\d+\+\S+", "VERSION", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)?", "TIME", text)
    text = re.sub(r"\bpid \d+ on \S+", "pid N on HOST", text)
    text = re.sub(r"\bcode-[0-9a-f]{16}\b", "code-DIGEST", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def run_row(site, file, text, command):
    if file:
        (site / file).write_text(text.replace("\\n", "\n") + "\n")
    elif text:
        done = subprocess.run(["bash", "-euc", text], cwd=site, capture_output=True, text=True, check=False)
        if done.returncode:
            return 98, done.stderr
    pid = os.fork()
    if pid == 0:
        child(site, command)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, plain((site / "said").read_text(errors="backslashreplace"), site)


def main():
    folder = Path(sys.argv[1]).resolve()
    whole, site = base(folder / "base"), folder / "site"
    found = {}
    for name, file, text, command in rows(sys.argv[2:]):
        assert name not in found, f"two rows {name}"
        shutil.copytree(whole, site, symlinks=True)
        try:
            found[name] = run_row(site, file, text, command)
        finally:
            subprocess.run(["chmod", "-R", "u+rwx", str(site)], check=True)
            shutil.rmtree(site)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
