"""`evalspan serve`: pages of a work folder, over HTTP; and no page, screen, report or metric says "running" of an evaluation whose
coordinator is dead.
"""

import asyncio
import gc
import json
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import weakref
from pathlib import Path
from threading import Event, Thread

import pytest
import uvicorn
from dev_cluster.testing import wait_until
from starlette.requests import Request
from support.node_memory import make_checkpoint
from support.serving import SECONDS, end, serving, start
from support.simulated.parts import Faults, record
from support.simulated.world import World
from support.trainings import two_trainings
from uvicorn.server import ServerState

from coordinator.interface.page import server
from coordinator.interface.page.page_contents import PageContents
from coordinator.interface.page.server import (
    BUSY_SHARE,
    LOOK_SECONDS,
    MOST_PAGES,
    Journals,
    Pages,
    web_application,
)
from coordinator.runtime import known_evaluations
from coordinator.runtime.journal import line_of, read_events, replayed_state
from coordinator.runtime.summary import Summary, write_summary
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return two_trainings(tmp_path_factory.mktemp("serve") / "work")


@pytest.fixture(scope="module")
def served(work):
    with serving("--work-dir", str(work)) as found:
        yield found


ABROAD = {"Origin": "http://evil.example"}
# law -> path, method, headers ("KEY" is who has the cookie), status, parts of the answer's headers
ASKED = {
    "no page without the token": ("/", "GET", {}, 403, {}),
    "nor with a wrong one": ("/?token=wrong", "GET", {}, 403, {}),
    "nor with a wrong cookie": ("/", "GET", {"Cookie": "evalspan-PORT=wrong"}, 403, {}),
    "the token becomes a cookie of this site alone": ("/?token=TOKEN", "GET", {}, 303, {"location": "/", "set-cookie": "samesite=strict"}),
    "that scripts do not see": ("/?token=TOKEN", "GET", {}, 303, {"set-cookie": "httponly"}),
    "whose name holds the port": ("/?token=TOKEN", "GET", {}, 303, {"set-cookie": "evalspan-PORT="}),
    "that the browser sees": ("/?token=TOKEN", "GET", {"Host": "localhost:8421"}, 303, {"set-cookie": "evalspan-8421="}),
    "the cookie shows pages": ("/", "GET", {"KEY": ""}, 200, {}),
    "the address leads to the page that it names": ("/training?folder=%2Fruns%2Fa&token=TOKEN&suite=mini", "GET", {}, 303, {"location": "/training?folder=%2Fruns%2Fa&suite=mini"}),
    "on this server": ("//evil.example/x?token=TOKEN", "GET", {}, 303, {"location": "/evil.example/x"}),
    "no name that resolves to loopback": ("/", "GET", {"KEY": "", "Host": "evil.example"}, 400, {}),
    "but localhost": ("/", "GET", {"KEY": "", "Host": "localhost:PORT"}, 200, {}),
    "nor half a bracket": ("/", "GET", {"KEY": "", "Host": "[::1"}, 400, {}),
    "no evaluation of 5,000 letters": ("/evaluation/" + "a" * 5000, "GET", {"KEY": ""}, 404, {}),
    "nor of 60 kB": ("/evaluation/" + "a" * 60_000, "GET", {"KEY": ""}, 404, {}),
    "nor a training of 60 kB": ("/training?folder=" + "a" * 60_000, "GET", {"KEY": ""}, 404, {}),
    **{f"no {method}": ("/", method, {"KEY": ""}, 405, {}) for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS")},
    "in no frame": ("/", "GET", {"KEY": "", **ABROAD}, 200, {"x-frame-options": "deny", "x-content-type-options": "nosniff"}),
    **{f"nothing at {path}": (path, "GET", {"KEY": ""}, 404, {}) for path in
       ("/evaluation/..", "/evaluation/%2e%2e%2f%2e%2e%2fetc", "/evaluation/*", "/nothing", "/compare?id=a", "/training?folder=%00",
        "/evaluation/a%00b", "/compare?id=a%00&id=b", "/changes?of=%00")},
}  # fmt: skip


@pytest.mark.parametrize("law", ASKED)
def test_only_who_has_the_printed_address_sees_a_page_and_nothing_changes_it(served, law):
    """Another site reads and changes nothing; what is not there is not found."""
    path, method, headers, status, parts = ASKED[law]

    def here(text):
        return text.replace("TOKEN", served.token).replace("PORT", str(served.port))

    sent = {name: here(text) for name, text in headers.items() if name != "KEY"}
    if "KEY" in headers:
        sent["Cookie"] = served.cookie
    found, answered, body = served.ask(here(path), method, **sent)
    assert found == status
    for name, part in parts.items():
        assert here(part) in answered[name].lower() if name != "location" else answered[name] == part
    assert "access-control-allow-origin" not in answered
    assert found != 200 or ("connect-src 'self'" in body and "default-src 'none'" in body)


def test_a_training_is_shown_as_page_and_as_data_by_a_beginning_of_an_id_too_and_no_file_changes(
    served, work
):
    def seen():
        kept = {
            "scores",
            "cache",
            "ended.json",
            "documents.parquet",
            "paired.jsonl",
        }  # what is computed of results and documents
        every = [p for p in work.rglob("*") if p.is_file() and not kept & {*p.relative_to(work).parts}]
        return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in every}

    folder = work / "step-9-mini-12345678"
    folder.mkdir()
    (folder / "journal.jsonl").touch()
    before = seen()
    status, _, page = served.get("/training?folder=/runs/a")
    assert status == 200
    assert '"kind":"training"' in page
    assert [t["folder"] for t in served.data("/training?folder=/runs/a")["trainings"]] == ["/runs/a"]
    # the page at the whole name is kept up to date
    wait_until(lambda: served.get("/evaluation/step-9-mini-1")[0] == 303, "a look at the work folder")
    assert served.get("/evaluation/step-9-mini-1")[1]["location"] == f"/evaluation/{folder.name}"
    assert seen() == before
    shutil.rmtree(folder)


def test_a_unix_socket_is_the_users_alone_and_is_removed(work, tmp_path):
    """Also that of a server that was killed. A port beside it is refused."""
    place = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(place))  # of a server that was killed
    process = start("--work-dir", str(work), "--unix", str(place))
    assert str(place) in process.stdout.readline()
    assert place.stat().st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(SECONDS)
        link.connect(str(place))
        link.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert link.recv(100).startswith(b"HTTP/1.1 200")
    end(process)
    assert not place.exists()
    beside = start("--work-dir", str(work), "--unix", str(place), "--port", "8421")
    assert beside.wait(SECONDS) == 2
    assert not place.exists()


def test_a_page_of_a_growing_journal_costs_a_twentieth_of_a_core_and_its_end_is_not_missed(tmp_path):
    """A browser asks for the page whenever it differs; making it takes a second each time."""
    now, spent = [0.0], [0.0]
    journal = tmp_path / "e" / "journal.jsonl"
    journal.parent.mkdir()
    pages = Pages(Config(work_dir=tmp_path), now=lambda: now[0], spent=lambda: spent[0])

    def make():
        spent[0] += 1.0
        return PageContents(str(journal.stat().st_size), {}, {})

    for turn in range(1000):
        if turn < 500:
            journal.write_text("x" * turn)
        title = pages.get("/evaluation/e", make).title
        now[0] += 1.0
    assert spent[0] <= BUSY_SHARE * 500 + 2
    assert title == "499"


def test_a_page_of_a_grown_journal_reads_what_was_added_alone(tmp_path):
    """Bytes that the system counts; a line in the writing waits for its end. Another journal in its place is read whole,
    also one that the disk gave the same number, and one that was cut short."""
    world = World(0, Faults(), record(60))
    world.run_to_scores()
    paths = EvaluationPaths(tmp_path / world.state.evaluation_id)
    for folder in paths.folders():
        folder.mkdir(parents=True)
    lines = [line_of(event) for event in world.journal]
    journals, config = Journals(), Config(work_dir=tmp_path)

    def look():
        """(events, bytes read)."""
        before = read_so_far()
        _, _, events = journals.find(config, paths.root.name)
        return len(events), read_so_far() - before

    size = sum(map(len, lines))
    assert size > 40_000
    with paths.journal.open("wb", buffering=0) as journal:
        journal.write(b"".join(lines[:-2]) + lines[-2][:9])
        assert look()[0] == len(lines) - 2
        assert look()[1] < size / 10
        journal.write(lines[-2][9:] + lines[-1])
    events, read = look()
    assert (events, read < size / 10) == (len(lines), True)
    assert journals.find(config, paths.root.name)[0] == replayed_state(read_events(paths.journal))
    paths.journal.write_bytes(b"".join(lines[: len(lines) // 2]))
    assert look()[0] == len(lines) // 2
    anew = World(1, Faults(), record(80))
    anew.run_to_scores()
    paths.journal.write_bytes(b"".join(map(line_of, anew.journal)))
    assert journals.find(config, paths.root.name)[0] == replayed_state(read_events(paths.journal))


def read_so_far():
    """Bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_damaged_evaluation_hides_no_other_checkpoint_of_its_training(served, work):
    whole = served.data("/training?folder=/runs/a")["trainings"][0]["points"]
    file = next(f for f in work.glob("*/results.json") if f.parent.name == whole[0]["evaluation_id"])
    kept = file.read_text()
    file.write_text(kept[: len(kept) // 2])
    try:
        found = served.data("/training?folder=/runs/a&suite=mini")["trainings"][0]["points"]
        assert [p["label"] for p in found] == [p["label"] for p in whole]
        assert found[0]["status"] == "unreadable"
    finally:
        file.write_text(kept)


def test_a_large_page_holds_up_no_other(tmp_path):
    """The index is made while another page is being made."""
    pages, begun, over = Pages(Config(work_dir=tmp_path)), Event(), Event()

    def make():
        begun.set()
        assert over.wait(SECONDS)
        return PageContents("large", {}, {})

    large = Thread(target=lambda: pages.get("/compare?id=a&id=b", make))
    large.start()
    assert begun.wait(SECONDS)
    assert pages.get("/", pages.index).title == str(tmp_path)
    assert large.is_alive()
    over.set()
    large.join()


def test_addresses_that_were_asked_for_once_leave_nothing(tmp_path):
    """A flood of requests, each for another name, does not let the server grow."""
    pages = Pages(Config(work_dir=tmp_path))
    for number in range(1000):
        pages.get(f"/compare?id={number}", lambda: PageContents("", {}, {}))
    assert (len(pages._making), len(pages._made)) == (0, MOST_PAGES)


def test_a_flood_of_unknown_names_shares_the_look_at_the_work_folder(work, monkeypatch):
    """A listing takes 50 ms among 3,000 evaluations: 20 requests a second would use a core."""
    monkeypatch.delattr(known_evaluations, "known_ids")
    monkeypatch.delattr(known_evaluations, "unreadable_message")
    views = server._Views(Config(work_dir=work))
    answer = views._evaluation(Request({"type": "http", "path_params": {"name": "nothing"}}))
    assert (answer.status_code, b"begins with 'nothing'" in answer.body) == (404, True)


def test_no_timer_keeps_a_connection_that_has_ended(tmp_path):
    """Else a flood's connections, with their requests, would all stay for HEADER_SECONDS."""
    config = uvicorn.Config(web_application(Config(work_dir=tmp_path), None))
    config.load()
    made = []

    def protocol():
        one = server._Timed(config=config, server_state=ServerState(), app_state={})
        made.append(weakref.ref(one))
        return one

    async def connect():
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(protocol, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.0\r\nHost: elsewhere\r\n\r\n")
        assert b"400 Bad Request" in await reader.read()
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0)  # the server's side of the end
        gc.collect()
        assert [one() for one in made] == [None]
        listening.close()

    asyncio.run(connect())


def test_a_page_is_made_by_one_thread_at_a_time(tmp_path):
    """Also one that other pages pushed out meanwhile: what its journal says is kept, and changed in place."""
    pages = Pages(Config(work_dir=tmp_path), now=lambda: 0.0, spent=lambda: 0.0)
    begun, twice, over = Event(), Event(), Event()
    journal = tmp_path / "e" / "journal.jsonl"
    journal.parent.mkdir()

    def make():
        if journal.exists():
            (twice if begun.is_set() else begun).set()
            assert over.wait(SECONDS)
        return PageContents("", {}, {})

    pages.get("/evaluation/e", make)
    journal.touch()
    makers = [Thread(target=lambda: pages.get("/evaluation/e", make)) for _ in range(2)]
    makers[0].start()
    assert begun.wait(SECONDS)
    for number in range(MOST_PAGES + 1):
        pages.get(f"/compare?id={number}", lambda: PageContents("", {}, {}))
    makers[1].start()
    assert not twice.wait(0.5)
    over.set()
    for maker in makers:
        maker.join()


def test_a_connection_without_a_request_is_ended_and_the_end_of_the_server_is_quiet(work):
    with serving("--work-dir", str(work)) as found:
        with socket.create_connection((found.host, found.port)) as silent:
            silent.settimeout(SECONDS)
            silent.sendall(b"GET / HTTP/1.1\r\nHost:")
            assert silent.recv(100) == b""
        assert found.get("/")[0] == 200
        assert end(found.process) == ""


def test_a_look_at_thousands_of_ended_evaluations_costs_as_much_as_one_at_those_that_run(
    tmp_path, monkeypatch
):
    """All browsers share one look, and the summary of an ended evaluation is read once in ENDED_SECONDS."""
    for i in range(100):
        paths = EvaluationPaths(tmp_path / f"step-{i}-mini-12345678")
        paths.root.mkdir()
        paths.journal.write_text("x")
        about = {"schema_version": 3, "evaluation_id": paths.root.name, "written_at": 2.0, "ended_at": 2.0}
        write_summary(paths, Summary(**about, journal_bytes=1))
    now, seen = [0.0], []
    pages = Pages(Config(work_dir=tmp_path), now=lambda: now[0])
    mark = pages.mark("/")
    assert len(pages.index().data["evaluations"]) == 100
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **how: seen.append(path) or stat(path, **how))
    for _ in range(20):  # tabs
        now[0] += LOOK_SECONDS / 10
        assert pages.mark("/") == mark
    assert len(seen) < 10


# --- a coordinator that is dead ----------------------------------------------------------------------------------------


TYPE = "no process goes on with it: type the same `evalspan eval"


def _scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as answer:
        return str(answer.read().decode())


def test_an_evaluation_whose_daemon_was_killed_reads_stopped_everywhere(tmp_path):
    """`status`, `report`, the page as a file and as served, the index; metrics end with their daemon."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free_port = free.getsockname()[1]
    work, config = tmp_path / "work", tmp_path / "evalspan.toml"
    config.write_text(
        f'work_dir = "{work}"\n[cluster]\nkind = "local"\nslots = 1\n[trial]\ndevice = "cpu"\n'
        f'[watch]\nroots = ["{tmp_path}"]\n[metrics]\nlisten = "127.0.0.1:{free_port}"\n'
    )
    checkpoint = make_checkpoint(tmp_path / "step-7", shards=1, size=100, seed=0)

    def evalspan(*words):
        command = [sys.executable, "-m", "coordinator", *words, "--config", str(config)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    evalspan("submit", checkpoint, "--suite", "quickstart")
    daemon = subprocess.Popen(
        [sys.executable, "-m", "coordinator", "daemon", "--config", config], stderr=subprocess.DEVNULL
    )
    with serving("--config", str(config)) as served:
        try:
            wait_until(lambda: list(work.glob("step-7-*/journal.jsonl")))
            (name,) = (p.parent.name for p in work.glob("step-7-*/journal.jsonl"))
            wait_until(lambda: served.data("/")["evaluations"])
            assert served.data("/")["running"] == 1
            assert served.data(f"/evaluation/{name}")["report"]["status"] == "running"
            wait_until(lambda: "evalspan_evaluations" in _scrape(free_port))
        finally:
            daemon.kill()
            daemon.wait(SECONDS)
        wait_until(lambda: served.data("/")["running"] == 0)
        index = served.data("/")
        wait_until(lambda: served.data(f"/evaluation/{name}")["report"]["status"] != "running")
        page = served.data(f"/evaluation/{name}")
    (row,) = json.loads(evalspan("status", "--json"))["evaluations"]
    assert row["stopped"]
    since = evalspan("status").partition("stopped since ")[2].split()[0]
    said = f"stopped since {since}: {TYPE}"
    assert index["evaluations"][0]["status"].startswith(said)
    assert page["report"]["status"] == "stopped"
    assert page["halted"].startswith(said)
    file = tmp_path / "p.html"
    evalspan("report", name, "--html", str(file))
    assert said in file.read_text()
    assert '"status":"running"' not in file.read_text()
    report = evalspan("report", name)
    assert "stopped since" in report
    assert "so far" not in report
    assert json.loads(evalspan("report", name, "--json"))["status"] == "stopped"
    with pytest.raises(urllib.error.URLError):
        _scrape(free_port)
