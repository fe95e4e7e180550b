"""Laws of the hook: it does not delay training, says each kind of fault once, and loses a notice only where no work
folder takes it.

Each training is a real process, so that imports, exit and warnings are seen.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.with_root import fill, small_disk

from coordinator import hook, trained_values
from coordinator.intake.inbox import Inbox, Notice
from coordinator.runtime.service import _leave_pin
from evaljobs.contract.paths import WorkPaths

ROOT = Path(__file__).resolve().parents[2]
HOOK = "import os, sys, time\nfrom coordinator import hook\nAWAY = os.environ['AWAY']\n"


def train(body, work, **env):
    """Standard output, and the lines on stderr, of a training that has the hook; without the launchers' rank variables."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "SLURM_PROCID")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env={**clean, "PYTHONPATH": str(ROOT), "EVALSPAN_WORK_DIR": str(work), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()


def announced(work):
    """What a daemon would read."""
    return [file.notice for file in Inbox(WorkPaths(work)).look()]


class Training(NamedTuple):
    """`body`: after the import of the hook; `steps`: of the notices in the work folder that are left, in order;
    `says`: words of each line on stderr."""

    body: str
    steps: tuple[int, ...] = ()
    out: str = ""
    says: tuple[str, ...] = ()


def thrice(call, *says):
    """Three wrong calls are one line; a second one at the end where their notices are left."""
    body = f"NAN = type('', (), {{'__str__': lambda _: 1 / 0}})()\nhook.FLUSH_SECONDS = 0.5\nfor _ in range(3): {call}\nhook.flush(0.5)"
    return Training(body, says=says)


LEFT = "training ends with undelivered notices: {} for work folder {}"
RANKS = ("RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
# fmt: off
TRAININGS = {
    "its last statement is a notice": Training("print(hook.notify('/c', 7))", (7,), "True"),
    "many notices": Training("for i in range(50): hook.notify('/c', i)\nhook.flush(50)", tuple(range(50))),
    **{f"rank 3 by {name}": Training(f"os.environ[{name!r}] = '3'\nprint(hook.notify('/c', 7))", (), "False") for name in RANKS},
    "no work folder is named": thrice("os.environ.pop('EVALSPAN_WORK_DIR', 0); hook.notify('/c', 1)", "no work folder: pass work_dir"),
    "the work folder is a file": thrice("hook.notify('/c', 1, work_dir=sys.executable)", "and they wait", LEFT.format(3, sys.executable)),
    "the work folder cannot be made": thrice("hook.notify('/c', 1, work_dir='/proc/nothing/x')", "the work folder /proc/nothing/x does not exist: notices wait", LEFT.format(3, "/proc/")),
    "the work folder is mistyped": thrice("hook.notify('/c', 1, work_dir=AWAY)", "/away does not exist: notices wait", LEFT.format(3, "")),
    "a step is no number": thrice("hook.notify('/c', 'seven')", "not announced"),
    "a checkpoint is no path": thrice("hook.notify(None, 1)", "not announced"),
    "a suite cannot be text": thrice("hook.notify('/c', 1, NAN)", "not announced"),
    "what is passed as a model has no tensors": Training(
        "for step in range(2): print(hook.notify('/c', step, fingerprint=object()))", (0, 1), "True\nTrue", ("announced without trained values: KeyError",)
    ),
    "a model is passed by a rank that holds no part": Training("import torch\nprint(hook.notify('/c', 7, rank=1, fingerprint=torch.nn.Linear(2, 2)))", (), "False"),
    "values cannot be written": Training("""
        import torch
        hook.FLUSH_SECONDS = 0.5
        print(hook.notify('/c', 7, fingerprint=torch.nn.Linear(2, 2), work_dir='/proc/self'))
        """, (), "True", ("no notice can be written to /proc/self", LEFT.format(1, "/proc/self"))),
    "faults of two kinds": Training(
        "for step in ('seven', 'eight', 9): hook.notify('/c/1', step, work_dir=AWAY)",
        says=("checkpoint '/c/1' of step 'seven' is not announced: ValueError", "does not exist: notices wait", LEFT.format(1, "")),
    ),
    "stderr is closed": Training("sys.stderr.close(); os.close(2); del os.environ['EVALSPAN_WORK_DIR']\nprint(hook.notify('/c', 1))", out="False"),
    "the work folder is away for a moment": Training("""
        said = []
        hook.sys.stderr = type("", (), {"write": staticmethod(said.append), "flush": staticmethod(bool)})
        for i in range(3): hook.notify(f'/c/{i}', i, work_dir=AWAY)
        while not said: pass
        os.mkdir(AWAY)
        print(hook.flush(50), len(said), AWAY in said[0])
        """, (0, 1, 2), "True 1 True"),
    "one of two work folders is away": Training("""
        hook.FLUSH_SECONDS = 0.0
        for i in range(3):
            hook.notify(f'/c/{i}', i, work_dir=AWAY)
            hook.notify(f'/c/{i}', i)
        while len(hook._courier.notices) > 3: pass
        print({n["_work_dir"] for n in hook._courier.notices} == {AWAY})
        """, (0, 1, 2), "True", ("does not exist: notices wait", LEFT.format(3, ""))),
    "an inbox cannot be written": Training(
        "hook.FLUSH_SECONDS = 0.5\nfor i in range(20): hook.notify('/c', i, work_dir='/proc/self')",
        says=("no notice can be written to /proc/self", LEFT.format(20, "/proc/self")),
    ),
    "an inbox hangs": Training(
        "hook.FLUSH_SECONDS = 0.5\nhook.write_notice = lambda *_: time.sleep(600)\nfor i in range(20): hook.notify('/c', i)", says=(LEFT.format(20, ""),)
    ),
    "paths of bytes": Training("print(hook.notify(b'/c/1', 1, work_dir=os.environb[b'EVALSPAN_WORK_DIR']))", (1,), "True"),
    "a forked process": Training("""
        hook.notify('/c/parent', 0); hook.flush()
        pid = os.fork()
        if pid == 0:
            hook.notify('/c/child', 1)
            os._exit(0 if hook.flush(50) else 1)
        assert os.waitpid(pid, 0)[1] == 0
        """, (0, 1)),
    "a child of multiprocessing, which runs no atexit handler": Training("""
        import multiprocessing
        def child():
            for step in range(3): hook.notify(f'/c/{step}', step)
        process = multiprocessing.get_context('fork').Process(target=child)
        process.start(); process.join()
        assert process.exitcode == 0
        """, (0, 1, 2)),
}
# fmt: on


@pytest.mark.parametrize("case", TRAININGS)
def test_a_training_goes_on_its_notices_arrive_in_order_and_each_kind_of_fault_is_one_line(tmp_path, case):
    """Exit code 0; no folder is made but an inbox; nothing is sent but by rank 0."""
    row, away = TRAININGS[case], tmp_path / "away"
    out, said = train(HOOK + textwrap.dedent(row.body), tmp_path, AWAY=str(away))
    assert out == row.out
    assert len(said) == len(row.says), said
    assert all(
        words in line and line.startswith("evalspan: ") for words, line in zip(row.says, said, strict=True)
    )
    assert away.exists() == ("os.mkdir(AWAY)" in row.body)
    assert {entry.name for entry in tmp_path.iterdir()} <= {"inbox", "away"}
    assert [n.step for n in announced(away if away.exists() else tmp_path)] == list(row.steps)


def test_a_full_disk_keeps_the_notices_until_there_is_room(tmp_path):
    """With one warning, and no half file; the end of training does not wait for room, and says what is left."""
    body = f"""
        {HOOK.replace(chr(10), "; ").removesuffix("; ")}
        hook.FLUSH_SECONDS = 0.5
        for i in range(5): hook.notify('/c', i)
        while not hook._warned: pass
        if os.environ["FILLER"]:
            os.unlink(os.environ["FILLER"])
            print(hook.flush(50))
    """
    with small_disk(tmp_path / "full", "64k") as disk:
        (disk / "inbox").mkdir()
        filler = str(fill(disk))
        out, (warned, left) = train(body, disk, FILLER="", AWAY="")
        assert "No space left" in warned
        assert LEFT.format(5, disk) in left
        out, (warned,) = train(body, disk, FILLER=filler, AWAY="")
        assert (out, "No space left" in warned) == ("True", True)
        assert [n.step for n in announced(disk)] == list(range(5))
        assert len(list((disk / "inbox").iterdir())) == 5


def test_the_hook_is_the_standard_library_of_python_3_8_alone(tmp_path):
    """Its import loads nothing that pip installs, not even pathlib. Grammar of 3.8, and no `|=` (dict has it from 3.9 on)."""
    body = """
        import sys
        before = set(sys.modules)
        import coordinator.hook
        new = {m.partition('.')[0] for m in set(sys.modules) - before} - {'coordinator'}
        print(sorted(new - sys.stdlib_module_names), 'pathlib' in sys.modules)
    """
    assert train(body, tmp_path) == ("[] False", [])
    for module in (hook, trained_values):
        tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))
        changed = [node.op for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
        assert not [op for op in changed if isinstance(op, ast.BitOr)]


def test_the_daemon_reads_exactly_the_fields_that_the_hook_writes(tmp_path):
    """A field more or less would be refused as no notice. The checkpoint's path is a full one."""
    hook.notify("c/step-7", 7, "core", work_dir=tmp_path, priority=3, rank=0, final=True)
    assert hook.flush(60)
    (file,) = (tmp_path / "inbox").glob("*.json")
    written, six = json.loads(file.read_text()), list(Notice.model_fields)[:6]
    assert six == ["checkpoint", "step", "suite", "priority", "noticed_at", "final"]
    assert [written.pop(field) for field in six if field != "noticed_at"] == [
        str(Path.cwd() / "c/step-7"), 7, "core", 3, True,
    ]  # fmt: skip
    assert written.pop("noticed_at") > 0
    assert not written


def test_values_are_of_the_moment_of_the_call_and_lie_there_before_their_notice(tmp_path):
    """Also where training goes on at once, and where the work folder appears later. The notice names them, and has its own where
    another suite's notice is of the same checkpoint.
    """
    work = tmp_path / "work"
    body = f"""
        {HOOK.replace(chr(10), "; ").removesuffix("; ")}
        import torch
        model = torch.nn.Linear(2, 2)
        model.weight.data.fill_(1.0)
        for suite in ("core", "code"):
            hook.notify('/c', 7, suite, fingerprint=model)
        model.weight.data.fill_(2.0)
        os.mkdir(os.environ["EVALSPAN_WORK_DIR"])
        write, hook.write_notice = hook.write_notice, lambda *a: (print(sorted(os.listdir(a[0] + "/inbox"))), write(*a))[1]
        hook.flush(50)
    """
    out, _ = train(body, work, AWAY="")
    names = [f"trained-{notice.trained_values}-0.values" for notice in announced(work)]
    assert len(set(names)) == 2
    for name, there in zip(names, out.splitlines(), strict=True):
        assert name in there
        (group,) = json.loads((work / "inbox" / name).read_text())["groups"]
        assert sorted(row["names"][0] for row in group["rows"]) == ["bias", "weight"]
        weight = struct.unpack("<6f", base64.b64decode(group["values"]))[:4]
        assert weight == (1.0,) * 4


def test_what_a_long_training_remembers_is_bounded(tmp_path, monkeypatch):
    """Announced checkpoints are forgotten once they count as pinned no more; waiting notices have a limit."""
    for name, value in (("_announced", {}), ("_warned", set()), ("_courier", hook._Courier())):
        monkeypatch.setattr(hook, name, value)
    monkeypatch.setattr(hook, "MOST_NOTICES", 5)
    monkeypatch.setattr(hook, "PIN_GRACE_SECONDS", 0.0)
    taken = [hook.notify(f"/c/{i}", i, work_dir=tmp_path / "away", rank=0) for i in range(7)]
    assert taken == [True] * 5 + [False] * 2
    assert len(hook._announced) == 1
    (tmp_path / "away").mkdir()
    assert hook.flush(50)


# --- pins and rotation ------------------------------------------------------------------------------------------------


def _pipe(pin):
    os.mkfifo(pin.with_name("pipe"))
    return pin.with_name("pipe")


# fmt: off
PINS = {
    "none": (Path.exists, False),
    "an empty one, wherever it lies": (Path.touch, True),
    "of this folder": (lambda pin: pin.write_text(hook.pin_text(pin.parent)), True),
    "of this folder, moved since": (lambda pin: pin.write_text(f"{pin.parent.stat().st_ino} /other"), True),
    "of this path, whose inode is another one on another host": (lambda pin: pin.write_text(f"0 {os.path.realpath(pin.parent)}"), True),
    "copied with another folder": (lambda pin: pin.write_text(hook.pin_text(pin.parents[1])), False),
    "no text": (lambda pin: pin.write_bytes(b"\xff"), True),
    "a pipe": (os.mkfifo, True),
    "a link to a pipe": (lambda pin: pin.symlink_to(_pipe(pin)), True),
    "a link to an endless file": (lambda pin: pin.symlink_to("/dev/zero"), True),
}
# fmt: on


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", PINS)
def test_a_pin_holds_the_folder_that_it_names_and_no_copy(tmp_path, kind):
    """What is planted at its name holds up no training, and pins as any unreadable pin does."""
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    plant, holds = PINS[kind]
    plant(folder / f"{hook.PIN_PREFIX}ckpt-core-12345678")
    assert hook.pinned(folder) is holds
    assert not hook.pinned(tmp_path / "missing")
    assert not hook.pinned(None)


def test_the_daemons_pin_is_written_through_no_planted_link(tmp_path):
    """What another user put at its name goes; the file behind a link stays as it was, and a folder is not made anew."""
    folder, behind = tmp_path / "checkpoint-100", tmp_path / "behind"
    folder.mkdir()
    pin = folder / f"{hook.PIN_PREFIX}x"
    behind.write_text("precious")
    for plant in (
        partial(pin.symlink_to, behind),
        partial(os.mkfifo, pin),
        partial(os.link, behind, pin),
        pin.touch,
    ):
        plant()
        _leave_pin(pin)
        assert (pin.read_text(), pin.is_symlink()) == (hook.pin_text(folder), False)
        pin.unlink()
    assert behind.read_text() == "precious"
    with pytest.raises(FileNotFoundError):
        _leave_pin(tmp_path / "gone" / pin.name)


@settings(max_examples=50)
@given(
    kinds=st.dictionaries(st.integers(0, 300), st.sampled_from(["", "", "pinned", "link"]), max_size=7),
    keep=st.integers(0, 5),
    digits=st.sampled_from([1, 6]),
)
def test_rotation_deletes_the_oldest_unpinned_beyond_those_it_keeps(tmp_path, kinds, keep, digits):
    """By step, not by name, and by their own names; never the newest, nor other folders. What it returns is gone: a link
    cannot be removed. A pinned one counts among those kept, and goes once its pin is gone."""
    root = tmp_path / "run"
    shutil.rmtree(root, ignore_errors=True)
    assert hook.rotate(root, 0) == []
    saved = {step: root / f"step-{step:0{digits}d}" for step in sorted(kinds)}
    others = {"step-best", "step-²", "other-1"}
    for folder in (*(root / name for name in others), *(saved[s] for s in kinds if kinds[s] != "link")):
        folder.mkdir(parents=True)
    for step, kind in kinds.items():
        if kind == "link":
            saved[step].symlink_to(root / "other-1")
        elif kind:
            (saved[step] / f"{hook.PIN_PREFIX}x").touch()
    left, spared = list(saved), {"pinned", "link"}
    for _ in range(2):
        gone = [step for step in left[:-1] if kinds[step] not in spared][: max(0, len(left) - keep)]
        assert hook.rotate(root, keep, prefix="step-") == [str(saved[step]) for step in gone]
        left = [step for step in left if step not in gone]
        assert {entry.name for entry in root.iterdir()} == others | {saved[step].name for step in left}
        for pin in root.glob(f"step-*/{hook.PIN_PREFIX}x"):
            pin.unlink()
        spared = {"link"}


def test_a_checkpoint_just_announced_is_not_rotated_away(tmp_path, monkeypatch):
    """It is spared until the daemon's pin has come and gone, or no pin came in time."""
    monkeypatch.setattr(hook, "_announced", {})
    first, second, newest = (tmp_path / "run" / f"checkpoint-{step}" for step in (1, 2, 3))
    for folder in (first, second, newest):
        folder.mkdir(parents=True)
    for folder in (first, second):
        assert hook.notify(folder, work_dir=tmp_path, rank=0)
    assert hook.rotate(tmp_path / "run", 1) == []
    pin = first / f"{hook.PIN_PREFIX}x"
    pin.touch()
    assert hook.pinned(first)
    pin.unlink()
    assert hook.rotate(tmp_path / "run", 1) == [str(first)]
    monkeypatch.setattr(hook, "PIN_GRACE_SECONDS", 0.0)
    assert hook.rotate(tmp_path / "run", 1) == [str(second)]
