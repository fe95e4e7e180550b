"""A running `evalspan serve`, asked over HTTP."""

import http.client
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

SECONDS = 60  # most that an answer takes on a busy machine


class Served:
    """`ask`: path -> (status, headers, body). `said`: the address that it printed."""

    def __init__(self, process, said):
        self.process = process
        place, _, self.token = said.removeprefix("http://").partition("/?token=")
        self.host, _, port = place.partition(":")
        self.port = int(port)

    @property
    def cookie(self):
        return f"evalspan-{self.port}={self.token}"

    def ask(self, path, method="GET", **headers):
        link = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        link.request(method, path, headers=headers)
        answer = link.getresponse()
        found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        link.close()
        return found

    def get(self, path, **headers):
        return self.ask(path, Cookie=self.cookie, **headers)

    def data(self, path):
        """What a page shows."""
        return json.loads(self.get(path, Accept="application/json")[2])["data"]


def start(*words):
    command = [sys.executable, "-m", "coordinator", "serve", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


def end(process):
    """End it, and return what it wrote to standard error."""
    process.terminate()
    return process.communicate(timeout=SECONDS)[1]


@contextmanager
def serving(*words):
    process = start(*words)
    try:
        yield Served(process, process.stdout.readline().strip())
    finally:
        end(process)
