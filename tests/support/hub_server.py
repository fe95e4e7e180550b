"""A Hub on this machine: the routes that huggingface_hub asks for a model's files, over a folder of files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from support.endpoint import listening

COMMIT = "93efa2f097d58c2a74874c7e644dbc9b0cee75a2"
GATED = "lab/gated"
CLOSED = {
    "lab/gated-files": "GatedRepo",
    "lab/no-token": "",
}  # models whose files alone are refused, with what error


@dataclass
class Hub:
    """Models by id, each a folder; every one has the revisions main and step1000, both of commit COMMIT."""

    models: Mapping[str, Path]
    url: str = ""
    fetched: list[str] = field(default_factory=list)  # names of files whose bytes were sent

    def answer(self, path):
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        if name == GATED:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if name not in self.models:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        rest = parts[4:] if api else parts[2:]
        if len(rest) > 1 and rest[1] not in ("main", "step1000", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if api:
            return self._told(name, tree=rest[:1] == ["tree"])
        if name in CLOSED:
            return 403, {"X-Error-Code": CLOSED[name]} if CLOSED[name] else {}, b""
        content = (self.models[name] / "/".join(rest[2:])).read_bytes()
        return 200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content

    def _told(self, name, *, tree):
        root = self.models[name]
        sizes = {p.relative_to(root).as_posix(): p.stat().st_size for p in root.rglob("*") if p.is_file()}
        told = {"id": name, "sha": COMMIT}
        told["siblings"] = [{"rfilename": file, "size": size} for file, size in sizes.items()]
        if tree:
            told = [{"type": "file", "path": p, "size": s, "oid": f"{s:040x}"} for p, s in sizes.items()]
        return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()


@contextmanager
def serving(models):
    hub = Hub(models)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self._send(body=False)

        def do_GET(self):
            self._send(body=True)

        def _send(self, *, body):
            status, headers, content = hub.answer(self.path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)
                if "/resolve/" in self.path:
                    hub.fetched.append(self.path.rsplit("/", 1)[-1])

        def log_message(self, *_): ...

    with listening(Handler) as hub.url:
        yield hub
