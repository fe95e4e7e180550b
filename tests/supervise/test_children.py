"""`evalspan supervise` around real commands of this machine: killed, hanging, failing, told to end, and left alone."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until

# A step adds a number of a seeded generator, whose state lies in each second checkpoint. argv: what each attempt does at the
# third step.
TRAINING = """
import os, json, pathlib, random, shutil, signal, subprocess, sys, time
from coordinator import hook
runs, begin = pathlib.Path("runs"), os.environ["EVALSPAN_RESUME_FROM"]
runs.mkdir(exist_ok=True)
state = json.loads((pathlib.Path(begin) / "state.json").read_text()) if begin else [0, 0.0, 7]
first, value, seed = state
tries = len(list(pathlib.Path().glob("try-*")))
pathlib.Path(f"try-{tries}").touch()
does = sys.argv[1 + tries] if tries + 1 < len(sys.argv) else "goes on"
if does == "at once":
    sys.exit(1)
if does == "dies at once":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "removes its newest":
    for newest in sorted(runs.iterdir(), key=lambda f: int(f.name[5:]))[-1:]:
        shutil.rmtree(newest)
    sys.exit(1)
for step in range(first + 1, 13):
    seed = random.Random(seed).randrange(1 << 30)
    value += seed
    with open("values.txt", "a") as file:
        file.write(f"{step} {value}\\n")
    print("step", step, "loss", value, flush=True)
    hook.heartbeat(step, float("nan") if does == "spikes" else 1.0)
    if step % 2 == 0:
        part = runs / f".step-{step}"
        part.mkdir(exist_ok=True)
        (part / "state.json").write_text(json.dumps([step, value, seed]))
        part.replace(runs / f"step-{step}")
    if step == first + 3:
        if does == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif does == "survives an error, and dies":
            print("ValueError: bad sample 3, it is left out", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif does == "odd heartbeats":
            with open(os.environ["EVALSPAN_HEARTBEATS"], "a") as file:
                file.write("[" * 200_000 + "\\n" + '{"step": 1, "loss": 1' + "0" * 4000 + "}\\n" + "5\\n[1]\\n" + "x" * (1 << 21))
            time.sleep(1)
        elif does == "hangs":
            subprocess.Popen(["sleep", "600"])
            time.sleep(600)
        elif does in ("waits", "never ends"):
            if does == "never ends":
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, lambda *_: print("asked to end", flush=True))
            signal.signal(signal.SIGUSR1, lambda *_: print("told", flush=True))
            print("ready", flush=True)
            while True:
                time.sleep(0.1)
        elif does == "spikes":
            time.sleep(hook.BEAT_SECONDS + 1)
        elif does != "goes on":
            sys.exit(does)
"""
RULE = """
[[rule]]
reason = "ConnectionError"
precedence = 45
pattern = "the coil of the pump is cold"
source = "this test"
example = "error: the coil of the pump is cold"
"""
LOST = "DistBackendError: NCCL error in: ncclRemoteError: A call to a remote peer failed"
# What each attempt does -> (exit code, attempts, what one line says)
ENDS: dict[str, tuple[Sequence[str], int, int, str]] = {
    "nothing": ([], 0, 1, "training has ended"),
    "kills": (["dies", "dies at once", "dies at once"], 0, 4, "ended by signal 9"),
    "a kill behind an error that it survived": (["survives an error, and dies"], 0, 2, "killed from outside, ended by signal 9"),
    "heartbeats of any shape": (["odd heartbeats"], 0, 1, "training has ended"),
    "a checkpoint that it removed is no progress": (["dies", "removes its newest", "removes its newest"], 1, 3, "twice without a new checkpoint"),
    "a hang": (["hangs"], 0, 2, "no output and no heartbeat for"),
    "the same unknown end twice": (["at once", "at once"], 1, 2, "twice without a new checkpoint"),
    "a lost peer": ([LOST], 0, 2, "NCCLRemoteError (owner: network)"),
    "a rule that a person accepted": (["error: the coil of the pump is cold"], 0, 2, "ConnectionError (owner: network)"),
    "a missing file": (["FileNotFoundError: [Errno 2] No such file or directory: 'a'"], 1, 1, "a restart will not help"),
    "a full disk": (["OSError: [Errno 28] No space left on device"], 1, 1, "DiskFull (owner: storage)"),
    "no restart left": ([LOST] * 9, 1, 4, "no restart is left"),
    "a spike": (["spikes"], 0, 1, "loss spike at step 1: the loss is nan"),
}  # fmt: skip


def _command(folder: Path, does: Sequence[str], *options: str) -> list[str]:
    (folder / "train.py").write_text(TRAINING)
    ours = ("--work-dir", "work", "--checkpoints", "runs", "--pause", "0.01", *options)
    return [sys.executable, "-m", "coordinator", "supervise", *ours, "--", sys.executable, "train.py", *does]


def _values(folder: Path) -> dict[str, set[str]]:
    """Step -> values that attempts had there."""
    found: dict[str, set[str]] = {}
    (folder / "values.txt").touch()
    for line in (folder / "values.txt").read_text().splitlines():
        step, value = line.split(" ")
        found.setdefault(step, set()).add(value)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    subprocess.run(_command(folder, []), cwd=folder, check=True, capture_output=True)
    return _values(folder)


@pytest.mark.parametrize("case", ENDS)
def test_each_end_is_answered_rightly(case: str, tmp_path: Path, undisturbed: dict[str, set[str]]) -> None:
    """Restarted or not, from its newest checkpoint, with one line that says why; and the same news go to `[notify] command`.
    What the training computes is what an undisturbed one does."""
    does, code, attempts, line = ENDS[case]
    (tmp_path / "work").mkdir(mode=0o700)
    (tmp_path / "work" / "rules.toml").write_text(RULE)
    (tmp_path / "evalspan.toml").write_text(
        '[notify]\ncommand = ["sh", "-c", "cat >> news.txt; echo >> news.txt"]\n'
    )
    done = subprocess.run(
        _command(tmp_path, does, "--hang", "3"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, len(list(tmp_path.glob("try-*")))) == (code, attempts), done.stderr
    assert line in done.stderr
    news = [json.loads(one)["text"] for one in (tmp_path / "news.txt").read_text().splitlines()]
    said = [one.removeprefix("supervise: ") for one in done.stderr.splitlines()]
    assert [one.replace("evalspan: ", "").split(",")[0] for one in news if "spike" not in one][-1] in said[-1]
    assert any(line in one for one in news)
    found = _values(tmp_path)
    assert found == {step: undisturbed[step] for step in found}
    assert code or found == undisturbed


def test_killed_at_any_moment_it_ends_as_if_undisturbed(
    tmp_path: Path, undisturbed: dict[str, set[str]]
) -> None:
    """The training dies at steps that chance draws, also before its first checkpoint of an attempt."""
    rng = random.Random(3)
    does = [rng.choice(["dies", "hangs", LOST]) for _ in range(3)]
    done = subprocess.run(
        _command(tmp_path, does, "--hang", "3"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert _values(tmp_path) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_supervision_that_is_ended_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    """SIGUSR1 reaches the training, SIGTERM and Ctrl-C end it; it is not restarted. Not even SIGKILL leaves one. Meanwhile
    another supervision of the same folder is refused."""
    command = _command(tmp_path, ["waits"], "--hang", "0")
    with (tmp_path / "out.txt").open("w") as out:
        running = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
    said = tmp_path / "out.txt"
    wait_until(lambda: "ready" in said.read_text(), "the training waits")
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (second.returncode, "supervised already" in second.stderr) == (2, True)
    (tmp_path / "link").symlink_to("runs")
    for place in ("link", "runs/step-*", "../" + tmp_path.name + "/runs"):
        other = [place if word == "runs" else "elsewhere" if word == "work" else word for word in command]
        second = subprocess.run(other, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (second.returncode, "supervised already" in second.stderr) == (2, True), place
    running.send_signal(signal.SIGUSR1)
    wait_until(lambda: "told" in said.read_text(), "the signal")
    running.send_signal(number)
    assert running.wait(60) == (-9 if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not _processes_in(tmp_path), "no process of the training")
    assert len(list(tmp_path.glob("try-*"))) == 1


def test_a_second_ctrl_c_ends_a_training_that_does_not_end(tmp_path: Path) -> None:
    """Its processes are killed seconds after; the first one alone lets it save."""
    with (tmp_path / "out.txt").open("w") as out:
        running = subprocess.Popen(
            _command(tmp_path, ["never ends"], "--hang", "0"),
            cwd=tmp_path,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    said = tmp_path / "out.txt"
    wait_until(lambda: "ready" in said.read_text(), "the training waits")
    running.send_signal(signal.SIGINT)
    wait_until(lambda: "asked to end" in said.read_text(), "the training is asked")
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 128 + signal.SIGINT
    assert not _processes_in(tmp_path)


def _processes_in(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found.append(process.name)
        except OSError:
            continue
    return found
