"""Fair share between the users of one work folder: laws over random users, priorities and clusters."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.demands import clusters, demands, limits
from support.simulated.parts import SITE, Faults, record
from support.simulated.world import World, replay

from coordinator.allocation.allocate import Demand, Limits, allocate
from coordinator.allocation.demand import gpus_of_users
from coordinator.allocation.fair_share import Asker, Total, Usage, askers, counted, totals
from coordinator.cluster import NodeState
from coordinator.cluster.fake import fake_node
from coordinator.evaluation import events as ev
from coordinator.evaluation import step as machine

HALF_LIFE = 3600.0

of_users = st.lists(
    st.builds(
        Asker,
        user=st.sampled_from(["ann", "bob", "eve"]),
        used=st.floats(0, 1e6),
        holds=st.integers(0, 20),
        since=st.floats(0, 10),
    ),
    min_size=5,
    max_size=5,
)


def one_each(users: list[Asker]) -> list[Asker]:
    """The same account for each evaluation of a user."""
    first: dict[str, Asker] = {}
    return [first.setdefault(asker.user, asker) for asker in users]


@given(clusters(), demands(), limits, of_users)
def test_with_one_user_offers_are_those_by_priority_and_age(
    nodes: list[NodeState], asked: list[Demand], limit: Limits, users: list[Asker]
) -> None:
    """Whatever that user has used and holds."""
    mine = [replace(d, asker=users[0]) for d in asked]
    assert [d.evaluation_id for d in sorted(mine, key=lambda d: d.turn)] == [
        d.evaluation_id for d in sorted(asked, key=lambda d: (-d.priority, d.accepted_at, d.evaluation_id))
    ]
    assert allocate(nodes, mine, limit, gpus_in_use=0) == allocate(nodes, asked, limit, gpus_in_use=0)


@given(clusters(), demands(), limits, of_users, st.integers(0, 20))
def test_no_user_gets_more_gpus_than_the_bound(
    nodes: list[NodeState], asked: list[Demand], limit: Limits, users: list[Asker], most: int
) -> None:
    """Those that the user's other evaluations hold included."""
    mine = [replace(d, asker=a) for d, a in zip(asked, one_each(users), strict=False)]
    offers = allocate(nodes, mine, replace(limit, user_gpus=most), gpus_in_use=0)
    got: Counter[str] = Counter()
    for demand in mine:
        for offer in offers.get(demand.evaluation_id, ()):
            got[demand.asker.user] += offer.gpus - demand.in_use.get(offer.node, 0)
    for asker in {d.asker for d in mine}:
        assert got[asker.user] <= max(0, most - asker.holds)


@given(demands(), of_users, st.integers(1, 100))
def test_a_priority_moves_no_other_users_evaluation(
    asked: list[Demand], users: list[Asker], more: int
) -> None:
    """A user's evaluations keep their places among all when their priorities change; they change places with each other."""
    mine = [replace(d, asker=a) for d, a in zip(asked, one_each(users), strict=False)]
    raised = [replace(d, priority=d.priority + more) if i == 0 else d for i, d in enumerate(mine)]

    def owners(demands: list[Demand]) -> list[str]:
        return [d.asker.user for d in sorted(demands, key=lambda d: d.turn)]

    assert owners(mine) == owners(raised)


@dataclass
class Work:
    """An evaluation of the model: GPU seconds that are left, of at most `width` GPUs at once."""

    user: str
    number: int
    priority: int
    left: float
    width: int
    at: float
    has: int = 0
    used: float = 0.0
    began: float | None = None


class Cluster:
    """A cluster of nodes with one GPU, users whose evaluations come and end, and the daemon's rules of who is next."""

    def __init__(self, gpus: int, limit: Limits) -> None:
        self.nodes = [fake_node(f"n{i:02}", gpus=1) for i in range(gpus)]
        self.limit, self.now = limit, 0.0
        self.open: list[Work] = []
        self.usage = Usage()
        self.spent: Counter[str] = Counter()
        self.begun: list[Work] = []

    def submit(self, user: str, dice: random.Random, *, priority: int = 0) -> None:
        number = len(self.open) + len(self.begun) * 1000
        self.open.append(
            Work(user, number, priority, 60.0 * dice.randint(1, 60), dice.randint(1, 8), self.now)
        )

    def holds(self, user: str) -> int:
        return sum(w.has for w in self.open if w.user == user)

    def tick(self, seconds: float = 30.0) -> None:
        free = [replace(n, gpus_free=1) for n in self.nodes[sum(w.has for w in self.open) :]]
        since: dict[str, float] = {}
        for work in self.open:
            since[work.user] = min(work.at, since.get(work.user, work.at))
        accounts = {
            user: Asker(
                user=user, used=self.usage.gpu_seconds.get(user, 0.0), holds=self.holds(user), since=at
            )
            for user, at in since.items()
        }
        demands = [
            Demand(
                evaluation_id=str(i), priority=w.priority, accepted_at=w.at, gpus=w.width - w.has,
                gpus_per_trial=1, in_use={}, asker=accounts[w.user],
            )
            for i, w in enumerate(self.open)
            if w.has < w.width
        ]  # fmt: skip
        for name, offers in allocate(free, demands, self.limit, gpus_in_use=0).items():
            work = self.open[int(name)]
            work.has += len(offers)
            if offers and work.began is None:
                work.began = self.now
                self.begun.append(work)
        if self.limit.user_gpus is not None:
            assert all(self.holds(user) <= self.limit.user_gpus for user in since)
        self.now += seconds
        for work in self.open:
            work.left -= work.has * seconds
            work.used += work.has * seconds
            self.spent[work.user] += int(work.has * seconds)
        known = [
            Total(
                evaluation_id=f"{w.user}{w.at}{w.number}", user=w.user, gpu_seconds=w.used, over=w.left <= 0
            )
            for w in self.open
        ]
        self.usage = counted(self.usage, known, self.now, HALF_LIFE)
        self.open = [w for w in self.open if w.left > 0]


@settings(max_examples=8)
@given(st.integers(0, 1 << 32), st.integers(1, 16), st.integers(2, 4))
def test_users_who_always_ask_get_equal_shares(seed: int, gpus: int, count: int) -> None:
    """However large their evaluations are, how many each submits at once and which priorities they carry."""
    dice = random.Random(seed)
    cluster = Cluster(gpus, Limits())
    users = [f"u{i}" for i in range(count)]
    backlog = {user: dice.randint(2, 12) for user in users}
    while cluster.now < 24 * HALF_LIFE:
        for user in users:
            while sum(w.user == user for w in cluster.open) < max(backlog[user], 1 + gpus):
                cluster.submit(user, dice, priority=dice.choice([0, 100]) if user == "u0" else 0)
        for _ in range(20):
            cluster.tick(60.0)
    fair = sum(cluster.spent.values()) / count
    assert all(abs(cluster.spent[user] - fair) < 0.1 * fair + 3600.0 for user in users), cluster.spent


@settings(max_examples=20)
@given(st.integers(0, 1 << 32), st.integers(1, 8), st.none() | st.integers(1, 4))
def test_no_evaluation_starves_behind_another_users_flood(seed: int, gpus: int, most: int | None) -> None:
    """A user with one evaluation waits for GPUs that run now, not for the other's queue, whatever its priorities."""
    dice = random.Random(seed)
    cluster = Cluster(gpus, Limits(user_gpus=most))
    for _ in range(100):
        while len(cluster.open) < 30:
            cluster.submit("flood", dice, priority=100)
        cluster.tick(60.0)
    cluster.submit("one", dice)
    queued = [w for w in cluster.open if w.user == "flood" and w.began is None]
    for _ in range(600):
        while len(cluster.open) < 30:
            cluster.submit("flood", dice, priority=100)
        cluster.tick(60.0)
        if any(w.user == "one" for w in cluster.begun):
            break
    (one,) = [w for w in cluster.begun if w.user == "one"]
    assert all(w.began is None or w.began >= one.began for w in queued), (
        "served before older ones of the flood"
    )


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 1e5)), max_size=30))
def test_use_is_kept_by_user_and_not_by_ended_evaluation(ended: list[tuple[str, float]]) -> None:
    """It halves in a half-life; what each ended evaluation used is counted once."""
    usage, now = Usage(at=1.0), 1.0
    for number, (user, seconds) in enumerate(ended):
        for over in (False, True):
            total = Total(evaluation_id=str(number), user=user, gpu_seconds=seconds, over=over)
            usage = counted(usage, [total], now, HALF_LIFE)
    assert not usage.counted
    for user in "ab":
        spent = sum(s for u, s in ended if u == user)
        assert abs(usage.gpu_seconds.get(user, 0.0) - spent) <= len(ended) + 1e-6 * spent
    later = counted(usage, [], now + HALF_LIFE, HALF_LIFE)
    for user, spent in later.gpu_seconds.items():
        assert abs(spent - usage.gpu_seconds[user] / 2) < 1e-6 * spent + 1e-9
    assert not counted(usage, [], now + 100 * HALF_LIFE, HALF_LIFE).gpu_seconds


def test_gpu_seconds_follow_from_the_journal_and_a_stop_of_the_coordinator_counts_for_no_user() -> None:
    """A replay gives the same seconds and users; the world's steps take 5 s each."""
    rec = record(3).model_copy(update={"submitted_by": "ann"})
    world = World(3, Faults(), rec)
    world.run()
    state = replay(world.journal)
    assert state.users == world.state.users
    assert state.users.asked_by == ["ann"]
    comments = {info.job.comment for info in state.jobs.by_name.values()}
    assert comments == {f"{state.evaluation_id}/ann"}, "Slurm's accounting names the user"
    assert state.users.gpu_seconds > 0
    assert totals([state], world.now + 1e6)[0].gpu_seconds == state.users.gpu_seconds, "it has ended"
    for end in range(1, len(world.journal)):
        before = replay(world.journal[:end])
        if before.index.running:
            break
    held, at = before.users.gpu_seconds, before.users.counted_at
    machine.step(before, SITE, ev.Restarted(at=at + 7200, seen_at=at + 10))
    assert before.users.gpu_seconds == held + 10 * len(replay(world.journal[:end]).index.running)


def test_of_two_users_the_first_pays_and_after_a_cancellation_the_one_who_asks_again() -> None:
    state, _ = machine.start(ev.Accepted(at=0, record=record(1).model_copy(update={"submitted_by": "ann"})))

    def take(event: ev.AnyEvent) -> list[str]:
        machine.step(state, SITE, event)
        return state.users.asked_by

    assert take(ev.AskedFor(at=1, user="bob")) == ["ann", "bob"]
    assert take(ev.AskedFor(at=1, user="bob")) == ["ann", "bob"]
    assert take(ev.AskWithdrawn(at=2, user="ann")) == ["bob"]
    assert take(ev.AskWithdrawn(at=2, user="bob")) == ["bob"]
    assert askers([state], Usage(), gpus_of_users([state]))["bob"].user == "bob"
    take(ev.CancelAsked(at=3, reason="no use"))
    assert take(ev.AskedFor(at=4, user="eve")) == ["eve"]
