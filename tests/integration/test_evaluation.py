"""`evalspan eval` from end to end, whole and with things killed in the middle: always lm-eval's own scores."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from grp import getgrgid
from pathlib import Path
from typing import Any

import pytest
from dev_cluster.testing import unfinished, wait_until
from support.served import server_pid

from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import read_frames
from evaljobs.staging.owned_files import try_flock
from evaljobs.staging.store import HELD_LOCK, home_name

pytestmark = pytest.mark.model
Expected = dict[str, dict[str, Any]]


def wait(
    law: Callable[[], object], process: subprocess.Popen[str] | None = None, seconds: float = 240
) -> None:
    """Until `law` holds; fails where the process ends first or time is up."""
    ended = process.poll if process else lambda: None
    wait_until(lambda: ended() is not None or law(), "what a running evaluation does", seconds)
    assert ended() is None or law(), process and process.communicate()


def scores(results: dict[str, Any]) -> Expected:
    return dict(results["results"])


def finish(site: Any, process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{out}\n{err}\n{logs(site)}"
    return json.loads(out)  # type: ignore[no-any-return]


def logs(site: Any) -> str:
    return "\n".join(f"== {p}\n{p.read_text()[-1500:]}" for p in site.work.glob("*/logs/*.log"))


def dumped(site: Any) -> int:
    """Shards whose responses are on disk."""
    return sum(1 for f in site.work.glob("*/responses/*.frames") for _ in read_frames(f, 0))


def assert_every_shard_counts_once(site: Any) -> None:
    journal = (site.root() / "journal.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in journal]
    shards = [s for e in events if e["kind"] == "planned" for leaf in e["leaves"] for s in leaf["shards"]]
    counted = [s for e in events if e["kind"] == "shards-dumped" for s, _ in e["shards"]]
    assert sorted(counted) == sorted(shards)


@pytest.fixture
def _open_umask() -> Iterator[None]:
    """One by which all users could write to what is made."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(work: Path, *beside: str) -> set[str]:
    """The modes of all folders, and of all files, in a work folder but for the folders `beside`."""
    found = [work, *(p for p in work.rglob("*") if p.relative_to(work).parts[0] not in beside)]
    wrong = {(stat.filemode(p.stat().st_mode)): str(p) for p in found if not p.is_symlink()}
    return {f"{mode} {wrong[mode]}" if mode[5] == "w" or mode[-3:] != "---" else mode for mode in wrong}


@pytest.mark.usefixtures("_open_umask")
def test_local_scores_are_lm_evals_and_nothing_is_left(local_site: Any, expected: Expected) -> None:
    """Split over slots, finished out of order: the same digits; node memory, jobs and Redis are gone afterwards. Whatever
    the umask, other users see nothing of the work folder.
    """
    done = local_site.run(local_site.evaluate("--shards-per-task", "3"))
    assert done.returncode == 0, f"{done.stderr}\n{logs(local_site)}"
    results = json.loads(done.stdout)
    assert scores(results) == expected
    assert results == local_site.results()
    assert_every_shard_counts_once(local_site)
    assert not (local_site.work / "redis" / "address.json").exists(), "the embedded Redis is stopped"
    digest = json.loads((local_site.root() / "evaluation.json").read_text())["checkpoint"]["digest"]
    assert not Path(f"/dev/shm/evalspan-{os.getuid()}", digest).exists(), "what others stage is theirs"
    # a second run of the same is the same evaluation: no job, the same answer
    again = local_site.run(local_site.evaluate())
    assert json.loads(again.stdout) == results
    report = local_site.run(local_site.command("report", local_site.root().name, "--json"))
    told = json.loads(report.stdout)
    assert told["status"] == "done"
    assert told["makespan_seconds"] >= told["lower_bound_seconds"] > 0
    assert sum(g["shards"] for g in told["gpus"]) == len(told["shards"])
    (staged,) = (json.loads(p.read_text()) for p in local_site.work.glob("*/outcomes/*.staged.json"))
    assert told["staged_bytes"] == staged["bytes"] > 0
    assert modes(local_site.work) == {"drwx------", "-rw-------"}


@pytest.mark.usefixtures("_open_umask")
def test_both_planning_policies_give_lm_evals_scores(local_site: Any, expected: Expected) -> None:
    """[plan] policy = "round-robin": large tasks in a piece a lane, each shard run by a trial of the lane that the plan gave it
    to, and the scores of evalspan's own policy to the last digit, which are lm-eval's."""
    local_site.env |= {
        "EVALSPAN_PLAN_POLICY": "round-robin",
        "EVALSPAN_SHARED_GROUP": getgrgid(os.getegid()).gr_name,
    }
    done = local_site.run(local_site.evaluate())
    assert done.returncode == 0, f"{done.stderr}\n{logs(local_site)}"
    assert scores(json.loads(done.stdout)) == expected
    assert_every_shard_counts_once(local_site)
    closed = ("redis", "inbox")
    assert modes(local_site.work, *closed) == {"drwxr-s---", "-rw-r-----"}, (
        "its group reads, and writes nothing"
    )
    events = [json.loads(line) for line in (local_site.root() / "journal.jsonl").read_text().splitlines()]
    (plan,) = (e for e in events if e["kind"] == "planned")
    lane_of = {shard: lane["lane"] for lane in plan["lanes"] for shard, _, _ in lane["shards"]}
    assert len(set(lane_of.values())) == 2, "dealt to both slots"
    ranks = sorted(rank for lane in plan["lanes"] for _, rank, _ in lane["shards"])
    assert ranks == list(range(len(lane_of))), "one queue, dealt in its order"
    lane_of_trial = {
        lane["trial"]: lane["lane"]
        for place in local_site.root().glob("specs/*-trial-*.json")
        for lane in json.loads(place.read_text())["lanes"]
    }
    counted = [s for e in events if e["kind"] == "shards-dumped" for s in e["shards"]]
    assert {
        shard: lane_of_trial[frame["file"].removesuffix(".frames")] for shard, frame in counted
    } == lane_of


def test_a_metric_that_kills_its_worker_and_one_that_hangs_cost_two_items(local_site: Any) -> None:
    """Each try of the score loses its worker to one item, and another hangs: both are named, the rest has a score, the exit
    code says that something lacks; once that is mended a retry scores all without a GPU."""
    site = local_site
    site.suite.write_text(
        site.suite.read_text().partition("[[task]]")[0] + '[[task]]\nname = "toy_hostile"\n'
    )
    config = site.folder / "evalspan.toml"
    config.write_text(config.read_text().replace("[metric]", "[metric]\nitem_seconds = 1.0"))
    site.env["HOSTILE"] = "worker"
    done = site.run(site.evaluate())
    assert done.returncode == 1, f"{done.stderr}\n{logs(site)}"
    value = json.loads(done.stdout)["results"]["toy_hostile"]["letters,none"]
    told = json.loads((site.root() / "report.json").read_text())
    assert (told["status"], told["entries"][0]["unscored"]) == ("done", 2)
    assert list(site.results()["unscored"]["toy_hostile"]) == ["toy_hostile 2", "toy_hostile 5"]
    assert any("item 2 failed" in w and "processes died" in w for w in told["warnings"])
    assert any("item 5 failed" in w and "longer than 1 s" in w for w in told["warnings"])
    shown = site.run(site.command("report", site.root().name)).stdout
    assert "PARTLY toy_hostile: 2 items count in no mean" in shown
    del site.env["HOSTILE"]
    again = site.run(site.command("retry", site.root().name))
    assert again.returncode == 0, again.stderr
    assert json.loads((site.root() / "report.json").read_text())["entries"][0]["unscored"] == 0
    assert site.results()["results"]["toy_hostile"]["letters,none"] != value
    assert "unscored" not in site.results()
    assert_every_shard_counts_once(site)


def left_behind(site: Any) -> list[str]:
    """Processes that name the site's folder, and precursors' leases on its staged weights."""
    folder = os.fsencode(site.folder)
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder in (place / "cmdline").read_bytes() and int(place.name) != os.getpid():
                found.append((place / "cmdline").read_text().replace("\0", " "))
    for spec in site.work.glob("*/specs/*-stage-*.json"):
        home = Path("/dev/shm") / home_name(os.getuid())
        digest = json.loads(spec.read_text())["checkpoint"]["digest"]
        with contextlib.suppress(OSError), (home / digest / HELD_LOCK).open() as lock:
            found += [] if try_flock(lock.fileno()) else [lock.name]
    return found


def test_killed_it_leaves_nothing_on_this_machine_and_run_again_it_resumes(
    local_site: Any, expected: Expected
) -> None:
    """SIGKILL of the coordinator in mid-inference: within 10 s no job, no Redis and no staged weights are left. The next one
    runs what is left, and no more. One that is started before that is refused in one line.
    """
    local_site.pause_a_trial(after=1)
    first = local_site.start(local_site.evaluate("--shards-per-task", "4"))
    wait(lambda: local_site.paused() and dumped(local_site) >= 2, first)
    refused = local_site.run(local_site.evaluate("--shards-per-task", "4"))
    assert refused.returncode == 2
    assert re.fullmatch(r"evalspan: .* is in use by evalspan eval, .*\n", refused.stderr)
    assert any("valkey" in left for left in left_behind(local_site))
    assert any("/dev/shm" in left for left in left_behind(local_site))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait(lambda: not left_behind(local_site), seconds=10)
    second = local_site.start(local_site.evaluate("--shards-per-task", "4"))
    assert scores(finish(local_site, second)) == expected
    assert_every_shard_counts_once(local_site)


def test_a_killed_trial_and_a_wiped_redis_change_no_digit(local_site: Any, expected: Expected) -> None:
    """A trial dies by SIGKILL and Redis comes back empty: shards return to the queue, scores are the same."""
    local_site.pause_a_trial(after=1)
    process = local_site.start(local_site.evaluate("--shards-per-task", "4"))
    wait(local_site.paused, process)
    os.kill(local_site.paused(), signal.SIGKILL)
    os.kill(server_pid(WorkPaths(local_site.work)), signal.SIGKILL)
    assert scores(finish(local_site, process)) == expected
    assert_every_shard_counts_once(local_site)


@pytest.mark.slurm
def test_slurm_scores_are_lm_evals_and_nothing_is_left(slurm_site: Any, expected: Expected) -> None:
    """The same evaluation as Slurm jobs of an ordinary user: precursor, trials, workers; then no job, no file. The site's accounting shows no trial that did its work as cancelled."""
    site, cluster = slurm_site, slurm_site.cluster
    process = site.start(site.evaluate("--shards-per-task", "3"))
    seen: set[str] = set()

    def look() -> bool:
        listed = cluster.run_as_user(["squeue", "--noheader", "--format=%j"]).stdout.split()
        seen.update(name.split("-")[2] for name in listed if name.startswith("es-"))
        return process.poll() is not None

    wait(look)
    results = finish(site, process)
    assert scores(results) == expected
    assert {"build", "stage", "trial", "metric"} <= seen
    assert_every_shard_counts_once(site)
    assert unfinished(cluster) == []
    assert modes(site.work) == {"drwx------", "-rw-------"}, "Slurm's logs, too"
    argv = ["squeue", "--noheader", "--array", "--states=all", "--format=%j %T"]
    words = (line.split() for line in cluster.run_as_user(argv).stdout.splitlines())
    assert {state for name, state in words if "-trial-" in name} == {"COMPLETED"}, (
        "by themselves, with exit code 0"
    )
    for node in cluster.gpu_nodes:
        srun = ["srun", "--partition=gpu", f"--nodelist={node}", "--mem=100", "sh", "-c"]
        left = cluster.run_as_user([*srun, "find /dev/shm/evalspan-* -type f"])
        assert ".safetensors" not in left.stdout


@pytest.mark.slurm
def test_a_node_lost_in_mid_trial_changes_no_digit(slurm_site: Any, expected: Expected) -> None:
    """Power cut of a node with trials: its shards are run elsewhere."""
    site, cluster = slurm_site, slurm_site.cluster
    process = site.start(site.evaluate("--shards-per-task", "4"))
    wait(lambda: dumped(site) >= 1, process)
    trial = next(site.work.glob("*/responses/*-trial-*.frames")).name
    node = trial.split("-trial-")[1].split("-")[0]
    cluster.kill_node(node)
    try:
        assert scores(finish(site, process)) == expected
        assert_every_shard_counts_once(site)
    finally:
        cluster.start_node(node)


def stopped_trial(site: Any) -> int | None:
    """The host's pid of the trial that stands still on a node."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().split(b"\0")
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            if state == "T" and b"trial" in words and any(os.fsencode(site.work) in word for word in words):
                return int(place.name)
    return None


@pytest.mark.slurm
def test_a_trial_goes_on_while_the_coordinator_and_its_redis_are_gone(
    slurm_site: Any, expected: Expected
) -> None:
    """It dumps every shard without them; the next coordinator finds the records and runs nothing again."""
    site = slurm_site
    site.pause_a_trial(after=1)
    options = ["--shards-per-task", "3", "--slots", "1"]
    first = site.start(site.evaluate(*options))
    wait(lambda: stopped_trial(site), first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    os.kill(stopped_trial(site) or 0, signal.SIGCONT)
    events = [json.loads(line) for line in (site.root() / "journal.jsonl").read_text().splitlines()]
    planned = sum(len(leaf["shards"]) for e in events if e["kind"] == "planned" for leaf in e["leaves"])
    wait(lambda: dumped(site) == planned)
    assert scores(finish(site, site.start(site.evaluate(*options)))) == expected
    assert dumped(site) == planned
    assert_every_shard_counts_once(site)
    ended = [json.loads(file.read_text()) for file in site.work.glob("*/outcomes/*.trial-ended.json")]
    assert [(e["reason"], e["shards"]) for e in ended] == [("drained", planned)]
