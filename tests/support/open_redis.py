"""A Redis without ACL behind the address of a work folder, and an evaluation with shards to do on it."""

import subprocess
import time
from contextlib import contextmanager

import redis

from coordinator.evaluation.job_specs import Site
from coordinator.runtime.detect import Grace
from coordinator.runtime.effects import Performer
from coordinator.runtime.journal import Journal
from coordinator.runtime.runner import Running
from coordinator.services.redis_server import binary
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import write_record
from evaljobs.queue.redis_client import RedisAddress
from support.fake_cluster import FakeCluster
from support.simulated.parts import Faults
from support.simulated.world import World


@contextmanager
def open_server(folder):
    """A test may do to it what any user of a site's Redis may, and set its limits."""
    socket = folder / "s"
    words = [str(binary()), "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([*words, "--maxmemory-policy", "noeviction"], stdout=subprocess.DEVNULL)
    write_record(WorkPaths(folder).redis_address, RedisAddress(socket=str(socket)))
    try:
        end = time.monotonic() + 60
        with redis.Redis(unix_socket_path=str(socket)) as client:
            while not _answers(client):  # its socket is there before anybody listens
                assert time.monotonic() < end
                time.sleep(0.02)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def _answers(client):
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def running_on(folder):
    """An evaluation with shards to do, on the server of the work folder `folder`."""
    world = World(3, Faults())
    while not world.state.shards.todo:
        world.tick()
    work = Site(work_dir=str(folder), trial_command=("python",), worker_command=("python",))
    performer = Performer(
        site=work, cluster=FakeCluster(fleet=[]), lm_eval_version=lambda: "0", observations=folder / "o"
    )
    (folder / world.state.evaluation_id / "responses").mkdir(parents=True)
    journal = Journal(folder / world.state.evaluation_id / "journal.jsonl")
    return Running(world.state, journal, performer, Grace())
