"""`evalspan serve`: the pages of a work folder in a browser, kept up to date.

Rule: a separate process that reads files and journals, writes only what it derived from documents, and contacts no daemon,
Redis or Slurm, so it cannot harm them. It listens on loopback or on a Unix socket. Other users of the host can reach
loopback, so the printed address contains a token, which the browser keeps as a cookie. Host names other than loopback are
refused, since another site could make its name resolve to this address.
"""

from __future__ import annotations

import base64
import errno
import hmac
import os
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import quote
from weakref import WeakValueDictionary

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.decide.evaluation.events import EVENT, AnyEvent
from coordinator.decide.evaluation.state import State
from coordinator.errors import EvalspanError, OperatorError
from coordinator.interface.page import html, page_contents
from coordinator.results.report import training_files
from coordinator.results.report.load_series import find_heads
from coordinator.results.report.training import Training
from coordinator.runtime.journal import replay_on
from coordinator.runtime.known_evaluations import Summaries, find_folder
from coordinator.runtime.replay import find_evaluation
from coordinator.runtime.summary import Halt, Summary, halt_of, read_summary
from coordinator.runtime.work_lock import WorkLock
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

EVALUATION = "/evaluation/"  # prefix of the address of an evaluation's page
# with the port that the browser sees, since browsers share cookies between all ports of a host
COOKIE = "evalspan"
HOSTS = ["127.0.0.1", "localhost", "[::1]"]
LOOK_SECONDS = 2.0  # between two looks at the work folder
FEWEST_COMPARED = 2
BUSY_SHARE = 0.05  # largest share of a core for rebuilding pages
COMPARE_SECONDS = 2.0  # for trainings not yet compared; the front page shows the others later
MOST_AT_ONCE = 200  # connections; any further one is answered with 503
HEADER_SECONDS = 10.0  # from a connection to its first request
MOST_PAGES = 4  # cached pages, and journals that are followed
MOST_ENDED = 500  # ended evaluations on the front page
MOST_TRAININGS = 200  # cached comparisons
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass
class _Journal:
    """State of an evaluation according to its journal up to byte `bytes`, where the next line begins."""

    last: bytes  # the preceding line, which differs if another journal took its place
    state: State
    events: list[AnyEvent]
    bytes: int


class Journals:
    """Cache of recently shown evaluations: only lines added to a journal are read."""

    def __init__(self) -> None:
        self._kept: dict[str, _Journal] = {}

    def find(self, settings: Config, name: str) -> tuple[State, EvaluationPaths, list[AnyEvent]]:
        """Return the same as `find_evaluation`."""
        paths = find_folder(settings, name)
        kept = self._kept.pop(paths.root.name, None)
        with paths.journal.open("rb") as file:
            if (
                kept is None
                or os.pread(file.fileno(), len(kept.last), kept.bytes - len(kept.last)) != kept.last
            ):
                state, _, events = find_evaluation(settings, name)
                read = list(islice(file, len(events)))
                kept = _Journal(read[-1], state, events, sum(map(len, read)))
            file.seek(kept.bytes)
            lines = list(takewhile(lambda line: line.endswith(b"\n"), file))
        try:
            added = [EVENT.validate_json(line) for line in lines]
        except ValidationError:
            return find_evaluation(settings, name)  # names the line
        replay_on(kept.state, added)
        kept.events += added
        kept.bytes += sum(map(len, lines))
        kept.last = [kept.last, *lines][-1]
        self._kept[paths.root.name] = kept
        for old in list(self._kept)[:-MOST_PAGES]:
            self._kept.pop(old, None)
        return kept.state, paths, kept.events


class _Made(NamedTuple):
    contents: page_contents.PageContents
    until: float  # monotonic seconds before which it is not rebuilt


class Pages:
    """Builds page contents, and caches them until a journal has grown or a coordinator has died.

    Pages are rebuilt rarely enough to cost at most BUSY of a core: one of 7,000 shards takes a third of a second. All
    browsers share one look at the work folder per LOOK_SECONDS.
    """

    def __init__(
        self,
        settings: Config,
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """Cache pages. `spent`: CPU seconds of this thread."""
        self.settings = settings
        self._now, self._spent = now, spent
        self._made: dict[str, _Made] = {}
        # address -> held while it is built; dropped with the last thread that wants it, since anyone can make up addresses
        self._making: WeakValueDictionary[str, Lock] = WeakValueDictionary()
        self._summaries = Summaries(settings, most=MOST_ENDED)
        self._journals = Journals()
        self._trainings: dict[Hashable, Training | None] = {}  # by key, evaluations and their ends
        self._open: list[tuple[Summary, Halt | None]] = []
        self._looked_at, self._work_mark = float("-inf"), ""
        self._lock = Lock()  # protects the caches and the look at the work folder

    def get(self, address: str, make: Callable[[], page_contents.PageContents]) -> page_contents.PageContents:
        """Return contents whose data include their mark. `address`: path and query of the page."""
        with self._lock:
            making = self._making.setdefault(address, Lock())
        with making:
            kept = self._made.get(address)
            if kept is None or self._now() >= kept.until:
                mark = self.mark(address)
                if kept is None or kept.contents.data["mark"] != mark:
                    began = self._spent()
                    title, data, blocks = make()
                    contents = page_contents.PageContents(title, {**data, "mark": mark}, blocks)
                    kept = _Made(contents, self._now() + (self._spent() - began) / BUSY_SHARE)
            with self._lock:
                self._made.pop(address, None)
                self._made[address] = kept
                for old in list(self._made)[:-MOST_PAGES]:
                    del self._made[old]
            return kept.contents

    def mark(self, address: str) -> str:
        """Return a mark that differs once the page's contents may have changed."""
        if address.startswith(EVALUATION):
            paths = EvaluationPaths(Path(self.settings.work_dir) / address.removeprefix(EVALUATION))
            try:
                size = paths.journal.stat().st_size
            except OSError:
                return ""
            return f"{hash((size, halt_of(read_summary(paths), paths))):x}"
        with self._lock:
            self._look()
            return f"{self._work_mark}{len(self._trainings)}" if address == "/" else self._work_mark

    def _look(self) -> None:
        if self._now() - self._looked_at < LOOK_SECONDS:
            return
        root = Path(self.settings.work_dir)
        runs = WorkLock(WorkPaths(root).lock).held()
        self._summaries.look(self._now())
        self._open = [
            (s, halt_of(s, EvaluationPaths(root / s.evaluation_id), held=runs)) for s in self._summaries.open
        ]
        ended = [(s.evaluation_id, s.ended_at) for s in self._summaries.ended]
        begun = [(s.evaluation_id, s.written_at, halt) for s, halt in self._open]
        self._work_mark = f"{hash((*ended, *begun)):x}"
        self._looked_at = self._now()

    def index(self) -> page_contents.PageContents:
        begun, ended = self._seen()
        until = self._now() + COMPARE_SECONDS

        def find(key: training_files.Key, scored: Sequence[Summary]) -> Training | None:
            known = *key, *((s.evaluation_id, s.ended_at) for s in scored)
            if known not in self._trainings and self._now() < until:
                evaluations = [s.evaluation_id for s in scored]
                self._trainings[known] = training_files.find_training(self.settings, key, evaluations)
                for old in list(self._trainings)[:-MOST_TRAININGS]:
                    del self._trainings[old]
            return self._trainings.get(known)

        return page_contents.work_folder_contents(self.settings, begun, ended, find)

    def _seen(self) -> tuple[list[tuple[Summary, Halt | None]], list[Summary]]:
        with self._lock:
            self._look()
            return self._open, self._summaries.ended

    def names(self) -> frozenset[str]:
        with self._lock:
            self._look()
            return self._summaries.names

    def evaluation(self, name: str) -> page_contents.PageContents:
        begun, ended = self._seen()
        return page_contents.evaluation_contents(
            self.settings, name, self._journals.find, [*(s for s, _ in begun), *ended]
        )

    def trainings(self, folder: str, suite: str | None) -> page_contents.PageContents:
        found = find_heads(self.settings.work_dir, folder, suite, mixed=True)
        return page_contents.trainings_contents(self.settings, found, folder)


class _Views:
    """The answers, one method per route, each run in a thread."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._pages = Pages(settings)

    def routes(self) -> list[Route]:
        return [
            Route("/", self._index),
            Route(f"{EVALUATION}{{name}}", self._evaluation),
            Route("/training", self._training),
            Route("/compare", self._compare),
        ]

    def _answer(
        self, request: Request, address: str, make: Callable[[], page_contents.PageContents]
    ) -> Response:
        """Answer with a page, or for a page that updates itself with data; 304 if it has these."""
        try:
            found = self._pages.get(address, make)
        except (EvalspanError, OSError) as error:
            return _refused(error)
        if request.headers.get("accept") != "application/json":
            return Response(html.render_page(*found, live=True), media_type="text/html; charset=utf-8")
        if request.headers.get("if-none-match") == found.data["mark"]:
            return Response(status_code=304)
        blocks = {name: base64.b64encode(content).decode() for name, content in found.blocks.items()}
        text = html.as_json({"data": found.data, "blocks": blocks})
        return Response(text, media_type="application/json")

    def _index(self, request: Request) -> Response:
        return self._answer(request, "/", self._pages.index)

    def _evaluation(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            whole = find_folder(self._settings, name, self._pages.names()).root.name
        except (EvalspanError, OSError) as error:
            return _refused(error)
        if whole != name:  # the page is kept up to date under its full id
            return RedirectResponse(f"{EVALUATION}{quote(whole)}", status_code=303)
        return self._answer(request, f"{EVALUATION}{name}", lambda: self._pages.evaluation(name))

    def _training(self, request: Request) -> Response:
        folder, suite = request.query_params.get("folder", "*"), request.query_params.get("suite")
        return self._answer(request, str(request.url), lambda: self._pages.trainings(folder, suite))

    def _compare(self, request: Request) -> Response:
        names = request.query_params.getlist("id")
        if len(names) < FEWEST_COMPARED:
            return PlainTextResponse("name two evaluations: /compare?id=…&id=…", status_code=404)
        return self._answer(
            request, str(request.url), lambda: page_contents.comparison_contents(self._settings, names)
        )


def _refused(error: Exception) -> Response:
    return PlainTextResponse(str(error), status_code=404 if isinstance(error, OperatorError) else 503)


def web_application(settings: Config, token: str | None) -> Starlette:
    """Return the web application. `token`: what a browser must present; None: on a Unix socket, whose mode excludes others."""
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
    return Starlette(routes=_Views(settings).routes(), middleware=[hosts, Middleware(_Guard, token)])


class _Guard:
    """Refuses requests that change something or lack the token, and adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this server is read-only", status_code=405)
        if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
            return PlainTextResponse("names cannot contain NUL", status_code=404)
        if self._token is None or self._is_token(request.cookies.get(_cookie(request), "")):
            return None
        if not self._is_token(request.query_params.get("token", "")):
            return PlainTextResponse("open the address that `evalspan serve` has printed", status_code=403)
        left = request.url.remove_query_params("token")
        address = "/" + left.path.lstrip("/") + (f"?{left.query}" if left.query else "")
        kept = RedirectResponse(address, status_code=303)
        kept.set_cookie(_cookie(request), self._token, httponly=True, samesite="strict")
        return kept

    def _is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _cookie(request: Request) -> str:
    return f"{COOKIE}-{request.url.port or 80}"


class _Timed(H11Protocol):
    """Closes a connection without a request within HEADER_SECONDS."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._end = self.loop.call_later(HEADER_SECONDS, lambda: self.cycle or transport.close())

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()  # else a flood's connections would all be kept for so long
        super().connection_lost(exc)


def serve_pages(settings: Config, *, port: int, unix: Path | None, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raise OperatorError if the address is unavailable."""
    bound, address, token = _bound(port, unix)
    bound.listen()  # a client that connects at once waits
    say(address)
    # uvicorn re-raises the signal when it has shut down
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(
        web_application(settings, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        http=_Timed,
        limit_concurrency=MOST_AT_ONCE,
        timeout_graceful_shutdown=1,
    )
    try:
        uvicorn.Server(config).run(sockets=[bound])
    finally:
        bound.close()
        if unix is not None:
            unix.unlink(missing_ok=True)


def _bound(port: int, unix: Path | None) -> tuple[socket.socket, str, str | None]:
    """Return (listening socket, address to open, token)."""
    try:
        if unix is None:
            bound = socket.socket(socket.AF_INET)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("127.0.0.1", port))
            token = secrets.token_urlsafe(24)
            return bound, f"http://127.0.0.1:{bound.getsockname()[1]}/?token={token}", token
        _remove_left(unix)
        bound = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            bound.bind(str(unix))
        finally:
            os.umask(before)
        return (
            bound,
            f"ssh -L 8421:{unix.absolute()} {socket.gethostname()}, then http://127.0.0.1:8421/",
            None,
        )
    except OSError as error:
        raise OperatorError(
            f"{unix or f'127.0.0.1:{port}'} is not available: {error.strerror or error}"
        ) from error


def _remove_left(unix: Path) -> None:
    """Remove the socket of a server that was killed."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as link:
        if stat.S_ISSOCK(unix.lstat().st_mode) and link.connect_ex(str(unix)) == errno.ECONNREFUSED:
            unix.unlink()
