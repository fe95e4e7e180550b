"""Another version's evaluations: an older one's are taken up, a newer one's are left alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.loops import coordinator_on, serving, until
from support.simulated.parts import record

from coordinator.allocation import cordons
from coordinator.cli.screen.standing import facts_of
from coordinator.cluster.fake import FakeCluster, fake_node
from coordinator.config.schema import Config
from coordinator.evaluation.records import job_prefix
from coordinator.intake import pending
from coordinator.runtime.journal import JournalError, NewerJournalError, read_events
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.operator_commands import Command, leave_command, obey_commands
from coordinator.runtime.status_file import Ended, read_status
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.queue import redis_client

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
    """A work folder with an evaluation of this version and one that a newer one has taken up; both have jobs."""
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
    with pytest.raises(NewerJournalError):
        list(read_events(later.performer.site.paths.evaluation(NEWER).journal))


def test_a_line_that_its_own_version_cannot_read_is_damaged(tmp_path: Path, cluster: FakeCluster) -> None:
    """A journal without damage is never given up, one with damage always: versions tell them apart."""
    with serving(tmp_path / "work", cluster) as coordinator:
        journal = coordinator.accept(record()).journal.path
    whole = journal.read_bytes()
    for line in ({"kind": "a-kind-of-later", "at": 3.0}, {"kind": "restarted", "code": NEXT}):
        journal.write_bytes(whole + json.dumps(line).encode() + b"\n")
        with pytest.raises(JournalError) as damaged:
            list(read_events(journal))
        assert not isinstance(damaged.value, NewerJournalError)


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
