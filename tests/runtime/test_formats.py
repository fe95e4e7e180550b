"""Another journal format: an unfinished evaluation is refused and left alone, one that has ended stays readable."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_cluster import FakeCluster, fake_node
from support.goldens import HERE
from support.loops import coordinator_on, serving, until
from support.simulated.parts import record

from coordinator.cli.screen.standing import all_of
from coordinator.config.schema import Config
from coordinator.evaluation.events import EVENT
from coordinator.evaluation.records import JOURNAL_FORMAT, job_prefix
from coordinator.runtime.journal import JournalError, OtherFormatError, read_events
from coordinator.runtime.summary import read_summary
from evaljobs.contract.paths import EvaluationPaths

OURS, OTHER = "ckpt-ours-00000001", "ckpt-other-00000002"
FIELDS = "4c4c5ae5"


def test_other_fields_in_a_journal_are_another_format() -> None:
    """Who changes an event raises `JOURNAL_FORMAT`, and writes here what this test says."""
    schema = EVENT.json_schema()
    rows = {
        f"{name}.{field} {field in one.get('required', ())} {sorted(_words(shape))}"
        for name, one in schema["$defs"].items()
        for field, shape in one.get("properties", {}).items()
    }
    found = hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()[:8]
    assert (JOURNAL_FORMAT, found) == (3, FIELDS)


def _words(shape: object) -> Iterator[str]:
    """The words and records that a field's type names."""
    if isinstance(shape, dict):
        yield from (str(shape[key]) for key in ("const", "enum", "$ref", "type") if key in shape)
    for inner in shape.values() if isinstance(shape, dict) else shape if isinstance(shape, list) else ():
        yield from _words(inner)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(fleet=[fake_node("n1", gpus=0, memory_mb=64_000)])


@pytest.fixture(params=[0, JOURNAL_FORMAT + 1], ids=["earlier", "later"])
def work(tmp_path: Path, cluster: FakeCluster, request: pytest.FixtureRequest) -> Path:
    """A work folder with two evaluations that have jobs; the journal of one has another format."""
    folder = tmp_path / "work"
    with serving(folder, cluster) as before:
        for name in (OURS, OTHER):
            before.accept(record().model_copy(update={"evaluation_id": name}))
        until(before, lambda: all(jobs_of(cluster, name) for name in (OURS, OTHER)))
    journal = folder / OTHER / "journal.jsonl"
    first, *rest = journal.read_text().splitlines()
    accepted = json.loads(first) | {"journal_format": request.param}
    journal.write_text("\n".join([json.dumps(accepted), *rest, '{"kind": "a-kind-of-then"}\n']))
    return folder


def jobs_of(cluster: FakeCluster, evaluation_id: str) -> list[str]:
    return [
        j.name for j in cluster.jobs() if j.name.startswith(job_prefix(evaluation_id)) and j.phase != "ended"
    ]


def test_an_unfinished_evaluation_of_another_format_is_refused_and_left_alone(
    work: Path, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names it, its folder, how to end its jobs and what to type; the other evaluation goes on; no file of it
    changes and no job of it ends, however often it is looked at.
    """
    files = {p: p.read_bytes() for p in (work / OTHER).rglob("*") if p.is_file()}
    coordinator = coordinator_on(work, cluster, redis=True)
    with coordinator.in_charge():
        coordinator.resume_all()
        for _ in range(8):
            coordinator.parked[OTHER].until = 0.0
            coordinator.tick()
        assert list(coordinator.running) == [OURS]
        assert coordinator.lost(OTHER) is None
    coordinator.keeper.stop()
    assert {p: p.read_bytes() for p in (work / OTHER).rglob("*") if p.is_file()} == files
    assert jobs_of(cluster, OTHER)
    (said,) = [text for line in caplog.records if OTHER in (text := line.getMessage())]
    (summary,) = [s for s in all_of(Config(work_dir=work)) if s.evaluation_id == OTHER]
    assert summary.fault in said
    assert "\n" not in said
    for part in (
        str(work / OTHER),
        f"grep ' {job_prefix(OTHER)}'",
        "scancel",
        "`evalspan submit /c --suite suite`",
    ):
        assert part in said


@pytest.mark.parametrize("work", [0], indirect=True)
def test_a_command_to_it_ends_with_that_line(work: Path) -> None:
    for command in ("cancel", "retry", "report"):
        typed = [sys.executable, "-m", "coordinator", command, OTHER, "--work-dir", str(work)]
        said = subprocess.run(typed, capture_output=True, text=True, check=False, timeout=60)
        assert said.returncode == 2
        assert said.stderr.startswith(f"evalspan: {OTHER} was begun by ")
        assert "has not ended" in said.stderr


def test_its_line_that_ends_its_jobs_finds_them_alone(work: Path, tmp_path: Path) -> None:
    """What is typed, with a `squeue` that lists an array and a job of another evaluation."""
    with pytest.raises(OtherFormatError) as refused:
        list(read_events(work / OTHER / "journal.jsonl"))
    line = str(refused.value).split("`")[1]
    for name, does in {
        "squeue": f"echo '71 {job_prefix(OTHER)}trial-n1-a0'; echo '72 {job_prefix(OURS)}trial-n1-a0'",
        "scancel": 'echo "$@"',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    run = f"PATH={shlex.quote(str(tmp_path))}:$PATH; {line}"
    assert subprocess.run(["sh", "-c", run], capture_output=True, text=True, check=True).stdout == "71\n"


def test_a_line_of_this_format_that_cannot_be_read_is_damage(tmp_path: Path, cluster: FakeCluster) -> None:
    with serving(tmp_path / "work", cluster) as coordinator:
        journal = coordinator.accept(record()).journal.path
    with journal.open("a") as file:
        file.write('{"kind": "a-kind-of-later", "at": 3.0}\n')
    with pytest.raises(JournalError) as damaged:
        list(read_events(journal))
    assert not isinstance(damaged.value, OtherFormatError)


@pytest.fixture
def ended(tmp_path: Path) -> EvaluationPaths:
    """An evaluation of an earlier format that has ended, without a summary in `status.json`."""
    shutil.unpack_archive(HERE / "folders" / "older.tar.gz", tmp_path, filter="data")
    (paths,) = map(EvaluationPaths, (tmp_path / "work").glob("step-1000-*"))
    paths.status.unlink()
    return paths


def test_what_has_ended_in_another_format_is_over(ended: EvaluationPaths, cluster: FakeCluster) -> None:
    """A daemon passes it over, asked for again or not; tests/golden/views says what is shown of it."""
    found = read_summary(ended)
    assert found is not None
    assert (found.result, found.scored, found.entries) == ("done", 3, 3)
    coordinator = coordinator_on(ended.root.parent, cluster, redis=True)
    with coordinator.in_charge():
        coordinator.resume_all()
        coordinator.accept_or_wait(record().model_copy(update={"evaluation_id": ended.root.name}))
        assert not coordinator.running
        assert not coordinator.parked
    coordinator.keeper.stop()


def test_one_that_was_asked_for_again_has_not_ended(ended: EvaluationPaths) -> None:
    """Its results are those of before the retry."""
    with ended.journal.open("a") as file:
        file.write('{"kind":"retry-asked","at":9.0}\n')
    assert read_summary(ended) is None
    with pytest.raises(OtherFormatError, match="has not ended"):
        list(read_events(ended.journal))
