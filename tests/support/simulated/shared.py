"""Several seeded worlds on one small cluster: evaluations that arrive, contend for GPUs and memory, and lose them again.

The rules under test are the real ones: `needs`, `allocation`, `ahead`, and each evaluation's machine. A job starts once
its node has the GPUs and the memory that it asks for; others' jobs come and go; nodes go down and come back.
"""

import random
from dataclasses import replace

from coordinator.decide.allocation import allocate, demand, job_limits
from coordinator.decide.allocation.allocate import Limits
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation.state import FEWER_SECONDS
from coordinator.runtime import detect
from support.fake_cluster import fake_node
from support.simulated.parts import record
from support.simulated.world import World


class Tenant(World):
    """One evaluation: the cluster says when its jobs start, and the daemon's rules which nodes it is offered."""

    def __init__(self, seed, shared, number):
        dice = random.Random(seed)
        wide = {"gpus_per_trial": min(shared.gpus, 2)} if dice.random() < 0.3 else {}
        few = {"max_trials": dice.randint(1, 4)} if dice.random() < 0.3 else {}
        own = {"plan": {"steal": dice.random() < 0.7}}
        base = record(dice.randint(1, 4), trial={"memory_mb": 20, **wide}, **few, **own)
        rec = base.model_copy(
            update={
                "evaluation_id": f"step-{number}-suite-{number:08d}",
                "checkpoint": base.checkpoint.model_copy(update={"digest": dice.choice("abc")}),
                "priority": dice.choice([0, 0, 5]),
                "accepted_at": shared.now,
            }
        )
        self.shared = shared
        super().__init__(seed, shared.faults, rec, gpus=shared.gpus)
        self.now = shared.now

    def starts(self, job, _member):
        return self.shared.starts(job, self.dice)

    def nodes(self):
        """What the cluster has is offered to all evaluations at once."""

    def limit_events(self, grace):
        """As `loop._make_way` does."""
        shared, own = self.shared, self.state
        others = any(job_limits.has_working_job(t.state) for t in shared.open if t is not self)
        found = detect.limit_events(own, shared.kept_out(), self.seen, grace, self.now, others=others)
        if found:
            in_use = demand.nodes_in_use([t.state for t in shared.open])
            shared.few = max(1, len(in_use)), self.now + FEWER_SECONDS
        return found


class Shared:
    """The cluster and the daemon's part that looks at all evaluations."""

    def __init__(self, seed, faults):
        self.dice = dice = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.names = [f"n{i}" for i in range(dice.randint(1, 4))]
        self.gpus = dice.choice([1, 2, 4, 8])
        self.memory = dice.choice([600, 1200, 3000])  # MiB: of one precursor, of two, of more
        self.limits = Limits(
            max_nodes=dice.choice([None, None, 1, 2]), max_gpus=dice.choice([None, None, 2, 4])
        )
        self.share = dice.choice([0.0, 0.5, 1.0])
        self.contention = dice.choice([0.0, 0.1])  # another user's job takes GPUs of a node
        self.outages = dice.choice([0.0, 0.02])
        self.releases = dice.choice([0.0, 0.02])  # the operator wants a node back
        self.foreign = dict.fromkeys(self.names, 0)
        self.down = set()
        self.arrivals = sorted(dice.randint(0, 60) * 5.0 for _ in range(dice.randint(2, 5)))
        self.tenants = []
        self.in_use = 0  # GPUs of all evaluations, in the last turn
        self.few = (0, 0.0)  # nodes that a limit on jobs left, until when

    @property
    def open(self):
        return [t for t in self.tenants if t.state.ended_at is None]

    def used(self, node):
        """GPUs and MiB of a node that running jobs hold."""
        jobs = [j for t in self.tenants for j in t.jobs.values() if j.job.node == node]
        running = [(sum(x.phase == "running" for x in j.members.values()), j.job) for j in jobs]
        gpus = self.foreign[node] + sum(n * job.gpus for n, job in running)
        return gpus, sum(n * job.memory_mb for n, job in running)

    def starts(self, job, dice):
        node = job.job.node
        if node is None:
            return dice.random() < 0.6
        gpus, memory = self.used(node)
        fits = gpus + job.job.gpus <= self.gpus and memory + job.job.memory_mb <= self.memory
        return node not in self.down and fits and dice.random() < 0.8

    def kept_out(self):
        """Jobs that wait for a limit on this user's jobs."""
        return {}

    def listing(self):
        found = []
        for name in self.names:
            gpus, memory = self.used(name)
            node = fake_node(name, gpus=self.gpus, memory_mb=self.memory)
            free = {"gpus_free": max(0, self.gpus - gpus), "memory_free_mb": self.memory - memory}
            found.append(replace(node, usable=name not in self.down, gpu_type="", **free))
        return found

    def change(self):
        """Others' jobs and outages."""
        roll = self.dice.random
        for name in self.names:
            if self.foreign[name] and roll() < 0.1:
                self.foreign[name] = 0
            elif not self.foreign[name] and roll() < self.contention:
                free = max(0, self.gpus - self.used(name)[0])
                self.foreign[name] = min(free, self.dice.randint(1, self.gpus))
            if name in self.down and roll() < 0.1:
                self.down.discard(name)
            elif name not in self.down and roll() < self.outages:
                self.down.add(name)
                for tenant in self.tenants:
                    tenant.kill(nodes=[name])

    def offer(self):
        """As `daemon._offer` does."""
        nodes, tenants = self.listing(), {t.state.evaluation_id: t for t in self.open}
        for tenant in self.open:
            uses = [n.name for n in tenant.state.nodes.by_name.values() if n.in_use]
            gone = [n for n in uses if n in self.down]
            if uses and self.dice.random() < self.releases:
                gone = sorted({*gone, self.dice.choice(uses)})
            tenant.take([ev.NodeWithdrawn(at=self.now, node=n, reason="gone") for n in gone])
        states = [t.state for t in self.open]
        for rule in (demand.nodes_taken_by_others, demand.nodes_in_the_way):
            for name, node in rule(states, nodes, self.now):
                tenants[name].tell(ev.NodeWithdrawn, node=node, reason="taken, or in the way")
        first = job_limits.first_kept_out(states, self.kept_out())
        for name, node, why in list(job_limits.given_up_nodes(states, first)):
            tenants[name].tell(ev.NodeWithdrawn, node=node, reason=why)
        demands, few = demand.gpu_demands(states), self.now < self.few[1]
        limits = replace(self.limits, max_nodes=self.few[0]) if few else self.limits
        offered = demand.make_offers(states, nodes, job_limits.not_behind(demands, first), limits, {})
        waiting, held = demand.prefetch_candidates(states, demands), demand.held_checkpoints(states)
        staged = allocate.choose_prefetches(nodes, waiting, held, self.limits, share=self.share)
        for tenant in self.open:
            name = tenant.state.evaluation_id
            if offers := offered.get(name):
                tenant.tell(ev.NodesOffered, offers=offers)
            if first is None and not few and (names := staged.get(name)):
                tenant.tell(ev.MemoryOffered, nodes=names)

    def arrives(self):
        return Tenant(self.dice.randrange(1 << 32), self, len(self.tenants))

    def run(self, most=4000):
        for _ in range(most):
            if not self.arrivals and not self.open:
                return
            while self.arrivals and self.arrivals[0] <= self.now:
                self.arrivals.pop(0)
                self.tenants.append(self.arrives())
            self.change()
            for tenant in self.open:
                tenant.tick()
            self.now += 5.0
            # what is given back is offered at once
            in_use, self.in_use = self.in_use, demand.gpus_in_use([t.state for t in self.open])
            if self.dice.random() < 0.5 or self.in_use < in_use:
                self.offer()
        raise AssertionError(f"not ended: {[t.summary() for t in self.open]}")
