"""What a report makes of a journal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.simulated.parts import FakeJob, FakeMember, Faults, ended, record
from support.simulated.world import World

from coordinator.base.words import seconds
from coordinator.cluster import Job, JobState
from coordinator.evaluation.events import (
    JobEnded,
    JobNotSubmitted,
    JobStarted,
    JobSubmitted,
    NodesOffered,
    OutcomeSeen,
)
from coordinator.evaluation.state import JobInfo, State, Trial
from coordinator.report.gpu_use import GpuUse, died
from coordinator.report.measurements import (
    LEAST_WAIT_SECONDS,
    ShardSpan,
    make_report,
    without_measurements,
)
from coordinator.report.render import absence, gpu_table
from coordinator.report.tokens import token_use
from evaljobs.contract.specs import BatchIndex


@pytest.mark.parametrize("cpus", [1, 4])
def test_programs_count_every_core_of_their_worker(cpus: int) -> None:
    """CPU seconds of `execute` jobs are their seconds on all cores of the worker, against as many slots."""
    world = World(3, Faults(), record(worker_cpus=cpus, workers=5))
    world.run()
    executes = sum(metric.kind == "execute" for metric in world.state.scoring.metrics.values())
    report = make_report(world.state, world.journal, [], world.now)
    assert executes
    assert report.metric_seconds == {"t0": 1.0, "t1": 1.0 + cpus * executes, "t2": 1.0}
    assert world.state.cpu_slots == cpus  # the plan was worth one worker


def test_a_report_says_what_its_trials_waited_for() -> None:
    """The cluster's reason for the longest wait."""

    class Busy(World):
        def starts(self, job: FakeJob, member: FakeMember) -> bool:
            return self.dice.random() < 0.5 and super().starts(job, member)

        def listing(self) -> list[JobState]:
            rows = super().listing()
            return [replace(r, reason="Priority") if r.phase == "pending" else r for r in rows]

    world = Busy(3, Faults(), record())
    world.run()
    report = make_report(world.state, world.journal, [], world.now)
    assert report.stages.waited_for == "Priority"
    assert report.stages.queue_wait


@given(st.integers(0, 10_000))
def test_every_trial_that_ran_has_one_row(seed: int) -> None:
    """Also one that died with its node, with the cluster's word for its end; the parts add up to what was held."""
    world = World(seed, Faults(kill=0.1, vanish=0.05, node_down=0.05), record())
    world.run()
    report = make_report(world.state, world.journal, [], world.now)
    started = {(e.job, e.index) for e in world.journal if isinstance(e, JobStarted)}
    ran = [t.name for t in world.state.trials.by_name.values() if (t.job, t.member) in started]
    assert sorted(g.trial for g in report.gpus) == sorted(ran)
    words = {e.state for e in world.journal if isinstance(e, JobEnded)}
    said = {e.outcome.name for e in world.journal if isinstance(e, OutcomeSeen)}
    for gpu in report.gpus:
        assert gpu.trial in said or gpu.ended in words
        parts = (gpu.infer, gpu.imports, gpu.load, gpu.warm, gpu.dump, gpu.wait, gpu.other)
        assert gpu.trial in said or sum(parts) == pytest.approx(gpu.held)


def test_a_trial_that_died_keeps_the_seconds_of_its_shards() -> None:
    """A node's failure takes the trial's own word with it; the table says how it ended."""
    use = GpuUse(
        trial="es-1-trial-n1-a0.0", node="n1", gpus=1, device="", started_at=100.0, held=60.0, infer=20.0,
        other=40.0, shards=2, ended="NODE_FAIL",
    )  # fmt: skip
    state = State(record=record(1), entries=[], batch_size=8)
    name = "es-1-trial-n1-a0"
    state.jobs.by_name[name] = JobInfo(job=Job(name=name, argv=(), log="", count=1, purpose="trial"))
    state.trials.by_name[use.trial] = Trial(name=use.trial, job=name, member=0, lane="n1/0")
    ended = {(name, 0): (160.0, "NODE_FAIL")}
    found = list(died(state, {(name, 0): 100.0}, ended, (), {use.trial: [5.0, 15.0]}))
    assert found == [use]
    assert not list(died(state, {}, ended, (), {})), "one that never started held no GPU"
    report = without_measurements(state, "no").model_copy(update={"gpus": tuple(found)})
    out = io.StringIO()
    Console(file=out, width=120).print(gpu_table(report))
    assert "NODE_FAIL" in out.getvalue()


def spans_of(world: World) -> list[ShardSpan]:
    return [
        ShardSpan(shard=name, trial="t", started_at=10.0, seconds=5.0) for name in world.state.shards.by_name
    ]


def test_a_run_with_a_failed_task_has_no_lower_bound() -> None:
    """Its makespan ends with the last score: the failed task's load and inference may have come after it."""
    world = World(2, Faults(), record())
    world.run()
    trial = ended("n1", "es-1-trial-n1-a0.0", "drained").model_copy(update={"load_seconds": 20.0})
    journal = [*world.journal, OutcomeSeen(at=world.now, outcome=trial)]
    whole = make_report(world.state, journal, spans_of(world), world.now)
    assert whole.ratio
    world.state.entries[0].status = "failed"
    part = make_report(world.state, journal, spans_of(world), world.now)
    assert (part.lower_bound_seconds, part.ratio) == (None, None)


def test_the_time_that_a_limit_on_jobs_takes_is_said() -> None:
    """From the first refusal to the submission; overlapping ones count once."""
    world = World(2, Faults(), record())
    world.run()
    first, second = [e for e in world.journal if isinstance(e, JobSubmitted)][:2]
    refusals = [
        JobNotSubmitted(at=first.at - 90.0, job=first.job, error="QOSMaxSubmitJobPerUserLimit", limited=True),
        JobNotSubmitted(at=first.at - 60.0, job=first.job, error="QOSMaxSubmitJobPerUserLimit", limited=True),
        JobNotSubmitted(
            at=first.at - 30.0, job=second.job, error="QOSMaxSubmitJobPerUserLimit", limited=True
        ),
    ]
    report = make_report(world.state, [*refusals, *world.journal], [], world.now)
    assert report.limited_seconds == pytest.approx(90.0 + max(0.0, second.at - first.at))
    assert f"kept jobs out for {seconds(report.limited_seconds)}" in "; ".join(absence(report))
    assert make_report(world.state, world.journal, [], world.now).limited_seconds == 0.0


@pytest.mark.parametrize("late", [300.0, 1.0])
def test_a_wait_for_gpus_stands_apart_from_what_the_schedule_took(late: float) -> None:
    """Another evaluation had them: no policy is compared with that time, and the ratio leaves it out."""
    world = World(2, Faults(), record())
    world.run()
    trial = ended("n1", "es-1-trial-n1-a0.0", "drained").model_copy(update={"load_seconds": 20.0})
    journal = [*world.journal, OutcomeSeen(at=world.now, outcome=trial)]
    first = next(place for place, e in enumerate(journal) if isinstance(e, NodesOffered))
    earlier = [
        e.model_copy(update={"at": e.at - late} | ({"left_at": None} if isinstance(e, OutcomeSeen) else {}))
        for e in journal[:first]
    ]
    report = make_report(world.state, [*earlier, *journal[first:]], spans_of(world), world.now)
    assert report.waited_seconds == pytest.approx(
        late if late > 10 else 0.0, abs=LEAST_WAIT_SECONDS * (late > 10)
    )
    assert ("waited for a free GPU" in "; ".join(absence(report))) == (late > 10)
    assert report.lower_bound_seconds
    worked = report.makespan_seconds - report.waited_seconds
    assert worked == pytest.approx(report.ratio * report.lower_bound_seconds)


def index(asked: tuple[int, ...]) -> BatchIndex:
    return BatchIndex(
        task="t",
        key="k",
        batch_size=2,
        offsets=(0, 1, 2, 3),
        requests=(2, 2, 2),
        prefill_tokens=(60, 50, 40),
        generated_tokens=(0, 0, 0),
        documents=((0,), (1,), (2,)),
        asked_tokens=asked,
    )


def test_the_tokens_of_the_shards_that_count_are_summed_by_their_own_cut() -> None:
    """Each cut has its own batches; a shard that does not count adds nothing."""
    trial = ended("n1", "trial.0", "drained").model_copy(update={"generated_tokens": 7})
    indexes = {("t", ""): index((100, 90, 80)), ("t", "fast-64-2"): index((1, 1, 1))}
    use = token_use(["t|0|2"], indexes, [trial, ended("n1", "trial.1", "drained")])
    assert use is not None
    assert (use.asked, use.computed, use.generated) == (190, 110, 7)
    assert use.shared == 1 - 110 / 190
    assert use.per_second == (110 + 7) / use.infer_seconds


def test_no_tokens_are_told_where_a_batch_file_does_not_say_them() -> None:
    """An index is missing, or of a version without asked tokens."""
    assert token_use(["t|0|2"], {}, []) is None
    assert token_use(["t|0|2"], {("t", ""): index(())}, []) is None
