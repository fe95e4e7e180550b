"""Commands to an evaluation that no process runs: `coordinator.runtime.control`."""

import os
import signal
from pathlib import Path

import pytest
from support.fake_cluster import FakeCluster, fake_node
from support.loops import coordinator_on
from support.simulated.parts import record

from coordinator.intake.inbox import Notice
from coordinator.runtime import wiring
from coordinator.runtime.control import ON_NODES, send_command
from coordinator.runtime.summary import read_summary
from coordinator.runtime.work_lock import WorkLock
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import WorkPaths


class Interrupted(FakeCluster):
    """A cluster whose jobs no `scancel` ends, at the third look at which Ctrl-C is typed."""

    looks = 0

    def cancel(self, *_):
        pass

    def jobs(self):
        self.looks += 1
        if self.looks == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().jobs()


def test_an_interrupt_of_a_pause_leaves_it_asked_for_and_nothing_open(tmp_path, monkeypatch, caplog):
    """The evaluation stays paused; one line says that jobs may still hold nodes, and what waits for them."""
    work = tmp_path / "work"
    work.mkdir(mode=0o700)
    cluster = FakeCluster(fleet=[fake_node("n1", gpus=1)])
    coordinator = coordinator_on(work, cluster)
    running = coordinator.evaluations.accept(record(1))
    name = running.state.evaluation_id
    while not any(info.job.purpose in ON_NODES for info in running.state.jobs.live.values()):
        coordinator.tick()
        cluster.advance()
    coordinator.evaluations.close()
    other = Interrupted(fleet=cluster.fleet, members=cluster.members)
    monkeypatch.setattr(wiring, "coordinator_of", lambda _config: coordinator_on(work, other))
    with pytest.raises(KeyboardInterrupt):
        send_command(Config(work_dir=work), name, Notice(command="pause", reason="tea"), "evalspan daemon")
    assert f"`evalspan pause {name}` waits until none does" in caplog.text
    assert read_summary(WorkPaths(work).evaluation(name)).paused == "tea"
    assert not WorkLock(WorkPaths(work).lock).held()
    opened = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in opened if path.is_relative_to(work)]
