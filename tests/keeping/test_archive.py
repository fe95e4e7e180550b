"""Archive, `prune` and retention of evaluations that have ended: nothing lost that stays, nothing doubled, and few files."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import typed
from support.ended import leave_ended
from support.steps import killed_at
from support.toys import config_text
from support.trainings import leave
from support.with_root import fill, small_disk

from coordinator.operations.keeping.archive import FOLDERS, MOST_FILES, archive_ended, count_files
from coordinator.operations.keeping.housekeeping import (
    RETENTION_SECONDS,
    HousekeepingJob,
    keep_house,
    prune_due,
)
from coordinator.operations.keeping.prune import prune_folder, prune_now, read_work_folder
from coordinator.operations.keeping.retention import (
    REMOVED_PARTS,
    OnDisk,
    SharedFile,
    Size,
    WorkFolder,
    removable_parts,
)
from coordinator.results.report.load_series import read_document
from coordinator.runtime.finalize import shard_spans
from coordinator.runtime.journal import Journal, read_events
from coordinator.site.config.schema import RetentionConfig
from evaljobs.contract import archived_files
from evaljobs.contract.columns import pack_columns, unpack_columns
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.storage import read_frame

SCORES = RetentionConfig(keep="scores", older_than="0h")


def contents(paths):
    """Every file of the folders, read as commands read it."""
    return {
        f"{name}/{file.name}": archived_files.read_bytes(file)
        for name in FOLDERS
        for file in archived_files.files_in(paths.root / name)
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return leave_ended(tmp_path_factory.mktemp("work"), 1, 2, 2)[1]


@pytest.fixture
def paths(made, work):
    """A small evaluation that has ended, to be changed by the test."""
    shutil.copytree(made.root, work.root / made.root.name)
    return work.evaluation(made.root.name)


# --- the archive -----------------------------------------------------------------------------------------------------


def test_an_evaluation_of_64_nodes_and_60_tasks_is_left_in_8_files(tmp_path):
    """All reads as before, responses in place; what has at most 60 files keeps its folders."""
    state, paths = leave_ended(tmp_path, 64, 8, 60)
    before, spans, there = contents(paths), shard_spans(state, paths), count_files(paths)
    assert there > 1900
    assert not archive_ended(paths, most=there)
    assert archive_ended(paths)
    assert count_files(paths) <= 8
    assert contents(paths) == before
    assert shard_spans(state, paths) == spans
    for shard in state.shards.by_name.values():
        assert read_frame(paths.responses, shard.frame).shard in state.shards.by_name
    held = archived_files.archive_members(archived_files.archive_of(paths.root)).values()
    stored = {i.filename.startswith("responses/") for i in held if i.compress_type == zipfile.ZIP_STORED}
    assert stored == {True}


@pytest.mark.parametrize("most", [0, 60])
def test_the_documents_of_an_ended_evaluation_are_merged_whether_it_is_archived_or_not(paths, most):
    """Law: after the end one file holds the documents of all entries, beside the archive."""
    one = {"doc_id": np.arange(3), "doc_hash": np.arange(3), "acc,none": np.ones(3)}
    for entry in range(2):
        paths.columns(entry).write_bytes(pack_columns({(entry, f"t{entry}"): one}))
    assert archive_ended(paths, most=most) == (most == 0)
    assert not archived_files.files_in(paths.scores, "*.parquet")
    assert [*unpack_columns(paths.documents.read_bytes(), "").tasks] == ["t0", "t1"]


@pytest.mark.parametrize(
    ("begins", "keep"), [("retried", "all"), ("archived", "responses"), ("archived", "scores")]
)
def test_what_is_killed_at_any_step_loses_nothing_that_stays_and_is_done_again(
    paths, work, tmp_path, begins, keep
):
    """Archiving and pruning, before each step on the file system; after a retry, loose files beside the archive count."""
    for name in ("specs", "outcomes", "verdicts"):
        shutil.rmtree(paths.root / name)
    archive_ended(paths, most=0)
    if begins == "retried":
        for name in ("scores/000-t0.json", "logs/new.log", "responses/new.frames"):
            (paths.root / name).parent.mkdir()
            (paths.root / name).write_bytes(b"again")
        assert contents(paths)["scores/000-t0.json"] == b"again"
    goes = () if keep == "all" else REMOVED_PARTS[keep]
    policy = SCORES.model_copy(update={"keep": keep})

    def act():
        if keep == "all":
            archive_ended(paths, most=0)
        else:
            prune_now(work, policy, time.time(), code=None)

    def stays():
        assert list(read_events(paths.journal))
        return {name: text for name, text in contents(paths).items() if name.partition("/")[0] not in goes}

    before, whole = stays(), tmp_path / "whole"
    shutil.copytree(paths.root, whole)
    for step in itertools.count(1):
        shutil.rmtree(paths.root)
        shutil.copytree(whole, paths.root)
        if not killed_at(step, act):
            break
        assert stays() == before, step
        act()
        assert contents(paths) == before, step
        assert not list(paths.root.glob(".*"))
        assert not any((paths.root / name).exists() for name in goes)
    assert step > 20


def test_a_reader_of_an_archive_that_is_replaced_meanwhile_has_the_files_bytes(paths, monkeypatch):
    """It has opened the old archive and lists the new one, in which members lie elsewhere."""
    assert archive_ended(paths, most=0)
    expected = contents(paths)
    file = next(f for f in expected if f.startswith("responses/"))
    listed, replaced = archived_files._read_members, []

    def late(archive, *stamp):
        if not replaced:
            replaced.append(archive)
            with zipfile.ZipFile(archive) as old:
                members = [(info, old.read(info)) for info in old.infolist()]
            with zipfile.ZipFile(f"{archive}.new", "w") as new:
                for info, data in members[::-1]:
                    new.writestr(info, data)
            Path(f"{archive}.new").replace(archive)
        return listed(archive, *stamp)

    late.cache_clear = listed.cache_clear
    monkeypatch.setattr(archived_files, "_read_members", late)
    listed.cache_clear()
    assert archived_files.read_bytes(paths.root / file) == expected[file]
    assert replaced


def test_what_is_open_is_not_archived_and_what_is_no_regular_file_stays(paths, tmp_path):
    """One that a coordinator has resumed, or that is not known to have ended. A job may leave a link, a pipe, or a name that is
    no text: none is followed, and none holds up the rest."""
    journal = Journal(paths.journal)
    with pytest.raises(BlockingIOError):
        archive_ended(paths, most=0)
    journal.close()
    status = paths.status.read_bytes()
    paths.status.unlink()
    assert not archive_ended(paths, most=0)
    assert not [*paths.root.glob("*.zip")]
    paths.status.write_bytes(status)
    odd = Path(os.fsdecode(bytes(paths.logs) + b"/\xff.log"))
    odd.write_bytes(b"")
    (paths.logs / "link.log").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(paths.logs / "pipe.log")
    assert archive_ended(paths, most=0)
    assert {f.name for f in paths.logs.iterdir()} == {"link.log", "pipe.log", odd.name}
    assert "logs/link.log" not in archived_files.archive_members(archived_files.archive_of(paths.root))


def test_a_full_disk_costs_no_file(made, tmp_path):
    """Archiving fails, and all files are there; with room it is done."""
    with small_disk(tmp_path, "4m") as disk:
        paths = EvaluationPaths(disk / made.root.name)
        shutil.copytree(made.root, paths.root)
        before = contents(paths)
        filler = fill(disk)
        with pytest.raises(OSError, match="No space left"):
            archive_ended(paths, most=0)
        assert contents(paths) == before
        assert not [*paths.root.glob(".*")]
        filler.unlink()
        assert archive_ended(paths, most=0)
        assert contents(paths) == before


@pytest.mark.parametrize("at", [0.3, -10])
def test_a_damaged_archive_is_an_error_and_costs_no_loose_file(paths, at):
    """Damaged in its members, or in the list of them."""
    shutil.rmtree(paths.responses)  # their frames have checksums of their own
    archive_ended(paths, most=0)
    archive = archived_files.archive_of(paths.root)
    data = bytearray(archive.read_bytes())
    place = int(at * len(data)) if at > 0 else len(data) + int(at)
    data[place : place + 8] = bytes(b ^ 0xFF for b in data[place : place + 8])
    archive.write_bytes(data)
    paths.samples.mkdir()
    (paths.samples / "new.jsonl").write_text("new")
    with pytest.raises(OSError, match=r"damaged.*files\.zip"):
        contents(paths)
    with pytest.raises(OSError, match="damaged"):
        archive_ended(paths, most=0)
    assert (paths.samples / "new.jsonl").read_text() == "new"
    assert archive.read_bytes() == data


def test_a_daemon_archives_what_was_left_and_prunes_by_retention_before_it_is_idle(tmp_path):
    left = leave_ended(tmp_path / "work", 2, 8, 8)[1]
    settings = tmp_path / "evalspan.toml"
    retention = '[retention]\nkeep = "responses"\nolder_than = "1h"\n'
    settings.write_text(f'work_dir = "work"\n{config_text()}{retention}[watch]\nroots = ["{tmp_path}"]\n')
    assert count_files(left) > MOST_FILES
    argv = [sys.executable, "-m", "coordinator", "daemon", "--until-idle", "--config", str(settings)]
    subprocess.run(argv, capture_output=True, timeout=300, check=True)
    assert count_files(left) <= 8, (tmp_path / "work" / "cache" / "housekeeping.log").read_text()
    there = {name.partition("/")[0] for name in contents(left)}
    assert {"responses", "samples", "scores", "verdicts"} <= there
    assert "logs" not in there


# --- prune -----------------------------------------------------------------------------------------------------------


def test_retention_prunes_at_most_once_a_day_whatever_starts_it(paths, work):
    """A daemon that starts anew each minute included."""
    now = time.time()
    assert prune_due(work, now)
    keep_house(HousekeepingJob(work_dir=str(work.root), horizon=100, ended=(), retention=SCORES), now)
    assert not paths.specs.exists()
    assert not prune_due(work, now + RETENTION_SECONDS / 2)
    assert prune_due(work, now + RETENTION_SECONDS + 60)


def test_what_is_used_again_since_the_plan_stays(paths, work):
    """Between plan and removal a retry may have begun: its journal is open, or it has not ended. A request set may be used."""
    files, now = count_files(paths), time.time()
    for name in ("old-1", "old-2"):
        (work.request_sets / name).mkdir(parents=True)
        (work.request_sets / name / "entry.json").write_text("{}")
        os.utime(work.request_sets / name, (1, 1))
    made = removable_parts(read_work_folder(work), SCORES, now, code=None)
    assert made.evaluations
    os.utime(work.request_sets / "old-1")
    journal = Journal(paths.journal)
    left = {Path(name).name: why for name, why in prune_folder(work, made, SCORES, now)}
    known = {"old-1": "it is in use again", "old-2": ""}
    assert left == {paths.root.name: "it is in use", **known}
    assert [f.name for f in work.request_sets.iterdir()] == ["old-1"]
    journal.close()
    status = json.loads(paths.status.read_text())
    resumed = json.dumps({**status, "ended_at": status["ended_at"] + 1}), ""  # and ended anew; and is open
    for text in resumed:
        paths.status.write_text(text)
        assert "a coordinator has resumed it" in [why for _, why in prune_folder(work, made, SCORES, now)]
        assert count_files(paths) == files


def test_prune_changes_nothing_without_yes_and_keeps_baselines(paths, work, tmp_path):
    """Records, results, scores and a point of the series stay. `status --disk` counts every file once, by kind and by
    evaluation, and says what `prune` would free.
    """
    leave(work.root, 30, None)
    work.inbox.mkdir()
    (work.inbox / "1.json").write_text("no notice")
    files, there = count_files(paths), ["--work-dir", str(work.root)]
    every = sum(len(names) for _, _, names in os.walk(work.root))

    def said(*words):
        return typed(*words, *there).output

    shown = json.loads(said("status", "--disk", "--json"))
    assert shown["files"] == sum(kind["files"] for kind in shown["kinds"].values()) == every
    row = {"evaluation_id": paths.root.name, "files": files}
    assert shown["evaluations"][0].items() >= row.items()
    assert [e["evaluation_id"] for e in shown["prune"]["evaluations"]] == [paths.root.name]
    for text in ("evaluations: samples", "would free"):
        assert text in said("status", "--disk")
    prune = ["prune", "--keep", "scores", "--older-than", "0d"]
    for text in (paths.root.name, "samples", "nothing was changed: add --yes"):
        assert text in said(*prune)
    settings = tmp_path / "evalspan.toml"
    settings.write_text(f'[retention]\nbaselines = ["{paths.root.name[:4]}*"]\n')
    assert "nothing to remove" in said(*prune, "--config", str(settings), "--yes")
    assert count_files(paths) == files
    assert "removed: " in said(*prune, "--yes")
    assert not paths.samples.exists()
    assert list(read_events(paths.journal))
    assert json.loads(paths.results.read_bytes())["results"]
    assert len(archived_files.files_in(paths.scores)) == 2
    paths.report.unlink()  # this one is no report
    assert read_document(paths).scores


# --- what may go, by age and by what needs it --------------------------------------------------------------------------


NOW = 100 * 3600.0
TIMES = st.floats(0, NOW / 2), st.floats(NOW / 2, NOW)
NAMES = [f"step-{i}" for i in range(4)]
SETS = [f"set-{i}" for i in range(4)]
CONVERTED, CODE = ["d1-a", "d2-b", "d3-c"], ["code-1", "code-2", "code-3"]
SHARED = {
    "request sets": SETS,
    "converted checkpoints": CONVERTED,
    "code for jobs": CODE,
    "cache": ["index.json"],
}
POLICIES = st.builds(
    RetentionConfig,
    keep=st.sampled_from(sorted(REMOVED_PARTS)),
    older_than=st.integers(0, 100).map("{}h".format),
    baselines=st.sampled_from([(), ("none", "step-2"), ("step-[01]",)]),
)
SIZES = st.builds(Size, files=st.integers(0, 200), bytes=st.integers(0, 10**9))
EVALUATIONS = st.builds(
    OnDisk,
    evaluation_id=st.sampled_from(NAMES),
    accepted_at=TIMES[0],
    ended_at=st.none() | TIMES[1],
    parts=st.dictionaries(st.sampled_from(["", "scores", *REMOVED_PARTS["scores"]]), SIZES),
    sets=st.frozensets(st.sampled_from(SETS)),
    reuses=st.sampled_from([*map(frozenset, ((), NAMES[:2], NAMES[2:]))]),
    checkpoint=st.sampled_from(["", "d1", "d2"]),
)
ITEMS = st.tuples(
    *(
        st.builds(
            SharedFile, kind=st.just(kind), path=st.just(f"/w/{name}"), size=SIZES, used_at=st.floats(0, NOW)
        )
        for kind, names in SHARED.items()
        for name in names
    )
)
WORK_FOLDERS = st.builds(
    WorkFolder, st.lists(EVALUATIONS, unique_by=lambda e: e.evaluation_id).map(tuple), ITEMS
)


@given(WORK_FOLDERS, POLICIES, st.sampled_from([None, "code-2", "code-9"]))
def test_nothing_goes_that_is_young_or_needed_or_a_record(folder, policy, code):
    """Of evaluations: nothing of an open one, of one that is used again, of a baseline; no score and no record.

    Of what they share: no set while an evaluation has responses to it, no code that a job may run, no converted
    checkpoint of an open one.
    """
    gone = removable_parts(folder, policy, NOW, code=code)
    reused = {name for e in folder.evaluations if e.ended_at is None for name in e.reuses}
    by_id = {e.evaluation_id: e for e in folder.evaluations}
    for each in gone.evaluations:
        assert NOW - each.ended_at >= policy.older_than_seconds
        assert each.evaluation_id not in reused
        assert not any(fnmatchcase(each.evaluation_id, glob) for glob in policy.baselines)
        assert each.parts.items() <= by_id[each.evaluation_id].parts.items()
        assert each.parts.keys() <= set(REMOVED_PARTS[str(policy.keep)]) - {"", "scores"}
        if policy.keep == "responses":
            assert not each.parts.keys() & {"responses", "samples", "verdicts", "judgements"}
    assert all(NOW - item.used_at >= policy.older_than_seconds for item in gone.shared)
    names = {item.name for item in gone.shared}
    lose = {each.evaluation_id for each in gone.evaluations if "responses" in each.parts}
    for each in folder.evaluations:
        if each.ended_at is None:
            assert not any(name.startswith(each.checkpoint) for name in names & set(CONVERTED))
        if each.ended_at is None or ("responses" in each.parts and each.evaluation_id not in lose):
            assert not names & each.sets
    came = {item.name: item.used_at for item in folder.shared}
    for name in names & set(CODE):
        assert came[name] < came[str(code)]
        assert all(e.accepted_at >= came[str(code)] for e in folder.evaluations if e.ended_at is None)
    assert "index.json" not in names
