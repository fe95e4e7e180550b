"""Real metric jobs for the worker's tests: score specs whose request set is not there, is broken, or is a named pipe.

A pipe holds the real code at its first read until the test lets go: no job is faked, none is timed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from dev_cluster import procs
from dev_cluster.testing import wait_until
from rq import Queue
from rq.serializers import JSONSerializer

from coordinator.site.services.metric_queue import MetricQueue
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.paths import EvaluationPaths, WorkPaths, request_set_manifest
from evaljobs.contract.storage import read_record, write_atomic
from evaljobs.queue import redis_client
from support.exactness.pipeline import score_spec


@dataclass
class Bench:
    """One evaluation of a work folder, its metric queue, and its specs."""

    work: WorkPaths
    evaluation: str

    def __post_init__(self):
        self.paths = EvaluationPaths(self.work.root / self.evaluation)
        for folder in self.paths.folders():
            folder.mkdir(parents=True, exist_ok=True)
        self.queue = MetricQueue(redis_client.Link(self.work.redis_address), self.evaluation)

    def write_spec(self, name, *, held=False, item_seconds=60.0):
        """A score of a request set that is empty, or (`held`) a pipe without a writer."""
        folder = self.paths.root / "sets" / name
        folder.mkdir(parents=True, exist_ok=True)
        if held:
            os.mkfifo(request_set_manifest(folder))
        sets = {"arc_easy": str(folder)}
        spec = score_spec(
            self.paths.root, "arc_easy", name=name, request_sets=sets, item_seconds=item_seconds
        )
        path = self.paths.spec(name)
        write_atomic(path, spec.model_dump_json().encode())
        return path

    def enqueue(self, name, *, held=False):
        self.queue.enqueue(name, self.write_spec(name, held=held))

    def read_by_job(self, name):
        """A descriptor for the pipe of a held job, once the job reads it: what comes before that needs Redis.

        The job goes on after `let_go` and the descriptor's close.
        """
        manifest, found = request_set_manifest(self.paths.root / "sets" / name), list[int]()

        def opened():
            with suppress(OSError):  # ENXIO: no reader yet
                found.append(os.open(manifest, os.O_WRONLY | os.O_NONBLOCK))
            return bool(found)

        wait_until(opened)
        return found[0]

    def let_go(self, name):
        """End the wait of the process that reads the pipe, for good: later readers find a file."""
        manifest = request_set_manifest(self.paths.root / "sets" / name)
        broken = manifest.with_name("broken")
        broken.write_text("{}")
        # held open: a reader in between sees its end
        descriptor = os.open(manifest, os.O_RDWR | os.O_NONBLOCK)
        broken.replace(manifest)
        os.write(descriptor, b"{}")
        os.close(descriptor)

    def opened(self):
        """RQ's own queue."""
        client = redis_client.make_client(redis_client.read_address(self.work.redis_address))
        return Queue(redis_client.metric_queue(self.evaluation), connection=client, serializer=JSONSerializer)

    def gone(self, name):
        return name in self.queue.gone([name])

    def why(self, name):
        return self.queue.gone([name]).get(name, "")

    def failed(self, name):
        with suppress(FileNotFoundError):
            return read_record(self.paths.outcome("failed", name), Failed)
        return None


def children(pid):
    """Pids of a process's living children."""
    return [child.pid for child in procs.children(pid)]


def kill(server):
    """SIGKILL to the server, and wait for its end; its pid."""
    pid = server.pid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.pid() is None)
    return pid


def bound(taker, port):
    """Whether the port could be taken: a killed server's threads may hold it a moment longer."""
    try:
        taker.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def move(server):
    """Kill the server and take its port, so that it starts at another."""
    before = server.ensure()
    kill(server)
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_until(lambda: bound(taker, before.port))
        taker.listen()
        return server.ensure()


@contextmanager
def running(bench, *more, prefix=()):
    """A supervisor with one worker; ended and reaped, children too, on leaving."""
    log = (bench.paths.logs / "worker.log").open("ab")
    argv = [*prefix, sys.executable, "-m", "evaljobs", "worker", "--queue", bench.evaluation]
    argv += ["--redis-file", str(bench.work.redis_address), *more]
    process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    except BaseException:
        sys.stderr.write((bench.paths.logs / "worker.log").read_text()[-4000:])
        raise
    finally:
        left = [p for w in children(process.pid) for p in (*children(w), w)]
        process.send_signal(signal.SIGTERM)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(60)
        log.close()
