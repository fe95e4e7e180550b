"""A real daemon on this machine: however a checkpoint is announced and whatever is killed, one evaluation comes of it."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from coordinator.hook import pinned
from coordinator.intake.checkpoint import inspect_checkpoint
from coordinator.intake.inbox import Notice, leave_notice
from coordinator.operations.keeping.archive import archive_ended
from coordinator.runtime.summary import read_ended_summary
from coordinator.runtime.work_lock import UNTIL_IDLE, WorkLock, is_daemon
from evaljobs.contract.archived_files import archive_members, archive_of
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

pytestmark = pytest.mark.model
WEIGHTS = "model.safetensors"


def wait(law, what, log, seconds=240):
    end = time.monotonic() + seconds
    while not law():
        assert time.monotonic() < end, f"not within {seconds} s: {what}\n{log.read_text()}"
        time.sleep(0.05)


@contextmanager
def daemon(site, *options):
    """A daemon of the site and its log; SIGKILLed at the end if it still runs."""
    log = site.folder / "daemon.log"
    with log.open("a") as err:
        process = subprocess.Popen(
            site.command("daemon", *options), env=site.env, stdout=err, stderr=err, text=True
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def journals(site):
    return list(site.work.glob("*/journal.jsonl"))


def announce(site, checkpoint, times):
    """Several times, as the hook does; the watched folder tells of it anyway."""
    for _ in range(times):
        leave_notice(
            WorkPaths(site.work), Notice(checkpoint=str(checkpoint), step=100, noticed_at=time.time())
        )


def test_announced_a_hundred_times_while_half_written_and_killed_in_between_it_is_one_evaluation(
    site, watched
):
    """The daemon waits for the whole checkpoint, pins it, a second daemon is refused, a killed one goes on: same digits."""
    checkpoint = site.folder / "run" / "step-100"
    shutil.copytree(site.model, checkpoint)
    whole = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    site.pause_a_trial(after=0)
    with daemon(site) as (process, log):
        wait(lambda: "is not accepted yet" in log.read_text(), "the log says what it waits for", log)
        announce(site, checkpoint, 50)
        assert not journals(site), "half a checkpoint is not taken"
        assert not pinned(checkpoint)
        second = site.run(site.command("daemon"))
        assert second.returncode == 2
        (line,) = second.stderr.strip().splitlines()
        assert f"pid {process.pid} on " in line
        (checkpoint / WEIGHTS).write_bytes(whole)
        announce(site, checkpoint, 50)
        wait(lambda: journals(site), "it is taken", log)
        wait(lambda: pinned(checkpoint), "it is pinned", log)
        wait(lambda: site.paused() and site.dumped() >= 1, "one of two trials writes", log)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert pinned(checkpoint), "the pin outlives the killed daemon, which needs the checkpoint"
    os.kill(site.paused(), signal.SIGCONT)
    with daemon(site, "--until-idle") as (process, log):
        wait(lambda: process.poll() is not None, "it ends when nothing is left", log)
    assert process.returncode == 0, log.read_text()
    (journal,) = journals(site)
    assert dict(site.results()["results"]) == watched
    taken = json.loads((journal.parent / "evaluation.json").read_text())["checkpoint"]
    assert taken["digest"] == inspect_checkpoint(checkpoint).digest
    assert site.counted_once()
    assert not list((site.work / "inbox").glob("*")), "every notice is dealt with"
    assert not pinned(checkpoint)
    assert not site.processes("trial", "stage", "worker", "build")


def test_a_daemon_waits_for_what_holds_the_folder_and_ends_by_itself(site):
    """It says for whom, ends in order if it is told to meanwhile, and serves once the other one has ended."""
    lock = WorkLock(WorkPaths(site.work).lock)
    for number, holder in enumerate(("evalspan cancel", UNTIL_IDLE)):
        lock.acquire(holder)
        with daemon(site) as (process, log):
            said = f"is in use by {holder}, pid {os.getpid()} on "
            wait(lambda said=said, log=log: said in log.read_text(), "it says whom it waits for", log)
            if number:
                lock.release()
                wait(lambda: is_daemon(lock.holder()), "it serves", log)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == 0, log.read_text()
        lock.release()


def test_cancelled_in_mid_run_nothing_is_left_and_a_retry_ends_with_the_same_scores(site, watched):
    """`submit`, `cancel` and `retry` of a running daemon. The retry reads the responses so far from the archive, and runs
    nothing again; SIGTERM ends the daemon with exit code 0.
    """
    site.pause_a_trial(after=1)
    site.env["EVALSPAN_CLUSTER_SLOTS"] = "1"  # of two trials, each might run one shard
    with daemon(site) as (process, log):
        told = site.run(site.command("submit", str(site.model), "--suite", str(site.suite), "--json"))
        name = json.loads(told.stdout)["evaluation_id"]
        wait(lambda: site.paused() and site.dumped() >= 1, "a trial has written", log)
        assert site.run(site.command("cancel", name)).returncode == 0
        paths = EvaluationPaths(site.root())
        wait(lambda: read_ended_summary(paths) is not None, "it has ended", log)
        wait(lambda: not site.processes("trial", "stage", "worker", "build"), "no job is left", log)
        assert set(site.results()["failed"]) <= set(watched), "what was scored stays"
        assert "cancelled" in json.dumps(site.results()["failed"])
        wait(lambda: _archived(paths), "its files are archived", log)
        before = {name.removeprefix("responses/") for name in archive_members(archive_of(paths.root))}
        assert site.run(site.command("retry", name)).returncode == 0
        wait(lambda: "failed" not in site.results(), "the retry ends", log)
        process.send_signal(signal.SIGTERM)
        wait(lambda: process.poll() is not None, "SIGTERM ends it", log)
        assert process.returncode == 0
    assert dict(site.results()["results"]) == watched
    dumps = [e for e in site.events() if e["kind"] == "shards-dumped"]
    files = Counter(shard for e in dumps for shard, _ in e["shards"])
    assert set(files.values()) == {1}
    assert before & {frame["file"] for e in dumps for _, frame in e["shards"]}


def _archived(paths):
    with suppress(BlockingIOError):  # the daemon has not closed its journal yet
        return archive_ended(paths, most=0)
    return False


def _folder(site, step):
    return next((p.parent for p in site.work.glob(f"step-{step}-*/journal.jsonl")), None)


def test_the_next_checkpoint_waits_in_node_memory_for_its_gpu(site, watched):
    """Staged before its first offer, and the report says so; scores are lm-eval's; node memory ends empty of both."""
    site.env["EVALSPAN_CLUSTER_SLOTS"] = "1"
    site.pause_a_trial(after=0)
    home = Path(f"/dev/shm/evalspan-{os.getuid()}")
    with daemon(site) as (_process, log):
        shutil.copytree(site.model, site.folder / "run" / "step-1")
        wait(
            site.paused, "the first checkpoint's trial runs", log
        )  # it keeps its slot while the next one stages
        shutil.copytree(site.model, site.folder / "run" / "step-2", copy_function=shutil.copyfile)
        wait(
            lambda: (root := _folder(site, 2)) and list(root.glob("outcomes/*.staged.json")),
            "it is staged",
            log,
        )
        assert len(site.processes("trial")) == 1
        os.kill(site.paused(), signal.SIGCONT)
        first, second = _folder(site, 1), _folder(site, 2)
        wait(lambda: all((root / "results.json").exists() for root in (first, second)), "both end", log)
        wait(lambda: not site.processes("trial", "stage", "build"), "jobs end", log)
    seen = [
        e["outcome"]["kind"] if e["kind"] == "outcome-seen" else e["kind"]
        for e in site.events(second)
        if e["kind"] in ("memory-offered", "nodes-offered", "outcome-seen")
    ]
    assert seen.index("memory-offered") < seen.index("staged") < seen.index("nodes-offered"), seen
    report = json.loads((second / "report.json").read_text())
    assert report["staged_ahead"]["local"] > 0
    for root in (first, second):
        assert dict(json.loads((root / "results.json").read_text())["results"]) == watched
        digest = json.loads((root / "evaluation.json").read_text())["checkpoint"]["digest"]
        assert not (home / digest).exists()
