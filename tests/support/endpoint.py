"""A real HTTP endpoint with chosen faults: right, wrong, slow, or silent."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Handle = Callable[["Request"], None]


@dataclass
class Request:
    """One request: its number (from 0), its body, and the ways to answer it."""

    number: int
    body: dict[str, Any]
    headers: Message  # of any case
    path: str
    handler: BaseHTTPRequestHandler
    released: threading.Event
    leave: Callable[[], None]  # ends its count as an open request

    @property
    def user(self):
        return str(self.body["messages"][1]["content"])

    def send(self, status, body, headers=None):
        self.leave()  # the client may have read the answer before the next line runs
        self.handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.handler.send_header(name, value)
        self.handler.end_headers()
        self.handler.wfile.write(body)

    def answer(self, text="Rating: [[7]]", prompt=100, completion=10):
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        self.send(200, json.dumps({"choices": [{"message": {"content": text}}], "usage": usage}).encode())

    def error(self, status, message="no", **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.send(status, json.dumps({"error": {"message": message}}).encode(), named)

    def hang(self):
        self.released.wait(60)

    def close_in_the_middle(self):
        self.handler.send_response(200)
        self.handler.send_header("Content-Length", "1000")
        self.handler.end_headers()
        self.handler.wfile.write(b'{"choices": [')
        self.handler.close_connection = True


@dataclass
class Endpoint:
    """Records the requests; `handle` may be replaced at any time."""

    url: str = ""
    handle: Handle = lambda request: request.answer()
    requests: list[Request] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def users(self):
        return [request.user for request in self.requests]


@contextmanager
def listening(handler):
    """The address of a server of requests on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def serving():
    endpoint = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            inside = [1]

            def leave():
                with endpoint.lock:
                    endpoint.open -= inside[0]
                    inside[0] = 0

            with endpoint.lock:
                number = len(endpoint.requests)
                request = Request(number, body, self.headers, self.path, self, endpoint.released, leave)
                endpoint.requests.append(request)
                endpoint.starts.append(time.monotonic())
                endpoint.open += 1
                endpoint.most_open = max(endpoint.most_open, endpoint.open)
            try:
                endpoint.handle(request)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the other side gave up, or was killed
            finally:
                leave()

        def log_message(self, *_arguments): ...

    with listening(Handler) as address:
        endpoint.url = f"{address}/v1"
        try:
            yield endpoint
        finally:
            endpoint.released.set()
