"""A coordinator under faults: who strikes it when and where, and how it ends. The faults are in `faults`."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from dev_cluster import procs
from dev_cluster.api import DevClusterError

from chaos_lib.faults import Fault
from chaos_lib.hosts import Hosts
from chaos_lib.site import Site
from coordinator.runtime.work_lock import WorkLock
from evaljobs.contract.paths import WorkPaths

AWAY_S = 10.0  # that a node stays away where several faults strike
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Run:
    """A coordinator under faults: its process is replaced where a fault ends it."""

    site: Site
    hosts: Hosts
    process: subprocess.Popen[str]
    dice: random.Random
    strikes: list[tuple[str, str]] = field(default_factory=list)  # (fault, what was hit)
    # fault -> seconds from its end until another shard was counted
    recovered: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # laws, one line each
    over: bool = False
    threads: list[threading.Thread] = field(default_factory=list)
    # held from its kill until its successor's start
    replacing: threading.Lock = field(default_factory=threading.Lock)

    def found(self, look: Callable[[], T | None]) -> T | None:
        """What `look` finds, once it finds something; None where the run is over before."""
        while (what := look()) is None:
            if self.over:
                return None
            time.sleep(0.05)
        return what

    def wait(self, law: Callable[[], bool]) -> bool:
        """False where the run is over before `law` holds."""
        return self.found(lambda: law() or None) is not None

    def at_work(self) -> bool:
        """Wait for a coordinator that has the work folder; False where the run is over before."""
        return self.wait(WorkLock(WorkPaths(self.site.work).lock).held)

    def wait_seconds(self, seconds: float | None) -> None:
        """Wait so long, or until the run is over; None: until then."""
        end = None if seconds is None else time.monotonic() + seconds
        self.wait(lambda: end is not None and time.monotonic() > end)

    def kill_coordinator(self, away_s: float = 0.0) -> str | None:
        """SIGKILL, once it has the work folder, and start another after `away_s` seconds."""
        self.at_work()
        with self.replacing:
            if self.over:
                return None
            old = self.process
            old.send_signal(signal.SIGKILL)
            old.wait()
            time.sleep(away_s)
            self.process = self.site.start()
            return f"pid {old.pid}"

    def node_of(self, verb: str) -> str | None:
        """A node that runs a job of this verb."""
        pid = self.victim(verb)
        if pid is None:
            return None
        return next((n for n in self.site.cluster.gpu_nodes if pid in self.site.cluster.node_pids(n)), None)

    def victim(self, verb: str) -> int | None:
        """Host pid of one of the site's jobs of this verb, once there is one; None where the run is over."""
        pids = self.found(lambda: self.site.processes_of(verb) or None)
        return self.dice.choice(pids) if pids else None

    def begin(self, work: Callable[..., object], *what: object) -> None:
        """Let a part of the run go on beside the others, until it is over."""
        self.threads.append(threading.Thread(target=work, args=what, daemon=True))
        self.threads[-1].start()

    def join(self, seconds: float) -> None:
        """Wait for what was begun; each part has so long."""
        for thread in self.threads:
            thread.join(seconds)
        self.broken += ["a fault did not end"] * any(thread.is_alive() for thread in self.threads)

    def administer(self) -> None:
        """Bring back each node that Slurm has shown as down or drained for a while."""
        cluster, away = self.site.cluster, dict[str, float]()
        while not self.over:
            time.sleep(1.0)
            states = cluster.node_states()
            gone = {n for n in cluster.gpu_nodes if states.get(n, "").startswith(("down", "drain"))}
            away = {n: away.get(n, time.monotonic()) for n in gone}
            for node in [n for n, since in away.items() if time.monotonic() - since > AWAY_S]:
                with contextlib.suppress(DevClusterError):
                    cluster.bring_back(node)
                del away[node]

    def strike_after(self, fault: Fault, events: int) -> None:
        """Strike once the journal holds so many events. What a fault raises counts as a broken law; the run goes on."""
        if not self.wait(lambda: len(self.site.events()) >= events):
            return
        try:
            if (hit := fault.strike(self)) is not None:
                self.strikes.append((fault.name, f"after {events} events: {hit}"))
                self.await_shard(fault.name)
        except Exception as error:  # noqa: BLE001
            self.broken.append(f"{fault.name} could not strike: {type(error).__name__}: {error}")

    def await_shard(self, fault: str) -> None:
        """Measure the seconds from now, the end of a fault, until another shard is counted; nothing where none is left."""
        began, counted = time.monotonic(), self.site.shards()
        if self.wait(lambda: self.site.shards() > counted):
            self.recovered[fault] = time.monotonic() - began

    def await_end(self, seconds: float) -> None:
        """Wait through the kills of the coordinator for its own end, which comes in time and with status 0."""

        def ended() -> bool:
            process = self.process
            if process.poll() is None:
                return False
            with self.replacing:  # a fault that ends it puts another in its place
                self.over = process is self.process
            return self.over

        in_time = procs.poll(ended, deadline_s=seconds, every_s=0.1)
        self.over = True
        if not in_time:
            self.broken.append(f"the coordinator did not end within {seconds:g} s")
            self.process.kill()
        words = (self.site.folder / "eval.log").read_text()[-600:]
        if self.process.wait() != 0 and in_time:
            self.broken.append(f"the coordinator ended with {self.process.returncode}: {words}")


@contextlib.contextmanager
def under_faults(site: Site, hosts: Hosts, dice: random.Random) -> Iterator[Run]:
    """A run of the site's coordinator. Afterwards no process of it is left; what broke a law is swept from the cluster."""
    run = Run(site=site, hosts=hosts, process=site.start(), dice=dice)
    try:
        yield run
    finally:
        run.over = True
        run.process.kill()
        run.process.wait()
        hosts.calm()
        if site.redis is not None:
            site.redis.kill()
        if run.broken:
            site.sweep()
