"""A running `evalspan serve`, asked over HTTP."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 60  # most that an answer takes on a busy machine


class Served:
    """`ask`: path -> (status, headers, body). `said`: the address that it printed."""

    def __init__(self, process: subprocess.Popen[str], said: str) -> None:
        self.process = process
        place, _, self.token = said.removeprefix("http://").partition("/?token=")
        self.host, _, port = place.partition(":")
        self.port = int(port)

    @property
    def cookie(self) -> str:
        return f"evalspan-{self.port}={self.token}"

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        link = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        link.request(method, path, headers=headers)
        answer = link.getresponse()
        found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        link.close()
        return found

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
        return self.ask(path, Cookie=self.cookie, **headers)

    def data(self, path: str) -> dict[str, Any]:
        """What a page shows."""
        found: dict[str, Any] = json.loads(self.get(path, Accept="application/json")[2])["data"]
        return found


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "coordinator", "serve", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


def end(process: subprocess.Popen[str]) -> str:
    """End it, and return what it wrote to standard error."""
    process.terminate()
    return process.communicate(timeout=SECONDS)[1]


@contextmanager
def serving(*words: str) -> Iterator[Served]:
    process = start(*words)
    try:
        yield Served(process, process.stdout.readline().strip())
    finally:
        end(process)
