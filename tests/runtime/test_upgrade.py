"""Another version's evaluations: an older one's are resumed, a newer one's are left alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import replays
from support.fake_cluster import FakeCluster, FakeMember, fake_node
from support.loops import coordinator_on, serving, until
from support.shapes import Shape, shapes
from support.simulated.parts import SITE, record

from coordinator.allocation import cordons
from coordinator.cli.screen.standing import facts_of
from coordinator.config.schema import Config
from coordinator.evaluation import step as machine
from coordinator.evaluation.events import (
    Accepted,
    AnyEvent,
    JobEnded,
    JobIntended,
    JobSubmitted,
    OutcomeSeen,
    RequestSetsFound,
)
from coordinator.evaluation.indexes import validate
from coordinator.evaluation.records import job_prefix
from coordinator.evaluation.state import State
from coordinator.intake import pending
from coordinator.runtime.journal import JournalError, OtherVersionError, read_events
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.operator_commands import Command, leave_command, obey_commands
from coordinator.runtime.status_file import Ended, read_status
from evaljobs.contract.outcomes import Outcome
from evaljobs.contract.paths import EvaluationPaths, WorkPaths, request_set_manifest
from evaljobs.contract.specs import YOUNGER
from evaljobs.queue import redis_client

VERSIONS = Path(__file__).parent / "versions"  # a folder for each commit: CONTRIBUTING says how to make one
COMMITS = sorted(folder.name for folder in VERSIONS.iterdir())
OURS, NEWER = "ckpt-ours-00000001", "ckpt-newer-00000002"
NEXT = "evalspan 9.0 (commit fedcba987654)"


def files_of(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def jobs_of(cluster: FakeCluster, evaluation_id: str) -> list[str]:
    return [
        j.name for j in cluster.jobs() if j.name.startswith(job_prefix(evaluation_id)) and j.phase != "ended"
    ]


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(fleet=[fake_node("n1", gpus=0, memory_mb=64_000)])


def go_on_as_newer(journal: Path, **unknown: object) -> None:
    """What a newer coordinator appends that takes the evaluation up; a write of its was torn."""
    said: dict[str, Any] = {"kind": "restarted", "at": 1.0, "journal_format": 1, "signs": True, "code": NEXT}
    lines = [said | unknown, {"kind": "results-written", "at": 2.0}]
    if not unknown:
        lines.append({"kind": "a-kind-of-later", "at": 3.0})
    with journal.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "torn')


@pytest.fixture(params=[{}, {"asked_by": "eve"}, {"journal_format": 2}], ids=["kind", "field", "format"])
def work(tmp_path: Path, cluster: FakeCluster, request: pytest.FixtureRequest) -> Path:
    """A work folder with an evaluation of this version and one that a newer one has resumed; both have jobs."""
    folder = tmp_path / "work"
    with serving(folder, cluster) as before:
        for name in (OURS, NEWER):
            before.accept(record().model_copy(update={"evaluation_id": name}))
        until(before, lambda: bool(jobs_of(cluster, OURS) and jobs_of(cluster, NEWER)))
    go_on_as_newer(folder / NEWER / "journal.jsonl", **request.param)
    return folder


@pytest.fixture
def later(work: Path, cluster: FakeCluster) -> Iterator[Coordinator]:
    coordinator = coordinator_on(work, cluster, redis=True)
    with coordinator.in_charge():
        coordinator.resume_all()
        yield coordinator
    coordinator.keeper.stop()


def test_what_a_newer_version_has_journalled_is_left_alone_in_one_line(
    work: Path, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Both versions are named. The other evaluation goes on; no file of it changes, no job of it ends, however often
    it is looked at.
    """
    before = files_of(work / NEWER)
    coordinator = coordinator_on(work, cluster, redis=True)
    with coordinator.in_charge():
        coordinator.resume_all()
        for _ in range(8):
            coordinator._parked.by_id[NEWER].until = 0.0
            coordinator.tick()
        assert list(coordinator.running) == [OURS]
        assert coordinator.lost(NEWER) is None
        (row,) = [r for r in facts_of(Config(work_dir=work)) if r["evaluation_id"] == NEWER]
    coordinator.keeper.stop()
    assert NEXT in str(row["fault"])
    said = [line.getMessage() for line in caplog.records if NEWER in line.getMessage()]
    assert len(said) == 1
    assert "\n" not in said[0]
    assert f"is of a newer version, {NEXT}; this is evalspan " in said[0]
    assert files_of(work / NEWER) == before
    assert jobs_of(cluster, NEWER)


@pytest.mark.parametrize("work", [{}], ids=["kind"], indirect=True)
def test_a_command_to_a_newer_versions_evaluation_waits_for_that_version(
    later: Coordinator, cluster: FakeCluster
) -> None:
    command = leave_command(
        later.performer.site.paths, Command(command="cancel", evaluation_id=NEWER, reason="enough")
    )
    obey_commands(later)
    later.tick()
    assert command.exists()
    assert jobs_of(cluster, NEWER)
    typed = [
        sys.executable,
        "-m",
        "coordinator",
        "retry",
        NEWER,
        "--work-dir",
        str(later.performer.site.work_dir),
    ]
    said = subprocess.run(typed, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 2
    assert " ".join(said.stderr.split()).count(f"is of a newer version, {NEXT}; this is evalspan ") == 1
    assert "Traceback" not in said.stderr


def test_a_line_that_its_own_version_cannot_read_is_damaged(tmp_path: Path, cluster: FakeCluster) -> None:
    """A journal without damage is never given up, one with damage always: versions tell them apart."""
    with serving(tmp_path / "work", cluster) as coordinator:
        journal = coordinator.accept(record()).journal.path
    whole = journal.read_bytes()
    for line in ({"kind": "a-kind-of-later", "at": 3.0}, {"kind": "restarted", "code": NEXT}):
        journal.write_bytes(whole + json.dumps(line).encode() + b"\n")
        with pytest.raises(JournalError) as damaged:
            list(read_events(journal))
        assert not isinstance(damaged.value, OtherVersionError)


def test_what_a_newer_version_adds_to_a_file_of_now_is_passed_over(tmp_path: Path) -> None:
    """Cordons, pending checkpoints, the address of Redis and the summary of an end: they are read all the same."""
    work = WorkPaths(tmp_path)
    more = {"by_a_later_version": [1]}
    work.nodes.write_text(json.dumps({"schema_version": 1, "cordoned": {"n1": 9e9}} | more))
    assert cordons.read(work.nodes, 0.0) == {"n1": 9e9}
    refused = {"checkpoint": "/c", "suite": "s", "at": 1.0, "why": "no"} | more
    work.pending.write_text(json.dumps({"refused": [refused]} | more))
    assert [r.why for r in pending.read(work.pending).refused] == ["no"]
    work.redis_address.parent.mkdir()
    work.redis_address.write_text(json.dumps({"host": "h", "port": 1} | more))
    work.redis_address.chmod(0o600)
    assert redis_client.read(work.redis_address).where == "redis://h:1/0"
    paths = EvaluationPaths(tmp_path / OURS)
    paths.root.mkdir()
    paths.journal.write_bytes(b"x")
    ended = Ended(
        evaluation_id=OURS, journal_bytes=1, accepted_at=1.0, ended_at=2.0, checkpoint="/c", step=None, suite="s",
        started=True, shards=0, shards_done=0, scored=0, entries=0, stragglers={}, errors={}, warnings=(),
    )  # fmt: skip
    paths.status.write_text(json.dumps(json.loads(ended.model_dump_json()) | more))
    assert read_status(paths) == ended


# --- the way forward: evaluations of earlier commits -------------------------------------------------------------------


@pytest.fixture(params=COMMITS)
def earlier(tmp_path: Path, request: pytest.FixtureRequest) -> EvaluationPaths:
    """An evaluation on a real Slurm, from its first event to its last, in files that an earlier commit left of it.

    Without request sets, specs, logs and samples.
    """
    with tarfile.open(VERSIONS / request.param / "evaluation.tar.gz") as tar:
        tar.extractall(tmp_path / "was", filter="data")
    (folder,) = (tmp_path / "was").iterdir()
    paths = EvaluationPaths(folder)
    (sets,) = [e for e in read_events(paths.journal) if isinstance(e, RequestSetsFound)]
    there = str(Path(sets.folders[0]).parents[1]).encode()
    for file in [paths.journal, paths.evaluation, *paths.outcomes.iterdir()]:
        file.write_bytes(file.read_bytes().replace(there, str(tmp_path / "work").encode()))
    return paths


def test_an_earlier_versions_journal_replays_to_its_end_without_an_illegal_event(
    earlier: EvaluationPaths,
) -> None:
    """Whole and up to each of its lines, as a coordinator leaves it that dies there."""
    events = list(read_events(earlier.journal))
    assert isinstance(events[0], Accepted)
    state, _ = machine.start(events[0])
    for event in events[1:]:
        machine.step(state, SITE, event, replaying=True)
        validate(state)
    assert state.ended_at is not None
    assert {entry.status for entry in state.entries} == {"scored"}
    assert not state.warnings


@pytest.mark.parametrize("commit", COMMITS)
def test_an_earlier_versions_journals_lead_to_what_they_led_to_then(commit: str) -> None:
    """Simulated evaluations under faults, at some moments and at the end: what is done, lost and submitted. A rule that
    decides otherwise today must leave the replay of what was decided then as it was.
    """
    for events, standings in replays.read(VERSIONS / commit / "simulated.jsonl.gz"):
        assert replays.replayed(events, standings) == standings


def cut(earlier: EvaluationPaths, work: Path, where: str) -> list[AnyEvent]:
    """The evaluation as it was at a moment of its journal; returns what came later."""
    lines = earlier.journal.read_bytes().splitlines(keepends=True)
    events = list(read_events(earlier.journal))
    kinds = [event.kind for event in events]
    dumped = [i for i, kind in enumerate(kinds) if kind == "shards-dumped"]
    at = 1 + {"planned": kinds.index("planned"), "inference": dumped[0], "metrics": dumped[-1]}[where]
    paths = EvaluationPaths(work / earlier.root.name)
    for folder in paths.folders():
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(earlier.evaluation, paths.evaluation)
    paths.journal.write_bytes(b"".join(lines[:at]))
    for event in events[:at]:
        if isinstance(event, OutcomeSeen):
            name = earlier.outcome(event.outcome.kind, event.outcome.name).name
            shutil.copy(earlier.outcomes / name, paths.outcomes / name)
            for folder in getattr(
                event.outcome, "sets", {}
            ).values():  # kept as names alone; missing ones are built
                request_set_manifest(folder).parent.mkdir(parents=True, exist_ok=True)
                request_set_manifest(folder).touch()
    return events[at:]


@pytest.mark.parametrize("where", ["planned", "inference", "metrics"])
def test_an_earlier_versions_evaluation_ends_with_its_scores_by_its_own_jobs(
    where: str, earlier: EvaluationPaths, tmp_path: Path
) -> None:
    """Its jobs go on and leave what they left then. No job that was submitted is submitted again."""
    work = tmp_path / "work"
    later = cut(earlier, work, where)
    paths = EvaluationPaths(work / earlier.root.name)
    cluster = cluster_of(read_events(paths.journal))
    mine = {member.job.name for member in cluster.members}
    with serving(work, cluster) as coordinator:
        coordinator.resume_all()
        running = coordinator.running[paths.root.name]
        for _ in range(3):
            coordinator.tick()
        for file in earlier.responses.iterdir():
            shutil.copy(file, paths.responses / file.name)
        for file in earlier.scores.iterdir():
            shutil.copy(file, paths.scores / file.name)

        def over() -> bool:
            cluster.advance(1.0)
            for event in later:
                if isinstance(event, OutcomeSeen) and comes_now(running.state, event.outcome):
                    left = earlier.outcome(event.outcome.kind, event.outcome.name)
                    shutil.copy(left, paths.outcomes / left.name)
            for member in cluster.members:
                if running.state.all_terminal or member.job.purpose in ("build", "trial"):
                    member.state = "COMPLETED"
            return running.state.ended_at is not None

        until(coordinator, over)
    assert not mine & {job.name for job in cluster.submitted}
    assert (
        json.loads(paths.results.read_text())["results"] == json.loads(earlier.results.read_text())["results"]
    )


def comes_now(state: State, outcome: Outcome) -> bool:
    """May the job leave it now? A metric job must be asked for, a precursor released."""
    if outcome.kind in ("executed", "scored"):
        return outcome.name in state.scoring.outstanding
    return outcome.kind != "cleared" or state.jobs.by_name[outcome.name].released_at is not None


def cluster_of(events: Iterable[AnyEvent]) -> FakeCluster:
    """The cluster that these events describe: each submitted job that has not ended runs."""
    nodes = [fake_node(name) for name in ("n1", "n2")] + [fake_node("c1", gpus=0)]
    cluster = FakeCluster(fleet=nodes)
    jobs, over = {}, set()
    for event in events:
        if isinstance(event, JobIntended):
            jobs[event.job.name] = event.job
        elif isinstance(event, JobSubmitted):
            job = jobs[event.job]
            cluster.members += [
                FakeMember(
                    job=job, job_id=event.job_id, index=i, submitted_at=0.0, state="RUNNING", node=job.node
                )
                for i in range(job.count)
            ]
        elif isinstance(event, JobEnded):
            over.add((event.job, event.index))
    cluster.members = [m for m in cluster.members if (m.job.name, m.index) not in over]
    return cluster


# --- both ways: what records may become ---------------------------------------------------------------------------------

THEN: dict[str, dict[str, Shape]] = {
    commit: json.loads((VERSIONS / commit / "shapes.json").read_text()) for commit in COMMITS
}
TO_OLDER_JOBS = {
    "ExecuteSpec",
    "ScoreSpec",
    "JudgeJob",
    "JudgeOptions",
    "SuiteSpec",
    "TaskEntry",
    "ModelOptions",
}
"""Records that jobs of an older version read from a newer coordinator: metric workers get new jobs."""


@pytest.mark.parametrize(("commit", "what"), [(commit, what) for commit in COMMITS for what in THEN[commit]])
def test_records_only_grow_and_what_is_new_in_them_has_a_default(commit: str, what: str) -> None:
    """So a newer version reads an older one's, and an unknown field is a sign of a newer version."""
    now = shapes()[what]
    for name, fields in THEN[commit][what].items():
        for field, (needed, words) in fields.items():
            assert field in now[name], f"{name}.{field} is in files that an earlier version wrote"
            assert needed or not now[name][field][0], f"{name}.{field} is not in all of them"
            assert set(words) <= set(now[name][field][1]), f"{name}.{field} may have a word that is gone"
        needed_now = [f for f, (needed, _) in now[name].items() if needed and f not in fields]
        assert not needed_now, f"{name}: files of an earlier version lack {needed_now}"


@pytest.mark.parametrize("commit", COMMITS)
def test_jobs_of_an_older_version_can_read_what_they_are_given(commit: str) -> None:
    """A field that they lack is left out while it is not set; an address of Redis may get none that is always there."""
    for name in sorted(TO_OLDER_JOBS):
        assert shapes()["specs"][name].keys() - THEN[commit]["specs"][name].keys() <= YOUNGER, name
    address = redis_client.RedisAddress(host="h")
    assert (
        json.loads(address.model_dump_json(exclude_none=True)).keys()
        <= THEN[commit]["redis/address.json"][""].keys()
    )
