"""Laws of a flood of notices: it fills no memory of the daemon's, and each other notice is heard in its turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_cluster import FakeCluster
from support.loops import coordinator_on
from support.served import served_work

from coordinator import hook
from coordinator.base import clock
from coordinator.base.turns import MOST_BAD, Turns
from coordinator.config.schema import Config, WatchConfig
from coordinator.intake import pending, sources
from coordinator.intake.sources import MOST_ENTRIES, MOST_NOTICE_BYTES, Notice, StreamPlace, from_stream
from coordinator.runtime import service as services
from coordinator.runtime.operator_commands import Command, obey_commands
from coordinator.runtime.service import Service
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client

STUCK = 90


@pytest.fixture
def served() -> Iterator[WorkPaths]:
    with served_work("floods") as made:
        yield made


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is the time of another look."""
    times = itertools.count(1_800_000_000.0, services.LOOK_SECONDS)
    monkeypatch.setattr(clock, "now", lambda: next(times))


def service_on(work: WorkPaths, roots: Path) -> tuple[Service, set[str]]:
    """A daemon's intake, and the names of the checkpoints that it has examined; one lies in a watched folder."""
    watched = roots.parent / "watched"
    (watched / "watched").mkdir(parents=True)
    (watched / "watched" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    watch = WatchConfig(roots=(roots,), folders=(watched,), suite="quickstart")
    made = Service(coordinator_on(work.root, FakeCluster(fleet=[])), Config(watch=watch))
    seen: set[str] = set()
    examine = made._examine

    def noting(each: pending.PendingCheckpoint, now: float) -> bool:
        seen.add(Path(each.notice.checkpoint).name)
        return examine(each, now)

    made._examine = noting  # type: ignore[method-assign]
    return made, seen


def notice(roots: Path, name: object) -> Notice:
    """Of a checkpoint that is not whole: it stays pending for an hour."""
    (roots / str(name)).mkdir(parents=True, exist_ok=True)
    return Notice(checkpoint=str(roots / str(name)), suite="quickstart")


@pytest.mark.usefixtures("looks")
def test_stuck_notices_beyond_the_bound_hide_none_and_fill_neither_memory_nor_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the spool folder: all are examined within a few looks, most are kept on disk alone, none is lost."""
    monkeypatch.setattr(services, "MOST_PENDING", 30)
    monkeypatch.setattr(services, "MOST_LOOKS", 10)
    monkeypatch.setattr(pending, "MOST_WAITING", 20)
    work, roots = WorkPaths(tmp_path / "work"), tmp_path / "runs"
    work.spool.mkdir(parents=True)
    for number in range(STUCK):
        (work.spool / f"{number}-1.json").write_text(notice(roots, number).model_dump_json())
    service, seen = service_on(work, roots)
    service._spool = Turns(work.spool, most=40)
    for _ in range(3):
        service.tick()
        assert len(service._pending) <= services.MOST_PENDING
    (work.spool / "9999-1.json").write_text(notice(roots, "good").model_dump_json())
    for _ in range(3):
        service.tick()
    assert seen == {*map(str, range(STUCK)), "good", "watched"}
    own = [each for each in service._pending.values() if each.own]
    assert len(own) == 1, "what others announce displaces nothing that the settings name"
    assert len(list(work.spool.iterdir())) == STUCK + 1
    assert len(pending.read(work.pending).waiting) == pending.MOST_WAITING


@pytest.mark.usefixtures("looks")
def test_refusable_notices_are_refused_many_at_a_look(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flood is written off in a few lines of the log, and keeps a bounded number of files; the next notice is heard."""
    work, roots = WorkPaths(tmp_path / "work"), tmp_path / "runs"
    work.spool.mkdir(parents=True)
    for number in range(450):
        text = (
            '{"no": "notice"}' if number % 2 else Notice(checkpoint=f"/elsewhere/{number}").model_dump_json()
        )
        (work.spool / f"{number}-1.json").write_text(text)
    (work.spool / "9999-1.json").write_text(notice(roots, "good").model_dump_json())
    service, seen = service_on(work, roots)
    for _ in range(3):
        service.tick()
    assert "good" in seen
    names = [file.suffix for file in work.spool.iterdir()]
    assert (names.count(".json"), names.count(".bad")) == (1, MOST_BAD)
    assert len([line for line in caplog.messages if "is not evaluated" in line]) <= 3 * services.MOST_LINES


def test_notices_that_an_earlier_daemon_took_are_all_read_in_turns(served: WorkPaths) -> None:
    """More unacknowledged ones than one look reads hide neither each other nor new ones."""
    with redis_client.connect(served.redis_address) as client:
        for number in range(2 * MOST_ENTRIES + 50):
            client.xadd(hook.STREAM, {"notice": Notice(checkpoint=f"/{number}").model_dump_json()})
        earlier = StreamPlace()
        for _ in range(3):
            list(from_stream(served, earlier))
        client.xadd(hook.STREAM, {"notice": Notice(checkpoint="/next").model_dump_json()})
        place = StreamPlace()
        read = [[d.notice.checkpoint for d in from_stream(served, place)] for _ in range(5)]
    assert {name for look in read[:3] for name in look} == {f"/{n}" for n in range(2 * MOST_ENTRIES + 50)} | {
        "/next"
    }
    assert max(map(len, read)) <= 2 * MOST_ENTRIES
    assert read[4] == read[0][:-1], "and then from the beginning, without the one that was new"


def test_a_huge_entry_of_the_stream_is_cut_in_redis_and_refused(
    served: WorkPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a long field nor many of them reach the daemon; what is behind it comes at the next looks."""
    monkeypatch.setattr(sources, "MOST_STREAM_BYTES", 4 * MOST_NOTICE_BYTES)
    with redis_client.connect(served.redis_address) as client:
        for number in range(20):
            client.xadd(hook.STREAM, {"notice": bytes([65 + number]) * (1 << 22)})
        client.xadd(hook.STREAM, {f"f{n}": "x" for n in range(1000)})
        client.xadd(hook.STREAM, {"notice": Notice(checkpoint="/good").model_dump_json()})
        place, found, sizes = StreamPlace(), [], []
        parse = sources.parse
        monkeypatch.setattr(
            sources, "parse", lambda text, claimed: (sizes.append(len(text)), parse(text, claimed))[1]
        )
        while not any(d.notice.checkpoint == "/good" for d in found):
            found = list(from_stream(served, place))
            assert sum(sizes) <= 10 * MOST_NOTICE_BYTES
            assert len(found) > 0
            sizes.clear()
            for delivery in found:
                if delivery.wrong:
                    delivery.acknowledge()
    assert [d.wrong for d in found if d.notice.checkpoint == "/good"] == [""]


def test_a_thousand_copies_of_a_notice_are_one_pending_checkpoint_of_bounded_size() -> None:
    """Those beyond the bound are acknowledged at once: the others bring it again."""
    done: list[int] = []
    each = pending.PendingCheckpoint(Notice(checkpoint="/c"), since=0.0)
    for number in range(1000):
        each.add(sources.Delivery(str(number), each.notice, lambda n=number: done.append(n)))  # type: ignore[misc]
    assert done == list(range(pending.MOST_COPIES, 1000))
    each.add(sources.Delivery("5", each.notice, lambda: done.append(5)))
    assert len(done) == 1000 - pending.MOST_COPIES


def test_commands_that_cannot_be_obeyed_yet_hide_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes a bounded number of them, and every one has its turn."""
    work = WorkPaths(tmp_path)
    folder = work.spool / "commands"
    folder.mkdir(parents=True)
    for number in range(30):
        command = Command(command="cancel", evaluation_id=f"e{number}")
        (folder / f"{number}.json").write_text(command.model_dump_json())
    coordinator = coordinator_on(tmp_path, FakeCluster(fleet=[]))
    asked: list[str] = []

    def away(evaluation_id: str, _reason: str) -> None:
        asked.append(evaluation_id)
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(coordinator, "cancel", away)
    turns = Turns(folder, most=10)
    for look in range(1, 4):
        obey_commands(coordinator, turns=turns)
        assert len(asked) == 10 * look
    assert set(asked) == {f"e{number}" for number in range(30)}
