"""How checkpoints are announced: at least once, whatever dies, and what is no notice stops nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.daemons import SUITE, daemon, small, taken
from support.fake_cluster import FakeCluster
from support.loops import coordinator_on
from support.served import served_work

from coordinator import hook
from coordinator.config.schema import Config, WatchConfig
from coordinator.intake import folder_watch, pending, sources
from coordinator.intake.checkpoint import step_of
from coordinator.intake.folder_watch import FolderWatch
from coordinator.intake.sources import Notice, count_in_stream, from_spool, from_stream, spool
from coordinator.runtime.service import Service
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client


@pytest.fixture
def work(tmp_path: Path) -> WorkPaths:
    return WorkPaths(tmp_path / "work")


def names(deliveries: object) -> list[str]:
    return [d.notice.checkpoint for d in deliveries]  # type: ignore[attr-defined]


def test_a_spooled_notice_comes_until_it_is_acknowledged(work: WorkPaths) -> None:
    """Under the same key each time, oldest first; acknowledging twice is fine."""
    for name in ("/a", "/b"):
        spool(work, Notice(checkpoint=name))
    first = list(from_spool(work))
    assert names(first) == ["/a", "/b"]
    assert [d.key for d in from_spool(work)] == [d.key for d in first]
    first[0].acknowledge()
    first[0].acknowledge()
    assert names(from_spool(work)) == ["/b"]


BAD = {
    "half of a notice": ("{", "all of it"),
    "a step that is none": ('{"checkpoint": "/c", "step": "soon"}', "step: "),
    "a field of another version": ('{"checkpoint": "/c", "colour": 1}', "colour: "),
    "nested without end": ("[" * 10_000, "all of it"),
    "half a character": ('{"checkpoint": "\\ud800", "suite": "a\\nb"}', "all of it"),
    "too long": (f'{{"checkpoint": "{"c" * 70_000}"}}', "longer than"),
}


def test_a_bad_notice_is_refused_by_name_and_hides_no_other(work: WorkPaths) -> None:
    """With what is wrong, in a line that any file takes; it stays on disk under another name; temporaries are not looked at."""
    work.spool.mkdir(parents=True)
    for number, (text, _) in enumerate(BAD.values()):
        (work.spool / f"{number}.json").write_text(text)
    (work.spool / "9.json.tmp").write_text('{"check')
    spool(work, Notice(checkpoint="/good"))
    found = list(from_spool(work))
    assert [d.notice.checkpoint for d in found if not d.wrong] == ["/good"]
    bad = [d for d in found if d.wrong]
    for delivery, (_, why) in zip(bad, BAD.values(), strict=True):
        assert why in delivery.wrong
        delivery.notice.model_dump_json()
        assert f"{delivery.notice.checkpoint}{delivery.notice.suite}{delivery.wrong}".isprintable()
        delivery.acknowledge()
    assert [d.notice.checkpoint for d in bad[1:3]] == ["/c", "/c"], "what it claims to be of"
    assert names(from_spool(work)) == ["/good"]
    assert len(list(work.spool.glob("*.bad"))) == len(BAD)
    assert (work.spool / "9.json.tmp").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_plain_file_stops_no_look(work: WorkPaths, kind: str) -> None:
    """Among the notices, the submissions and the commands: a pipe without a writer is not waited for."""
    for folder in (work.spool, work.submissions, work.spool / "commands"):
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / "0.json"
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "folder":
            place.mkdir()
        else:
            place.symlink_to("/dev/zero")
    service = Service(coordinator_on(work.root, FakeCluster(fleet=[])), Config())
    spool(work, Notice(checkpoint=str(work.root / "nowhere")))
    with ThreadPoolExecutor(1) as thread:
        looked = thread.submit(service.tick)
        try:
            looked.result(timeout=60)
        except TimeoutError:
            for folder in (work.spool, work.submissions, work.spool / "commands"):
                with contextlib.suppress(OSError):  # lets the thread go on
                    os.close(os.open(folder / "0.json", os.O_WRONLY | os.O_NONBLOCK))
            raise
    refused = {Path(r.checkpoint).name for r in pending.read(work.pending).refused}
    assert refused == {"0.json", "nowhere"}


def test_a_notice_that_cannot_be_read_now_is_read_later(
    work: WorkPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage that errs for a moment costs no checkpoint."""
    spool(work, Notice(checkpoint="/a"))

    def away(*_: object) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(sources, "read_with_status", away)
        assert names(from_spool(work)) == []
    assert names(from_spool(work)) == ["/a"]


@pytest.fixture(scope="module")
def served() -> Iterator[WorkPaths]:
    with served_work("triggers") as made:
        yield made


def test_a_stream_notice_survives_the_daemon_that_took_it(served: WorkPaths) -> None:
    """Taken and not acknowledged, it comes again, under the same key; garbage between comes too, with what is wrong."""
    with redis_client.connect(served.redis_address) as client:
        client.xadd(hook.STREAM, {"notice": Notice(checkpoint="/a").model_dump_json()})
        client.xadd(hook.STREAM, {"notice": b"\xff garbage"})
        client.xadd(hook.STREAM, {"other": "field"})
        client.xadd(hook.STREAM, {"notice": Notice(checkpoint="/b").model_dump_json()})
        assert count_in_stream(served) > 0
        taken = list(from_stream(served))
        assert [d.notice.checkpoint for d in taken if not d.wrong] == ["/a", "/b"]
        assert len(taken) == 4
        again = list(from_stream(served))
        assert [d.key for d in again] == [d.key for d in taken]
        for delivery in again:
            delivery.acknowledge()
        assert names(from_stream(served)) == []
        assert count_in_stream(served) == 0
        assert client.xlen(hook.STREAM) == 0


def test_a_hundred_unacknowledged_notices_hide_no_later_one(served: WorkPaths) -> None:
    """A checkpoint that is never whole and announced over and over does not stop the others."""
    with redis_client.connect(served.redis_address) as client:
        for _ in range(150):
            client.xadd(hook.STREAM, {"notice": Notice(checkpoint="/stuck").model_dump_json()})
        for _ in range(2):
            list(from_stream(served))
        client.xadd(hook.STREAM, {"notice": Notice(checkpoint="/next").model_dump_json()})
        assert "/next" in names(from_stream(served))
        client.delete(hook.STREAM)


def test_without_redis_the_stream_is_silent(work: WorkPaths) -> None:
    assert list(from_stream(work)) == []


def checkpoint(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text("{}")
    return folder / name


@pytest.mark.parametrize("glob", ["", "/*"])
def test_a_watched_folder_tells_each_checkpoint_until_it_is_acknowledged(tmp_path: Path, glob: str) -> None:
    """Named as the folder that checkpoints appear in or as a glob of them; what was told is remembered."""
    run = tmp_path / "run"
    memory = tmp_path / "watched.json"
    watch = FolderWatch(memory, [(f"{run}{glob}", "core")])
    assert list(watch.look()) == [], "a folder that is not there yet"
    (run / "unfinished-300").mkdir(parents=True)
    for name in ("step-100", "step-200"):
        checkpoint(run, name)
    found = list(watch.look())
    assert [(Path(d.notice.checkpoint).name, d.notice.step) for d in found] == [
        ("step-100", 100),
        ("step-200", 200),
    ]
    found[0].acknowledge()
    assert [Path(c).name for c in names(watch.look())] == ["step-200"]
    assert [Path(c).name for c in names(FolderWatch(memory, watch.folders).look())] == ["step-200"]


@pytest.mark.parametrize("glob", ["", "/*"])
def test_a_folder_that_is_still_copied_or_written_under_another_name_is_no_checkpoint(
    tmp_path: Path, glob: str
) -> None:
    """Hidden, or temporary by its name: the copy is renamed once it is whole."""
    run = tmp_path / "run"
    for name in (".tmp-x", ".hidden", "tmp-checkpoint-5", "step-3.partial", "step-4.tmp", "step-9"):
        (run / name).mkdir(parents=True)
        (run / name / "config.json").write_text("{}")
    found = FolderWatch(tmp_path / "m", [(f"{run}{glob}", "core")]).look()
    assert [Path(d.notice.checkpoint).name for d in found] == ["step-9"]


def test_a_watched_checkpoint_that_is_written_over_is_told_again(tmp_path: Path) -> None:
    """In place or as a folder of the same name, seen by the next daemon too; our own pin, or nothing new, is no news."""
    place = checkpoint(tmp_path / "run", "step-100")
    memory = tmp_path / "watched.json"
    watched = [(str(tmp_path / "run"), "core")]

    def told() -> list[str]:
        found = list(FolderWatch(memory, watched).look())
        for delivery in found:
            delivery.acknowledge()
        return names(found)

    assert told() == [str(place)]
    (place / f"{hook.PIN_PREFIX}x").touch()
    assert told() == []
    (place / "config.json").write_text('{"other": 1}')
    assert told() == [str(place)]
    shutil.rmtree(place)
    assert told() == []
    checkpoint(tmp_path / "run", "step-100")
    assert told() == [str(place)]
    assert told() == []


def test_what_changes_while_it_is_dealt_with_is_told_once_more(tmp_path: Path) -> None:
    """What is remembered is what lay there when it was told."""
    place = checkpoint(tmp_path / "run", "step-1")
    watch = FolderWatch(tmp_path / "m", [(str(tmp_path / "run"), "core")])
    (delivery,) = watch.look()
    (place / "model.safetensors").write_text("w")
    delivery.acknowledge()
    assert names(watch.look()) == [str(place)]


def test_many_reported_checkpoints_are_looked_into_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few at each look, and each in its turn: the last of them is found, too."""
    places = [checkpoint(tmp_path / "run", f"step-{i}") for i in range(25)]
    watch = FolderWatch(tmp_path / "m", [(str(tmp_path / "run"), "core")])
    for delivery in watch.look():
        delivery.acknowledge()
    looked_into: list[Path] = []
    held = folder_watch._held
    monkeypatch.setattr(folder_watch, "_held", lambda folder: looked_into.append(folder) or held(folder))
    (places[7] / "config.json").write_text("[0]")  # another size: on some kernels the time is that of a tick
    found = [place for _ in range(3) for place in names(watch.look())]
    assert found == [str(places[7])]
    assert sorted(looked_into) == sorted(places)


def test_checkpoints_that_a_training_has_removed_are_forgotten(tmp_path: Path) -> None:
    """In memory and on disk; not those below an empty folder, which may be a mount point whose storage is away."""
    run, away = tmp_path / "run", tmp_path / "away"
    gone = [checkpoint(run, f"step-{i}") for i in range(15)]
    checkpoint(away, "step-1")
    memory = tmp_path / "watched.json"
    watch = FolderWatch(memory, [(str(run), "core"), (str(away), "core")])
    for delivery in watch.look():
        delivery.acknowledge()
    checkpoint(run, "step-99")
    for place in (*gone, away / "step-1"):
        shutil.rmtree(place)
    for _ in range(3):
        assert names(watch.look()) == [str(run / "step-99")]
    assert [Path(key).name for key in watch._seen] == ["step-1"]
    watch._write_at = 0.0
    list(watch.look())
    assert list(json.loads(memory.read_text())) == [f"core\0{away / 'step-1'}"]


def test_a_watched_place_that_cannot_be_looked_into_hides_no_other(tmp_path: Path) -> None:
    """Here: a name that no file system takes; it may be storage that is away, or a folder that goes meanwhile."""
    place = checkpoint(tmp_path / "run", "step-1")
    nowhere = tmp_path / ("x" * 300)
    with pytest.raises(OSError, match="name too long"):
        nowhere.is_dir()
    watched = [(str(nowhere), "core"), (f"{nowhere}/*/y", "core"), (str(tmp_path / "run"), "core")]
    assert names(FolderWatch(tmp_path / "m", watched).look()) == [str(place)]


def test_a_watched_folder_may_be_a_checkpoint_itself(tmp_path: Path) -> None:
    place = checkpoint(tmp_path, "final")
    assert names(FolderWatch(tmp_path / "m", [(str(place), "core")]).look()) == [str(place)]


STEPS = {
    "step-100": 100, "7b-step-20-hf": 20, "global_step0003": 3, "iter_0000300": 300, "checkpoint-300": 300,
    "step_300": 300, "step=300": 300, "300": 300, "300-hf": 300, "ep0-ba4800": 4800, "step1000-tokens4B": 1000,
    "pythia-70m-step3000": 3000, "final": None, "SmolLM2-135M-Instruct": None, "Llama-3.2-1B": None, "Qwen2.5": None,
    "gpt2": None, "phi-2": None, "Qwen3-8": None, "2024-01-05": None, "lr3e-4": None, "step_1e3": None, "mamba-2": None,
    "step-3,000": None, "step-20k": None, "epoch=1-step=500": 500, "epoch-3": 3, "ckpt_7": 7, "iteration300": 300,
    "lr3e-4-step-10": 10,
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_the_step_is_the_number_that_the_name_gives_it_not_the_models_size(name: str) -> None:
    assert step_of(name) == STEPS[name]


@pytest.mark.usefixtures("every_tick")
def test_a_stream_notice_stays_until_its_checkpoint_is_taken(served: WorkPaths, tmp_path: Path) -> None:
    """A daemon that dies while it waits for a half-written checkpoint leaves the notice to the next one."""
    late = small(tmp_path / "late")
    whole = (late / "config.json").read_text()
    (late / "config.json").write_text(whole[:-2])
    notice = Notice(checkpoint=str(late), suite=SUITE)
    with redis_client.connect(served.redis_address) as client:
        client.xadd(hook.STREAM, {"notice": notice.model_dump_json()})
    roots = Config(watch=WatchConfig(roots=(tmp_path,)))
    daemon(served.root, roots).tick()
    (late / "config.json").write_text(whole)
    after = daemon(served.root, roots)
    after.tick()
    after.tick()
    assert (taken(after), count_in_stream(served)) == (["late"], 0)
