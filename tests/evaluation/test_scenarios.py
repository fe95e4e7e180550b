"""The machine on seeded clusters, a row a scenario: what goes wrong there, and what becomes of the evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn import some
from support.simulated.parts import FIRST_MB, Faults, limited, record
from support.simulated.world import BANNED, UNFIT, VAGUE, World, replay

from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation import jobs, nodes
from coordinator.decide.evaluation.builds import MIN_TOKEN_BUDGET
from coordinator.decide.evaluation.footprint import MAX_DOUBLINGS
from coordinator.decide.evaluation.job_ends import MAX_DEATHS, MAX_DEATHS_IN_A_ROW
from coordinator.decide.evaluation.records import Inputs
from coordinator.decide.evaluation.state import HELD_SECONDS, MAX_HELD_SECONDS
from coordinator.runtime.detect import FORGOTTEN_JOB_TRIES
from evaljobs.contract.names import ShardId
from evaljobs.contract.specs import Sources, TaskEntry

TICK = 5.0
STORM = {
    "kill": 0.01, "submit_waits": 0.2, "submit_lost": 0.05, "submit_timeout": 0.05, "vanish": 0.2, "listing": 0.2,
    "wipe_queue": 0.03, "lose_metric": 0.05, "restart": 0.05, "node_down": 0.01, "slow_outcome": 0.3,
}  # fmt: skip
NEVER = "PartitionTimeLimit", "QOSMaxWallDurationPerJobLimit", "AssocMaxWallDurationPerJobLimit"
LIMITED = "QOSMaxJobsPerUserLimit"
ONE_JOB = "AssocMaxJobsLimit"
LONG = "gpu-node-of-the-very-long-named-cluster-in-building-000"
FAST = {"mode": "fast", "token_budget": 8192}
SIXTEEN = tuple(TaskEntry(name=f"t{i}", batch_size=16 if i == 2 else None) for i in range(4))
SETTINGS = {"build": "[trial] memory_mb", "trial": "[trial] memory_mb", "metric": "[metric] memory_mb"}
C_NODES = [f"c{i}" for i in range(60)]
BUSY = {
    "submit_waits": 0.2, "submit_timeout": 0.05, "listing": 0.2, "wipe_queue": 0.02, "restart": 0.05, "slow_outcome": 0.3,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """`ends`: "scored": every entry; "said": those that are not say after how many tries, or the evaluation says why;
    "failed": each of them, with words of `says`. `fails`: entries that do so where all others are scored.
    """

    faults: dict[str, float] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    odd: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[int, int] = (1, 4)  # fewest, most
    gpus: int | tuple[int, ...] = 2  # of each node; several: by the seed
    # so many shards (-1: all) of this entry ("*": all) take their trials down
    poison: tuple[str, int] = ("", 0)
    ends: Literal["scored", "said", "failed"] = "scored"
    fails: tuple[str, ...] = ()
    says: str = ""  # part of each failed entry's error
    warns: str = ""  # part of a warning in every run
    blames: bool = True  # may a node be in back-off?
    long: bool = False  # not in a quick run of the tests
    holds: Callable[[World], bool] = lambda _world: True  # of a world that has ended
    # the same by more than one assertion, or goes on with it
    check: Callable[[World], None] = lambda _world: None
    examples: int = 7

    def world(self, seed, count):
        options = dict(self.record)
        made = limited(**options) if "limits" in options else record(**options)
        gpus = self.gpus if isinstance(self.gpus, int) else self.gpus[seed % len(self.gpus)]
        world = World(seed, Faults(**self.faults), made, nodes=count, gpus=gpus, **self.odd)
        entry, many = self.poison
        if entry:
            world.until(lambda w: w.state.shards.leaves)
            leaves = world.state.shards.leaves
            of = list(world.state.shards.by_name) if entry == "*" else list(leaves[entry].planned.shards)
            word = "OUT_OF_MEMORY" if world.odd.silent else VAGUE
            world.odd.poison = dict.fromkeys(of if many < 0 else of[:many], word)
        return world


def uses(world):
    return list(world.state.nodes.by_name.values())


def once_each(world):
    """Each entry is scored once, each shard is run once."""
    assert set(world.scored_with.values()) == {1}
    assert all(n == 1 for n in world.frames.values())


def bounded(world):
    assert max(world.enqueued.values()) <= FORGOTTEN_JOB_TRIES.limit
    assert not world.state.ending.reason


def converted_first(world):
    purposes = [j.job.purpose for j in world.jobs.values()]
    assert purposes[0] == "convert"
    assert world.converted or set(purposes) == {"convert"}
    scored = all(e.status == "scored" for e in world.state.entries)
    assert not scored or world.state.record.checkpoint.announced == "/c"


def n0_alone(world):
    node = world.state.nodes.by_name["n0"]
    told = [w for w in world.state.warnings if UNFIT in w]
    assert not node.back_offs or (UNFIT in node.why and any("n0 is in back-off" in w for w in told))
    assert not any("n1" in w for w in told)


def bad_node_alone(world):
    """The healthy nodes are in use, and the bad one is in back-off if it had the time to fail again and again."""
    resting = [w for w in world.state.warnings if "is in back-off" in w]
    assert all(w.startswith("node n0") for w in resting)
    late = 4 if world.faults.restart else 0  # with shards that another trial has done meanwhile
    assert resting or world.died_at.get("n0", 0) < (MAX_DEATHS + 1) * world.gpus + late


def few_deaths(world):
    """Each shard takes few trials down, and no node that works is out of use for longer than one back-off, or two."""
    late = 2 * MAX_DEATHS if world.faults.restart else MAX_DOUBLINGS if world.odd.silent else 0
    assert max(world.deaths.values()) <= MAX_DEATHS * (len(world.node_names) + 1) + late
    for node in uses(world):
        # an outcome that comes after its trial's end says of no shard that it was at fault
        assert node.back_offs <= (2 if world.faults.slow_outcome else 1), world.summary()


def bounded_deaths(world):
    """A bounded number of trials is tried."""
    shards, count = len(world.state.shards.by_name), len(world.node_names)
    assert sum(world.died_at.values()) <= 2 * MAX_DEATHS * shards + 8 * count


def at_fault_at_once(world):
    """One trial a lane dies on a node without GPUs before its back-off."""
    node = world.state.nodes.by_name.get("n0")
    assert node is None or world.died_at.get("n0", 0) <= world.gpus * (node.back_offs + 1)
    assert not any("n1" in w for w in world.state.warnings)


def limits_grow(world):
    """No shard is blamed; each next trial on a lane asks for at least as long, never for more than the settings allow."""
    assert not any(s.died_on for s in world.state.shards.by_name.values())
    asked = {}
    for job in world.of("trial"):
        for lane in job.spec.lanes:
            asked.setdefault(lane.lane, []).append(job.job.time_limit_seconds)
    assert all(limits == sorted(limits) for limits in asked.values())
    assert max(map(max, asked.values())) <= world.record.options.trial.time_limit_seconds


def asked_for_more(world):
    """Twice as much, three times."""
    assert max(world.asked_mb) == min(world.asked_mb) << MAX_DOUBLINGS
    assert sum("for lack of memory" in w for w in world.state.warnings) == MAX_DOUBLINGS


def mended(world, **odd):
    """With the reason gone, a retry scores what had failed."""
    vars(world.odd).update(odd)
    world.workers_stopped = False
    world.tell(ev.RetryAsked)
    world.run_to_scores()


def scored_again(world):
    """A retry scores once more what lacks items, from the responses that are there."""
    assert world.state.unscored_items == len(world.state.entries)
    frames = dict(world.frames)
    world.faults.item_fails = 0.0
    mended(world)
    assert not world.state.unscored_items
    assert world.frames == frames
    assert set(world.scored_with.values()) == {2}


def named_the_setting(world):
    """No more than three times; a retry goes on from there."""
    ((purpose, takes),) = world.odd.takes_mb.items()
    assert max(world.asked_mb) == takes // 2 == FIRST_MB[purpose] << MAX_DOUBLINGS
    mended(world)


def sent_for_workers(world):
    """With pauses, for a quarter of an hour; a retry sends for more."""
    workers = {job.job.name for job in world.of("metric")}
    ends = [e.at for e in world.journal if isinstance(e, ev.JobEnded) and e.job in workers]
    assert len(ends) >= world.state.scoring.fruitless.limit
    assert ends[-1] - ends[0] > 900
    mended(world, ends_workers=False)


def waited_for_no_worker(world):
    """With all scored by the first worker, the second, still queued, is gone at once."""
    scores = [e.at for e in world.journal if isinstance(e, ev.OutcomeSeen) and e.outcome.kind == "scored"]
    assert any(job.job.count == 3 for job in world.of("metric"))
    assert world.now - scores[-1] <= 3 * TICK


def never_mixed(world):
    """Each entry is scored from answers in one cut; a budget is reduced once for each that was too large."""
    state = world.state
    assert not state.ending.reason
    for leaf in state.shards.leaves.values():
        (cut,) = {ShardId.parse(shard).cut for shard in leaf.planned.shards}
        assert leaf.planned.executes or cut == state.cut_of(state.entries[leaf.planned.entry])
    budgets = {entry.index: [8192] for entry in state.entries}
    for event in world.journal:
        if isinstance(event, ev.TokenBudgetReduced):
            assert budgets[event.entry][-1] > world.fits
            assert MIN_TOKEN_BUDGET <= event.token_budget <= budgets[event.entry][-1] / 2
            budgets[event.entry].append(event.token_budget)
    assert all(budgets[e.index][-1] == (e.token_budget or 8192) for e in state.entries)
    assert sum("starts again" in warning for warning in state.warnings) == sum(map(len, budgets.values())) - 4


def said_what_to_type(world):
    (error,) = (e.error for e in world.state.entries if e.error)
    assert "a batch of 2 rows (batch_size = 16)" in error
    assert "(A100): CUDA out of memory; 1 fits: set batch_size = 1 in [[task]] t2 of suite suite" in error
    assert not any(e.token_budget for e in world.state.entries)


def no_gpu_before_its_offer(world):
    """No job with GPUs starts before they are offered; where nothing dies, weights are staged before."""
    gpu_jobs = {name for name, info in world.state.jobs.by_name.items() if info.job.gpus}
    offered = next(e.at for e in world.journal if isinstance(e, ev.NodesOffered))
    started = {e.job: e.at for e in world.journal if isinstance(e, ev.JobSubmitted)}
    assert min(at for job, at in started.items() if job in gpu_jobs) >= offered
    assert world.faults.kill or min(at for job, at in started.items() if "-stage-" in job) < offered


def in_planned_lanes(world):
    """Every shard is run once, by a trial of its planned lane, and no lane has two trials."""
    (plan,) = (e for e in world.journal if isinstance(e, ev.Planned))
    trials = world.state.trials.by_name
    dumped = [pair for e in world.journal if isinstance(e, ev.ShardsDumped) for pair in e.shards]
    ran = {shard: trials[frame.file.removesuffix(".frames")].lane for shard, frame in dumped}
    assert ran == {shard: lane.lane for lane in plan.lanes for shard, _, _ in lane.shards}
    assert len({trial.lane for trial in trials.values()}) == len(trials)
    once_each(world)


def early(world):
    """How many trials ran when the last task was planned."""
    planned = next(n for n, e in enumerate(world.journal) if isinstance(e, ev.Planned))
    return sum(isinstance(e, ev.JobStarted) and "-trial-" in e.job for e in world.journal[:planned])


def rested_longer_each_time(world):
    """A minute, then two; back in use, one more death and it rests again."""
    rests = [e.until - e.at for e in world.journal if isinstance(e, ev.NodeBackedOff)]
    assert len(rests) > 2
    assert rests == [min(60.0 * 2**number, nodes.MAX_BACK_OFF_SECONDS) for number in range(len(rests))]


def with_growing_pauses(world):
    assert not any(info.submissions.failures for info in world.state.jobs.by_name.values())
    assert not world.odd.opens or max(map(len, world.refusals.values())) > 8
    for times in world.refusals.values():
        for number, (before, after) in enumerate(pairwise(times)):
            assert after - before >= min(HELD_SECONDS * 2**number, MAX_HELD_SECONDS)


def no_new_attempts(world):
    """A precursor that follows one at its limit counts no attempt, and no trial reads storage."""
    for name in world.node_names:
        assert (
            sum(job.job.node == name for job in world.of("stage"))
            > world.state.nodes.by_name[name].staging.limit
        )
        assert world.state.nodes.by_name[name].rung != "storage"


def sought_with_the_content(world):
    """Before any trial starts; once more where the requests were built before the first copy was whole."""
    kinds = [e.outcome.kind if isinstance(e, ev.OutcomeSeen) else e.kind for e in world.journal]
    trials = [isinstance(e, ev.JobIntended) and e.job.purpose == "trial" for e in world.journal]
    last = len(kinds) - 1 - kinds[::-1].index("responses-found")
    assert kinds.index("staged") < last < trials.index(True)
    assert searches(world) in ([True, False], [False])


def searches(world):
    """Of each search for answers, whether the content was unknown."""
    return [e.alike for e in world.journal if isinstance(e, ev.ResponsesFound)]


ROWS = {
    "nothing goes wrong": Row(blames=False, check=once_each),
    "jobs, submissions, nodes, the queue and the coordinator die": Row(STORM, ends="said", examples=33),
    "the coordinator dies in a write": Row(
        {"torn": 0.3, "metric_fails": 0.5, "kill": 0.02, "slow_outcome": 0.2}, ends="failed", examples=10
    ),
    "nodes have long names": Row(
        {"kill": 0.02, "restart": 0.05}, odd={"names": LONG}, nodes=(3, 3), examples=5,
        holds=lambda w: {j.job.node for j in w.of("stage")} == set(w.node_names),
    ),
    "lanes keep their shards": Row(record={"plan": {"steal": False}}, nodes=(3, 3), check=in_planned_lanes),
    "weights are staged ahead of GPUs": Row(odd={"ahead": True}, nodes=(4, 4), check=no_gpu_before_its_offer),
    "the same, and jobs die": Row(
        {"stage_fails": 0.3, "kill": 0.03, "submit_timeout": 0.1, "restart": 0.02}, odd={"ahead": True}, ends="failed",
        check=no_gpu_before_its_offer, examples=10,
    ),
    **{
        f"units of {fits} tokens fit": Row(
            {"too_large": often, "kill": 0.01, "submit_timeout": 0.05, "listing": 0.2, "wipe_queue": 0.03, "lose_metric": 0.05,
             "restart": 0.05, "slow_outcome": 0.3},
            {"entries": 4, "suite": FAST}, {"fits": fits}, nodes=(1, 3), ends="said", check=never_mixed, examples=5,
        )
        for fits, often in [(300, 0.5), (300, 1.0), (1024, 1.0), (2048, 0.5), (5000, 0.1)]
    },
    "an exact batch does not fit": Row(
        {"too_large": 1.0}, {"entries": 4, "suite": {"tasks": SIXTEEN}}, {"fits": 8}, nodes=(2, 2), ends="failed",
        fails=("t2",), says="task t2", check=said_what_to_type, examples=5,
    ),
    **{
        f"trials of limits {limits} load early: {running}": Row(
            record={"limits": limits, "early_trials": wanted}, odd={"builds_from": 100.0}, nodes=(2, 2),
            holds=lambda w, running=running: early(w) == running, examples=2,
        )
        for limits, wanted, running in [((8, 8), True, 4), ((8, 8), False, 0), ((8, None), True, 0), ((8, 0.5), True, 0)]
    },
    "checkpoints are converted first": Row(
        {"kill": 0.05, "convert_fails": 0.05, "submit_lost": 0.1, "vanish": 0.2, "restart": 0.1},
        {"convert": "x"}, ends="said", check=converted_first, examples=13,
    ),
    "preemption": Row({"preempt": 0.15, "listing": 0.1}, nodes=(1, 3), blames=False, examples=13),
    "nodes drain while submissions are in doubt": Row(
        {"submit_waits": 0.3, "submit_lost": 0.2, "submit_timeout": 0.3, "drain": 0.1, "restart": 0.03, "listing": 0.1},
        nodes=(2, 4), gpus=8, ends="said", examples=33,
    ),
    "trials are named as stragglers": Row({**STORM, "straggle": 0.5, "node_down": 0}, {"entries": 4}, nodes=(1, 3), ends="said"),
    "all of them are": Row({"straggle": 1.0, "restart": 0.05}, {"entries": 4}, nodes=(1, 3)),
    "builds, staging and metrics fail": Row(
        {"kill": 0.2, "build_fails": 0.5, "stage_fails": 0.5, "metric_fails": 0.5}, nodes=(2, 2), ends="failed", examples=20
    ),
    "each metric job takes its worker down": Row(
        {"metric_dies": 1.0}, ends="failed", fails=("t0", "t1", "t2"), says="abandoned", check=bounded
    ),
    "some metric jobs do": Row({"metric_dies": 0.3}, ends="failed", says="abandoned", check=bounded),
    "the queue forgets each metric job": Row({"lose_metric": 1.0}, ends="failed", says="forgot", check=bounded),
    "a build ends its job": Row(
        {"slow_outcome": 0.1}, {"entries": 7, "build_jobs": 2}, {"deadly": 2}, fails=("t2",), says="its build job ended 3 times"
    ),
    "trials load while requests are built": Row(
        {"kill": 0.03, "restart": 0.05, "wipe_queue": 0.03, "build_fails": 0.2, "slow_outcome": 0.2, "listing": 0.1},
        {"limits": [8, 8, 8], "early_trials": True}, nodes=(2, 2), ends="failed", examples=13,
    ),
    "the same without stealing": Row(
        {"kill": 0.03, "restart": 0.05, "wipe_queue": 0.03, "build_fails": 0.2, "slow_outcome": 0.2, "listing": 0.1},
        {"limits": [8, 8], "early_trials": True, "plan": {"steal": False}}, nodes=(2, 2), ends="failed",
    ),
    "CPU nodes cannot launch builds": Row(
        odd={"unlaunchable": frozenset(C_NODES[:4])}, warns="could not launch",
        holds=lambda w: set(w.of("build")[-1].job.exclude) in (set(), set(C_NODES[:4])), examples=5
    ),
    "no CPU node can": Row(
        odd={"unlaunchable": frozenset(C_NODES)}, ends="failed", fails=("t0", "t1", "t2"),
        says="no node could launch its build job",
        holds=lambda w: w.now > 600.0 and not any("log" in e.error for e in w.state.entries), examples=5,
    ),
    "no arrays": Row({"kill": 0.02}, {"entries": 4, "workers": 4, "array_size": 1}, {"array": 1}, gpus=4, nodes=(2, 2)),
    "small arrays": Row({"kill": 0.02}, {"entries": 4, "workers": 4, "array_size": 2}, {"array": 2}, gpus=4, nodes=(2, 2)),
    "a limit on submissions": Row(
        {"restart": 0.02, "submit_waits": 0.2}, {"entries": 4, "workers": 2}, {"submitted": 5}, nodes=(2, 2),
        blames=False, check=with_growing_pauses, examples=13,
    ),
    "it is full for hours": Row({}, {"entries": 2}, {"opens": 10_000.0}, nodes=(2, 2), check=with_growing_pauses, examples=1),
    "a worker does not start": Row(
        record={"entries": 6, "workers": 3}, odd={"full": ("metric", 1), "workers": 3}, nodes=(2, 2),
        check=waited_for_no_worker, examples=5,
    ),
    "workers end at once": Row(
        odd={"ends_workers": True}, ends="failed", says="worker jobs ended", check=sent_for_workers, examples=2
    ),
    "precursors fill it": Row({"restart": 0.01}, {"entries": 4}, {"submitted": 3}, nodes=(3, 3), gpus=1),
    "a limit on running jobs": Row(
        {"restart": 0.01}, {"entries": 4}, {"running": 2, "reason": LIMITED}, nodes=(2, 2)
    ),
    "nodes are given up for it": Row(
        {"restart": 0.01}, {"entries": 4}, {"running": 2, "reason": LIMITED}, nodes=(3, 8), warns=f"{LIMITED}"
    ),
    "nodes are kept whose trials find a place": Row(
        record={"entries": 8}, odd={"running": 7, "reason": LIMITED}, nodes=(8, 8), gpus=2,
        holds=lambda w: w.state.nodes.most <= 7 // 3, examples=5,
    ),
    "three places for three nodes": Row({"restart": 0.01}, {"entries": 4}, {"running": 3, "reason": LIMITED}, nodes=(3, 8)),
    "four places for two nodes": Row({"restart": 0.01}, {"entries": 4}, {"running": 4, "reason": LIMITED}, nodes=(2, 2)),
    "one job at a time": Row(
        {"restart": 0.01}, {}, {"running": 1, "reason": ONE_JOB}, nodes=(1, 1), warns=ONE_JOB,
        holds=lambda w: any(n.hosted for n in uses(w)), examples=8
    ),
    "hosts": Row(record={"stage": {"host_trials": True}}, nodes=(1, 3),
        holds=lambda w: {j.job.purpose for j in w.jobs.values()} == {"build", "host", "metric"} and set(w.frames.values()) == {1}),
    "hosts die": Row({**STORM, "stage_fails": 0.05, "submit_waits": 0, "lose_metric": 0}, {"stage": {"host_trials": True}},
        nodes=(1, 3), ends="said", examples=27),
    "hosts never stage": Row({"stage_fails": 1.0}, {"stage": {"host_trials": True}}, ends="failed", fails=("t0", "t1", "t2")),
    "a limit holds hosts with one lane": Row(
        {"restart": 0.01}, {"stage": {"host_trials": True}}, {"host_gpus": 1, "reason": "QOSGrpCpuLimit"}, nodes=(2, 2),
        holds=lambda w: any(j.job.gpus == 2 for j in w.jobs.values()) and any(n.lanes == 1 for n in uses(w)), examples=5,
    ),
    "/dev/shm is private": Row(
        {"slow_outcome": 0.2, "restart": 0.05}, odd={"private": True}, nodes=(1, 3), warns="private",
        holds=lambda w: any(n.hosted for n in uses(w)), examples=13
    ),
    "nodes lose their memory": Row(
        {"slow_outcome": 0.2, "restart": 0.05, "listing": 0.2}, odd={"power_cut": True}, nodes=(1, 3),
        holds=lambda w: any(n.unseen for n in uses(w)) and not any(n.hosted for n in uses(w)), examples=13
    ),
    "precursors reach their limit": Row(
        record={"entries": 30}, odd={"life": 60.0, "pace": 0.3}, nodes=(2, 2), check=no_new_attempts, examples=4,
    ),
    "precursors reach their limit, and jobs die": Row(
        {"kill": 0.01, "restart": 0.03, "stage_fails": 0.05, "submit_waits": 0.2, "node_down": 0.005, "vanish": 0.2},
        {"entries": 8}, {"life": 60.0, "pace": 0.3}, nodes=(2, 2),
    ),
    "earlier answers may be a copy's": Row(odd={"copied": True, "hashes": True}, nodes=(2, 2), check=sought_with_the_content, examples=8),
    "no precursor says the content": Row(
        {"stage_fails": 1.0}, odd={"copied": True, "hashes": True},
        holds=lambda w: searches(w) == [True], examples=3,
    ),
    "one bad node among good ones": Row(
        {}, {"entries": 8}, {"bad": {"n0": VAGUE}, "in_order": True}, nodes=(2, 4), gpus=(1, 2, 8), check=bad_node_alone, examples=13
    ),
    "a bad node returns": Row(
        record={"entries": 60}, odd={"bad": {"n0": VAGUE}, "in_order": True}, nodes=(2, 2), gpus=1, check=rested_longer_each_time, examples=1
    ),
    "the same with other faults": Row(
        BUSY, {"entries": 8}, {"bad": {"n0": VAGUE}, "in_order": True}, nodes=(2, 4), gpus=(1, 2, 8), examples=13
    ),
    **{
        f"{'all shards' if many < 0 else 'one shard'} of a task {'cannot be run' if not silent else 'takes too much memory'}": Row(
            faults, {"entries": 6}, {"in_order": True, "silent": silent}, gpus=(1, 2, 8), poison=("t1", many), ends="failed",
            fails=("t1",), says="times with shard t1|", check=few_deaths, examples=13,
        )
        for many, silent, faults in [(1, False, BUSY), (-1, False, {}), (1, True, {"listing": 0.2, "slow_outcome": 0.2})]
    },
    "one shard cannot be run, and one node is bad": Row(
        BUSY, {"entries": 6}, {"bad": {"n0": VAGUE}, "in_order": True}, nodes=(3, 4), gpus=(1, 2, 8), poison=("t1", 1),
        ends="failed", fails=("t1",), examples=13,
    ),
    "no shard can be run": Row(
        {"slow_outcome": 0.2}, {"entries": 5}, {"in_order": True}, nodes=(1, 3), poison=("*", -1), ends="failed",
        fails=("t0", "t1", "t2", "t3", "t4"), check=bounded_deaths,
    ),
    "all nodes are bad": Row(
        {"slow_outcome": 0.2}, {"entries": 5}, {"in_order": True, "bad": {f"n{i}": VAGUE for i in range(3)}}, nodes=(1, 3),
        ends="failed", fails=("t0", "t1", "t2", "t3", "t4"), check=bounded_deaths,
    ),
    "a node has lost its GPUs": Row(
        {}, {"entries": 6}, {"in_order": True, "blind": True, "bad": {"n0": "no GPU"}}, nodes=(2, 2), gpus=(1, 2, 8),
        check=at_fault_at_once,
    ),
    "trials reach their time limit": Row({"overrun": 0.2}, nodes=(2, 2), blames=False, check=limits_grow, examples=13),
    "the same, and what they say comes late": Row(
        {"overrun": 0.2, "slow_outcome": 0.3}, nodes=(2, 2), ends="said",
        holds=lambda w: not [t for t in w.state.warnings if "is in back-off" in t and "TIMEOUT" in t]
    ),
    **{
        f"{purpose} jobs lack memory": Row(
            {"listing": 0.2, "restart": 0.02}, {"entries": 4}, {"takes_mb": {purpose: FIRST_MB[purpose] << MAX_DOUBLINGS}},
            nodes=(1, 3), blames=False, warns="memory", check=asked_for_more, examples=6,
        )
        for purpose in FIRST_MB
    },
    **{
        f"{purpose} jobs lack more than that": Row(
            {"listing": 0.2, "restart": 0.02}, {"entries": 4}, {"takes_mb": {purpose: FIRST_MB[purpose] << MAX_DOUBLINGS + 1}},
            nodes=(2, 2), ends="failed", says=f"; set {setting} = {FIRST_MB[purpose] << MAX_DOUBLINGS + 1}",
            check=named_the_setting, examples=2,
        )
        for purpose, setting in SETTINGS.items()
    },
    "a node has less than twice as much": Row(
        {"listing": 0.2}, {"entries": 4}, {"takes_mb": {"trial": 7000}, "node_mb": 8000}, nodes=(1, 1),
        warns="set [trial] memory_mb = 7487 for later evaluations",
        holds=lambda w: set(w.asked_mb) == {4097, 7487}, examples=3,
    ),
    "no node has as much": Row(
        {"listing": 0.2}, {"entries": 4}, {"takes_mb": {"trial": 7600}, "node_mb": 8000}, nodes=(1, 1), ends="failed",
        fails=("t0", "t1", "t2", "t3"), says="it had 7487 MB, and no node has more than 8000 MB for it and the weights",
        holds=lambda w: set(w.asked_mb) == {4097, 7487}, examples=3,
    ),
    "workers lack memory that say so": Row(
        {"listing": 0.2}, {"entries": 4}, {"metric_mb": 8192}, blames=False,
        holds=lambda w: {j.job.memory_mb for j in w.of("metric")} == {4096, 8192}, examples=6
    ),
    "no entry can be built": Row(
        {}, {"entries": 30, "build_jobs": 1}, {"deadly": -2}, ends="failed", fails=tuple(f"t{i}" for i in range(30)),
        says="its build job ended", holds=lambda w: len(w.of("build")) == 6, examples=2,
    ),
    "scores leave items out": Row({"item_fails": 1.0}, nodes=(2, 2), warns="item", check=scored_again, examples=5),
    "trials die before they hold a shard": Row(
        {"slow_outcome": 0.1}, {"entries": 4}, {"unready": frozenset({"n0", "n1"})}, nodes=(2, 2), ends="failed",
        fails=("t0", "t1", "t2", "t3"), says="trials keep failing", check=bounded_deaths,
    ),
    "they do on one node": Row(odd={"unready": frozenset({"n0"})}, record={"entries": 8}, nodes=(2, 4), check=bad_node_alone),
    "nothing is staged": Row(
        record={"stage": {"enabled": False}}, odd={"copied": True},
        holds=lambda w: searches(w) == [True], examples=3,
    ),
    **{
        f"precursors die that {'say' if hashes else 'do not say'} the content": Row(
            {"kill": 0.01, "submit_lost": 0.05, "restart": 0.05, "node_down": 0.01, "stage_fails": 0.3, "slow_outcome": 0.3},
            odd={"copied": True, "hashes": hashes}, nodes=(1, 3), ends="said", examples=10,
        )
        for hashes in (True, False)
    },
    **{
        f"one node's {' or '.join(purposes) or 'job'} is refused": Row(
            {"submit_waits": 0.2, "restart": 0.02}, {"entries": 4},
            {"unfit": frozenset({"n0"}), "refused": frozenset(purposes)}, nodes=(2, 2), check=n0_alone,
        )
        for purposes in ((), ("stage",), ("trial",))
    },
    "every node refuses": Row(
        record={"entries": 2}, odd={"unfit": frozenset({"n0", "n1"})}, nodes=(2, 2), ends="failed", fails=("t0", "t1"),
        says=UNFIT, holds=lambda w: 60.0 * (2**5 - 1) <= w.now <= 3600.0, examples=5,
    ),
    "no precursor is taken": Row(
        record={"entries": 2}, odd={"banned": "stage"}, ends="failed", fails=("t0", "t1"), says=BANNED,
        holds=lambda w: w.now < 300.0, examples=5
    ),
    **{
        f"a {purpose} waits for {reason}": Row(
            record={"entries": 2}, odd={"full": (purpose, 0), "reason": reason}, ends="failed", says=reason,
            warns=reason, examples=3,
        )
        for purpose, reason in [*((p, NEVER[0]) for p in ("build", "stage", "trial", "metric")), *(("trial", r) for r in NEVER[1:])]
    },
    **{
        f"without stealing, {most or 'any number of'} trials": Row(
            {**STORM, "submit_waits": 0, "submit_timeout": 0, "lose_metric": 0, "node_down": 0.02, "drain": 0.01,
             "preempt": 0.02, "straggle": 0.05},
            {"plan": {"steal": False}, "max_trials": most}, ends="said", examples=17, long=True,
        )
        for most in (None, 1, 3)
    },
}  # fmt: skip


def run_and_check(row, world):
    """Run to the end, and hold the laws of every scenario and those of its row."""
    world.run()
    state = world.state
    world.assert_nothing_left()
    assert replay(world.journal) == state
    lost = [e for e in state.entries if e.status != "scored"]
    if row.fails:
        assert {e.name for e in lost} == set(row.fails), world.summary()
    elif row.ends == "scored":
        assert not lost, world.summary()
    elif row.ends == "said":
        assert not lost or state.ending.reason or all("times" in e.error for e in lost), world.summary()
    assert all(e.error and (row.says in e.error or row.says in state.ending.reason) for e in lost), (
        world.summary()
    )
    assert row.blames or not any(n.back_offs or n.deaths for n in state.nodes.by_name.values())
    assert any(row.warns in text for text in [*state.warnings, state.ending.reason]) or not row.warns
    assert row.holds(world), world.summary()
    row.check(world)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * row.long) for n, row in ROWS.items()]
)
def test_an_evaluation_ends_as_its_scenario_says(name):
    """Whatever goes wrong: it ends with scores or with reasons, holds no job and no memory, and its journal replays. Without
    stealing every shard of a lost lane is run by others."""
    row = ROWS[name]

    @some(row.examples)
    @given(seed=st.integers(0, 2**32), count=st.integers(*row.nodes))
    def ends(seed, count):
        run_and_check(row, row.world(seed, count))

    ends()


STUCK = [("stage", 0), ("metric", 0), ("trial", 0), ("build", 0), ("metric", 1)]


@some(40)
@given(seed=st.integers(0, 2**32), ticks=st.integers(0, 40), name=st.sampled_from([*ROWS, *STUCK]))
def test_a_cancelled_evaluation_ends_at_once_whatever_goes_wrong(seed, ticks, name):
    """At any moment of any scenario, and where jobs do not start at all: what is unscored says so, and nothing is left."""
    if isinstance(name, str):
        row = ROWS[name]
    else:
        row = Row({"submit_timeout": 0.1, "restart": 0.05}, {"workers": 3}, {"full": name}, nodes=(2, 2))
    world = row.world(seed, row.nodes[0])
    world.until(lambda w: w.now >= ticks * TICK)
    before = replay(world.journal)
    assert before == world.state
    over, asked = before.ended_at is not None, world.now
    world.tell(ev.CancelAsked, reason="asked")
    assert not over or world.state == before, "its scores stand"
    world.run()
    world.assert_nothing_left()
    assert all(e.status == "scored" or e.error for e in world.state.entries)
    assert isinstance(name, str) or world.now - asked <= 8 * TICK, world.summary()


def test_hosts_stage_while_they_hold_gpus_and_are_not_waited_for():
    """Answers are sought without the content that a host will say."""
    assert nodes.content_to_come(World(1, Faults()).state)
    assert not nodes.content_to_come(World(1, Faults(), record(stage={"host_trials": True})).state)


def test_without_answers_to_score_again_an_evaluation_ends_and_asks_no_node():
    """Its command found them; they were removed meanwhile."""
    inputs = Inputs(parent="ckpt-suite-00000000", entries=(Sources(),) * 3)
    world = World(1, Faults(), record(max_trials=0).model_copy(update={"inputs": inputs}))
    world.run()
    world.assert_nothing_left()
    assert {e.error for e in world.state.entries} == {"ckpt-suite-00000000 has no answers to t0, t1, t2"}
    assert {job.job.purpose for job in world.jobs.values()} == {"build"}


def test_preemptions_end_no_evaluation():
    """However many in a row: they are no fault of a trial, so the evaluation waits for its place."""
    world = World(1, preempts=True)
    for _ in range(200):
        world.tick()
    preempted = [e for e in world.journal if isinstance(e, ev.JobEnded) and e.state == jobs.PREEMPTED]
    assert len(preempted) > 2 * MAX_DEATHS_IN_A_ROW * len(world.node_names)
    assert not world.state.ending.reason
