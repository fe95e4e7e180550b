"""A daemon without rules of a site on the simulated cluster, and what is announced to it."""

import time
from pathlib import Path

from coordinator.intake.inbox import Inbox, Notice, leave_notice, read_refusals
from coordinator.runtime.service import Service
from coordinator.site.cluster.slurm_rules import Hosting
from coordinator.site.config.schema import Config, WatchConfig
from support.fake_cluster import FakeCluster
from support.loops import coordinator_on
from support.node_memory import make_checkpoint

SUITE = "quickstart"


def daemon(work, config=None):
    """A daemon's ears on a cluster that has no rules of its own; by default checkpoints may lie beside the work folder."""
    config = config or Config(watch=WatchConfig(roots=(work.parent,)))
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Service(coordinator_on(work, FakeCluster(fleet=[])), config)
    made._hosting = Hosting()
    return made


def announce(ears, place, suite=SUITE, priority=0):
    leave_notice(ears.paths, Notice(checkpoint=str(place), suite=suite, priority=priority))


def put(ears, text, name="1.json"):
    """A file of any text in the inbox."""
    file = ears.paths.inbox / name
    file.write_text(text)
    file.chmod(0o600)
    return file


def obey(coordinator):
    """The commands in the inbox, as the daemon's next look obeys them."""
    coordinator.obey(Inbox(coordinator.performer.site.paths).look())


def refused(ears):
    return list(read_refusals(ears.paths, time.time()))


def taken(ears):
    return [
        Path(r.state.record.checkpoint.source).name for r in ears.coordinator.evaluations.running.values()
    ]


def until(ears, law, seconds=60):
    """Ticks of the daemon, while its cluster's time goes on."""
    end = time.monotonic() + seconds
    while not law():
        assert time.monotonic() < end
        ears.tick()
        ears.coordinator.tick()
        cluster = ears.coordinator.cluster
        assert isinstance(cluster, FakeCluster)
        cluster.advance()


def notices(ears):
    return len(list(ears.paths.inbox.glob("*.json")))


def small(folder, seed=0):
    return make_checkpoint(folder, shards=1, size=100, seed=seed)


def only(ears):
    (running,) = ears.coordinator.evaluations.running.values()
    return running
