"""A web server that takes news."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hook:
    """`answers`: codes of the next requests; 200 after them. `got`: the news it took; `paths`: of all requests."""

    def __init__(self) -> None:
        self.got: list[dict[str, object]] = []
        self.paths: list[str] = []
        self.answers: list[int] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.paths.append(self.path)
                code = hook.answers.pop(0) if hook.answers else 200
                if code == 200:
                    hook.got.append(json.loads(body))
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
