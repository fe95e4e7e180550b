"""Invariants of an evaluation's state, recounted: what its counters must say."""

from coordinator.decide.evaluation.state import Phase


def validate(state):
    """Every invariant of the state, recounted; AssertionError names the first that does not hold."""
    _validate_shards(state)
    _validate_jobs(state)
    _validate_ending(state)


def _validate_shards(state):
    left = [s.undecided for s in state.shards.by_name.values() if s.frame is None and not s.quarantined]
    counted, known = (len(left) - sum(left), sum(left)), (state.shards.todo, state.shards.undecided)
    assert known == counted, f"todo and undecided are {known}, counted {counted}"
    for task, leaf in state.shards.leaves.items():
        missing = sum(1 for s in leaf.planned.shards if state.shards.by_name[s].frame is None)
        assert leaf.todo == missing, f"{task}: todo is {leaf.todo}, counted {missing}"
        at_once = leaf.planned.executes_at_once
        ahead = leaf.executes - leaf.executed
        assert not at_once or ahead <= at_once + 1, f"{task}: {ahead} jobs for a judge that takes {at_once}"
        held = [e.index for e in state.entries if task in e.leaves.values()]
        assert sorted(leaf.entries) == held, f"{task} serves {leaf.entries}, and entries {held} have it"
    open_ = {n for n, m in state.scoring.metrics.items() if not m.done}
    assert state.scoring.outstanding == open_, "outstanding metric jobs"


def _validate_jobs(state):
    jobs = state.jobs
    assert jobs.live == {n: j for n, j in jobs.by_name.items() if j.live}, "live jobs"
    there = {name: trial for node in state.nodes.by_name.values() for name, trial in node.trials.items()}
    assert there == state.trials.live, "living trials by node"
    idle = {n: t for n, t in there.items() if t.cancelled or not t.running}
    assert idle == state.trials.idle, "trials that have not started or are cancelled"
    assert all(jobs.by_name[n].phase == "intended" for n in jobs.held), f"held jobs {sorted(jobs.held)}"
    for name, trial in state.trials.live.items():
        info = jobs.by_name[trial.job]
        assert info.live, f"{name} lives in the ended job {trial.job}"
        member = 0 if info.job.purpose == "host" else info.trials.index(name)
        assert trial.member == member, f"{name} is not member {trial.member} of {trial.job}"
        assert state.trials.by_name[name] is trial, f"{name} has two records"


def _validate_ending(state):
    for entry in state.entries:
        if entry.status == "scored":
            assert entry.result_file, f"{entry.name} is scored without a result file"
            leaves = [state.shards.leaves[name] for name in entry.leaves.values()]
            assert entry.screened or all(leaf.todo == 0 for leaf in leaves), f"{entry.name} is scored in part"
    ending = state.ending
    assert (ending.phase == Phase.ENDED) is (ending.ended_at is not None), "ended without its time"
    assert ending.phase != Phase.CLOSING or ending.reason or ending.cancelled, "closing without a reason"
    if ending.phase >= Phase.WRITING:
        assert all(e.terminal for e in state.entries), "results with entries open"
    if ending.phase == Phase.ENDED:
        assert not state.jobs.live, f"ended with live jobs {sorted(state.jobs.live)}"
