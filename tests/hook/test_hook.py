"""Laws of the hook: it does not delay training, warns once, and loses a notice only where no store
can take it.

Each training process is a real one: a script in its own process, so that imports, exit and warnings
are seen.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from support.with_root import fill, small_disk

from coordinator import hook
from coordinator.intake.inbox import Inbox, Notice
from coordinator.runtime.service import _leave_pin
from evaljobs.contract.paths import WorkPaths

ROOT = Path(__file__).resolve().parents[2]


def train(body: str, *, seconds: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a training script that has the hook, without the launchers' rank variables."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "SLURM_PROCID", "EVALSPAN_WORK_DIR")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env={**clean, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def announced(work: Path) -> list[Notice]:
    """What a daemon would read."""
    return [file.notice for file in Inbox(WorkPaths(work)).look()]


ONCE = "from coordinator import hook; print(hook.notify('/ckpt/step-7', 7, 'core', priority=3))"


def test_the_import_is_the_standard_library_alone():
    """Nothing that pip installs is loaded by the import; not even pathlib is."""
    body = """
        import sys
        before = set(sys.modules)
        import coordinator.hook
        new = {m.partition('.')[0] for m in set(sys.modules) - before} - {'coordinator'}
        print(sorted(new - sys.stdlib_module_names), 'pathlib' in sys.modules)
    """
    assert train(body).stdout.strip() == "[] False"


def test_a_notice_at_the_end_of_training_still_arrives(tmp_path):
    """`notify` as last statement: the flush at exit delivers every field, with absolute paths."""
    done = train(ONCE, EVALSPAN_WORK_DIR=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    (notice,) = announced(tmp_path)
    assert (notice.checkpoint, notice.step, notice.suite, notice.priority) == ("/ckpt/step-7", 7, "core", 3)
    assert notice.noticed_at > 0


def test_many_notices_arrive_in_order(tmp_path):
    """All of them, oldest first, none twice."""
    body = "from coordinator import hook\nfor i in range(50): hook.notify(f'/c/{i}', i)\nhook.flush(50)"
    train(body, EVALSPAN_WORK_DIR=str(tmp_path))
    assert [n.step for n in announced(tmp_path)] == list(range(50))


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"])
def test_only_rank_0_sends_notices(tmp_path, variable):
    """Any launcher's rank silences all others, without a warning."""
    done = train(ONCE, EVALSPAN_WORK_DIR=str(tmp_path), **{variable: "3"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
    assert not announced(tmp_path)


BAD = {
    "no work folder is named": ("hook.notify('/c', 1)", ""),
    "the work folder is a file": ("hook.notify('/c', 1, work_dir=__FILE__)", "they wait"),
    "the work folder cannot be made": ("hook.notify('/c', 1, work_dir='/proc/nothing/here')", "notices wait"),
    "a work folder that is mistyped": (
        "hook.notify('/c', 1, work_dir=__DIR__ + '/new')",
        "/new: notices wait",
    ),
    "a step is no number": ("hook.notify('/c', 'seven', work_dir=__DIR__)", "not announced"),
    "a checkpoint is no path": ("hook.notify(None, 1, work_dir=__DIR__)", "not announced"),
    "a suite cannot be text": ("hook.notify('/c', 1, Bad(), work_dir=__DIR__)", "not announced"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_warning_and_no_error(tmp_path, case):
    """Three wrong calls: exit code 0, one line on stderr; a second one at the end where notices still wait."""
    call, words = BAD[case]
    (tmp_path / "file").write_text("")
    call = call.replace("__FILE__", repr(str(tmp_path / "file"))).replace("__DIR__", repr(str(tmp_path)))
    body = f"""
        from coordinator import hook
        class Bad:
            def __str__(self): raise RuntimeError
        for _ in range(3): {call}
        hook.flush()
    """
    done = train(body)
    assert done.returncode == 0
    first, *last = done.stderr.splitlines()
    assert first.startswith("evalspan: ")
    assert words in first
    ends = "evalspan: training ends with notices left: 3 undelivered"
    assert [line.partition(" to ")[0] for line in last] == [ends] * (" wait" in first), done.stderr
    assert all(str(tmp_path) in line or "/proc/nothing/here; the" in line for line in last)
    assert [p.name for p in tmp_path.iterdir()] == ["file"], "no folder was made"


def test_a_fault_of_one_kind_mutes_no_other(tmp_path):
    """A wrong step names its checkpoint; the mistyped work folder of the next notice is still said."""
    body = f"""
        from coordinator import hook
        for step in ("seven", "eight", 9): hook.notify('/c/1', step, work_dir={str(tmp_path / "new")!r})
    """
    first, second, _ = train(body).stderr.splitlines()
    assert first.startswith("evalspan: checkpoint '/c/1' of step 'seven' is not announced: ValueError")
    assert "there is no work folder" in second


def test_a_work_folder_that_is_away_for_a_moment_loses_no_notice(tmp_path):
    """They wait in order, with one warning, and are delivered once the folder is back."""
    body = """
        import os
        from coordinator import hook
        said = []
        hook.sys.stderr = type("", (), {"write": staticmethod(said.append)})
        for i in range(3): hook.notify(f'/c/{i}', i)
        while not said: pass
        os.mkdir(os.environ["EVALSPAN_WORK_DIR"])
        print(hook.flush(50), len(said), os.environ["EVALSPAN_WORK_DIR"] in said[0])
    """
    done = train(body, EVALSPAN_WORK_DIR=str(tmp_path / "work"))
    assert done.stdout == "True 1 True\n"
    assert [n.step for n in announced(tmp_path / "work")] == [0, 1, 2]


def test_a_work_folder_that_is_away_holds_up_no_other(tmp_path):
    """Notices of a second work folder are delivered, in order, while those of the first wait."""
    body = f"""
        from coordinator import hook
        hook.FLUSH_SECONDS = 0.0
        for i in range(3):
            hook.notify(f'/c/{{i}}', i, work_dir={str(tmp_path / "away")!r})
            hook.notify(f'/c/{{i}}', i)
        while len(hook._courier.notices) > 3: pass
        print({{n["_work_dir"] for n in hook._courier.notices}})
    """
    done = train(body, EVALSPAN_WORK_DIR=str(tmp_path))
    assert done.stdout == f"{{{str(tmp_path / 'away')!r}}}\n"
    assert [n.step for n in announced(tmp_path)] == [0, 1, 2]


def test_what_a_long_training_remembers_is_bounded(tmp_path, monkeypatch):
    """Announced checkpoints are forgotten once they count as pinned no more; waiting notices have a limit."""
    monkeypatch.setattr(hook, "_announced", {})
    monkeypatch.setattr(hook, "_warned", set())
    monkeypatch.setattr(hook, "_courier", hook._Courier())
    monkeypatch.setattr(hook, "MOST_NOTICES", 5)
    monkeypatch.setattr(hook, "PIN_GRACE_SECONDS", 0.0)
    taken = [hook.notify(f"/c/{i}", i, work_dir=tmp_path / "away", rank=0) for i in range(7)]
    assert taken == [True] * 5 + [False] * 2
    assert len(hook._announced) == 1
    (tmp_path / "away").mkdir()
    assert hook.flush(50)


def test_the_copied_file_needs_no_later_python_than_3_8():
    """Grammar of 3.8, and no `|=` (dict has it from 3.9 on)."""
    tree = ast.parse(Path(hook.__file__).read_text(), feature_version=(3, 8))
    assert not [
        n.lineno for n in ast.walk(tree) if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.BitOr)
    ]


def test_a_closed_stderr_does_not_reach_training():
    """Even the warning cannot be written."""
    body = (
        "import sys, os; sys.stderr.close(); os.close(2)\n"
        "from coordinator import hook; print(hook.notify('/c', 1))"
    )
    done = train(body)
    assert (done.returncode, done.stdout) == (0, "False\n")


def test_a_full_disk_keeps_the_notices_until_there_is_room(tmp_path):
    """With one warning, and no half file."""
    body = """
        import os
        from coordinator import hook
        for i in range(5): hook.notify('/c', i)
        while not hook._warned: pass
        os.unlink(os.environ["FILLER"])
        print(hook.flush(50))
    """
    with small_disk(tmp_path / "full", "64k") as disk:
        (disk / "inbox").mkdir()
        done = train(body, FILLER=str(fill(disk)), EVALSPAN_WORK_DIR=str(disk))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "True\n", 1)
        assert "No space left" in done.stderr
        assert [n.step for n in announced(disk)] == list(range(5))
        assert len(list((disk / "inbox").iterdir())) == 5


@pytest.mark.parametrize("how", ["read-only", "full", "hung"])
def test_an_inbox_that_takes_nothing_holds_up_no_training(tmp_path, how):
    """`notify` returns at once; the end of training is bounded, and says what is left."""
    hangs = "hook.leave = lambda *_: time.sleep(600)" if how == "hung" else ""
    body = f"""
        import time
        from coordinator import hook
        hook.FLUSH_SECONDS = 0.5
        {hangs}
        for i in range(20): hook.notify('/c', i)
    """
    with small_disk(tmp_path / "full", "64k") as disk:
        fill(disk)
        done = train(body, EVALSPAN_WORK_DIR="/proc/self" if how == "read-only" else str(disk))
    assert done.returncode == 0
    assert "20 undelivered" in done.stderr
    assert done.stderr.count("\n") == (1 if how == "hung" else 2)


def test_a_forked_process_can_notify(tmp_path):
    """A child starts its own thread; its notice arrives when it flushes."""
    body = """
        import os
        from coordinator import hook
        hook.notify('/c/parent', 0); hook.flush()
        pid = os.fork()
        if pid == 0:
            hook.notify('/c/child', 1)
            os._exit(0 if hook.flush(50) else 1)
        assert os.waitpid(pid, 0)[1] == 0
    """
    done = train(body, EVALSPAN_WORK_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [n.step for n in announced(tmp_path)] == [0, 1]


def test_a_child_of_multiprocessing_notifies_to_its_end(tmp_path):
    """Forked by multiprocessing it runs no atexit handlers, yet its last notice arrives."""
    body = """
        import multiprocessing
        from coordinator import hook
        def child():
            for step in range(3):
                hook.notify(f'/c/{step}', step)
        process = multiprocessing.get_context('fork').Process(target=child)
        process.start(); process.join()
        assert process.exitcode == 0
    """
    done = train(body, EVALSPAN_WORK_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [n.step for n in announced(tmp_path)] == [0, 1, 2]


# --- pins and rotation ------------------------------------------------------------------------------------------------


def _checkpoints(root: Path, steps: list[int]) -> list[Path]:
    folders = [root / f"checkpoint-{step}" for step in steps]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def test_a_pin_of_the_daemon_is_seen(tmp_path):
    """A marker file pins; without it, or without the folder, nothing does."""
    (folder,) = _checkpoints(tmp_path, [1])
    assert not hook.pinned(folder)
    (folder / f"{hook.PIN_PREFIX}ckpt-core-12345678").touch()
    assert hook.pinned(folder)
    assert not hook.pinned(tmp_path / "missing")
    assert not hook.pinned(None)  # type: ignore[arg-type]


def test_a_pin_that_was_copied_pins_no_copy(tmp_path):
    """It names its folder, by inode and by path: a move of the folder takes it along. An empty one always pins."""
    (folder,) = _checkpoints(tmp_path, [1])
    pin = folder / f"{hook.PIN_PREFIX}ckpt-core-12345678"
    pin.write_text(hook.pin_text(folder))
    copy = shutil.copytree(folder, tmp_path / "copies" / "checkpoint-1")
    assert hook.pinned(folder)
    assert not hook.pinned(copy)
    folder = folder.rename(tmp_path / "checkpoint-2")
    assert hook.pinned(folder)
    other_host = f"0 {os.path.realpath(folder)}"  # whose storage gives another inode
    (folder / pin.name).write_text(other_host)
    assert hook.pinned(folder)
    (copy / pin.name).write_text("")
    assert hook.pinned(copy)


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "endless"])
def test_a_planted_pin_holds_up_no_training(tmp_path, kind):
    """A pipe or a link at a pin's name is not opened to the end; it pins, as any unreadable pin does."""
    (folder,) = _checkpoints(tmp_path, [100])
    pin = folder / f"{hook.PIN_PREFIX}x"
    os.mkfifo(pin if kind == "pipe" else tmp_path / "pipe")
    if kind != "pipe":
        pin.symlink_to("/dev/zero" if kind == "endless" else tmp_path / "pipe")
    with ThreadPoolExecutor(1) as thread:
        looked = thread.submit(hook.pinned, folder)
        try:
            assert looked.result(timeout=60)
        except TimeoutError:
            os.close(os.open(tmp_path / "pipe" if kind != "pipe" else pin, os.O_WRONLY | os.O_NONBLOCK))
            raise


def test_the_daemons_pin_is_written_through_no_planted_link(tmp_path):
    """What another user put at its name goes; the file behind a link stays as it was, and a folder is not made anew."""
    (folder,) = _checkpoints(tmp_path, [100])
    pin, behind = folder / f"{hook.PIN_PREFIX}x", tmp_path / "behind"
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


def test_rotation_spares_pinned_checkpoints_and_the_newest(tmp_path):
    """Oldest first by step, not by name; a pinned one goes once its pin is gone; other folders
    stay.
    """
    folders = _checkpoints(tmp_path, [5, 10, 100, 200])
    (tmp_path / "checkpoint-best").mkdir()
    pin = folders[1] / f"{hook.PIN_PREFIX}x"
    pin.touch()
    assert hook.rotate(tmp_path, 2) == [str(folders[0]), str(folders[2])]
    pin.unlink()
    assert hook.rotate(tmp_path, 0) == [str(folders[1])]
    assert (tmp_path / "checkpoint-best").exists()
    assert folders[3].exists()
    assert hook.rotate(tmp_path / "missing", 1) == []


def test_rotation_reports_what_it_deleted(tmp_path):
    """Steps padded with zeros are deleted under their own names, and only deleted ones reported."""
    padded = [tmp_path / f"step-{step:06d}" for step in (100, 200, 300)]
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "step-000050"
    link.symlink_to(tmp_path / "elsewhere")  # rmtree refuses links
    for folder in (*padded, tmp_path / "step-²"):
        folder.mkdir()
    assert hook.rotate(tmp_path, 2, prefix="step-") == [str(padded[0]), str(padded[1])]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "elsewhere",
        "step-000050",
        "step-000300",
        "step-²",
    ]


def test_a_checkpoint_just_announced_is_not_rotated_away(tmp_path, monkeypatch):
    """It is spared until the daemon's pin has come and gone, or no pin came in time."""
    monkeypatch.setattr(hook, "_announced", {})
    first, second, _newest = _checkpoints(tmp_path / "run", [1, 2, 3])
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


def test_the_daemon_reads_exactly_the_fields_that_the_hook_writes(tmp_path):
    """A field more or less would be refused as no notice."""
    hook.notify("/c", 1, work_dir=tmp_path, rank=0)
    assert hook.flush(60)
    (file,) = (tmp_path / "inbox").glob("*.json")
    assert list(Notice.model_fields)[:5] == ["checkpoint", "step", "suite", "priority", "noticed_at"]
    assert set(json.loads(file.read_text())) == set(list(Notice.model_fields)[:5])
