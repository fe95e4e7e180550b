"""What jobs are called and ask for: memory by the weights, time by the prediction, GPUs that hold the model, secrets."""

from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.fake_cluster import fake_node
from support.simulated.parts import SITE, Faults, ended, limited, record
from support.simulated.world import World

from coordinator.decide.allocation.allocate import Demand, Limits, allocate
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.footprint import (
    BASE_MEMORY_MB,
    GB,
    SHORTEST_LIMIT_SECONDS,
    GpuNeed,
    job_resources,
    loaded_bytes,
    precursor_memory_mb,
    trial_limit_seconds,
    trial_memory_mb,
)
from coordinator.decide.evaluation.job_ends import MAX_DEATHS
from coordinator.decide.evaluation.job_specs import worker_job
from coordinator.decide.evaluation.records import JobName, evaluation_id
from coordinator.decide.evaluation.state import NodeUse, Tries
from coordinator.site.cluster.daemon_job import slurm_time
from evaljobs.contract.engine_traits import PLANNED_BATCH
from evaljobs.contract.names import LaneId, ShardId
from evaljobs.contract.specs import CheckpointFile, ModelOptions, Weights

DAY = 24 * 3600

# --- memory and GPUs ---------------------------------------------------------------------------------------------------


def node(name, gpu_type, gpus=8):
    return replace(fake_node(name, gpus=gpus), gpu_type=gpu_type)


def of(sizes, *, largest=0, gpus=1, trial=None, **model):
    """An evaluation of a checkpoint with these weights."""
    made = record(1, trial={"gpus_per_trial": gpus, **(trial or {})})
    file = CheckpointFile(name="model.safetensors", size=sum(sizes.values()), mtime_ns=1)
    weights = Weights(sizes=sizes, largest=largest, dtype="bfloat16")
    checkpoint = made.checkpoint.model_copy(update={"files": (file,), "weights": weights})
    return made.model_copy(update={"checkpoint": checkpoint, "model": ModelOptions(**model)})


needs = st.builds(
    GpuNeed,
    weights=st.integers(0, 3000 * GB),
    gpus=st.integers(1, 8),
    doubling=st.booleans(),
    gpu_gb=st.dictionaries(st.sampled_from(["mine", "h100", "T4"]), st.floats(0.5, 300), max_size=2),
)
TYPES = st.sampled_from(["", "t4", "a100", "nvidia_h100_80gb_hbm3", "h200", "t4+a100", "mine"])
fleets = st.lists(
    st.builds(node, st.sampled_from(["n1", "n2", "n3"]), TYPES, st.integers(0, 8)), unique_by=lambda n: n.name
)


@given(needs, fleets)
@example(GpuNeed(weights=141 * GB), [node("n1", "t4")])
@example(GpuNeed(weights=141 * GB, gpus=2), [node("n1", "t4"), node("n2", "a100", gpus=4)])
@example(GpuNeed(weights=31 * GB, gpus=2), [node("n1", "", gpus=1), node("n2", "t4", gpus=2)])
def test_the_number_of_gpus_that_a_refusal_names_would_not_be_refused(need, there):
    """Nor is one needed that is smaller; a node whose GPUs' memory is unknown refuses nothing. Offers leave out nodes whose
    GPUs are too small, and say so, unless all are: such an evaluation was accepted before its weights were known."""
    said = need.refusal(there)
    able = [n for n in there if n.gpus >= need.gpus]
    if not able or any(need.memory(n) is None for n in able):
        assert said == ""
    counts = (1, 2, 4, 8) if need.doubling else range(1, 9)
    if said and "set [trial] gpus_per_trial = " in said:
        count = int(said.split("set [trial] gpus_per_trial = ")[1].split(",")[0])
        assert replace(need, gpus=count).refusal(there) == ""
        assert count in counts
        assert all(least >= count for n in there if n.gpus and (least := need.least(n)) is not None)
    elif said:
        known = [n for n in there if need.memory(n) is not None]
        there_are = [k for k in counts if any(n.gpus >= k for n in known)]
        assert all(replace(need, gpus=k).refusal(known) for k in there_are)
        assert " of 0 GB" not in said
    plain = {
        "evaluation_id": "e",
        "priority": 0,
        "accepted_at": 0,
        "gpus": 99,
        "gpus_per_trial": need.gpus,
        "in_use": {},
    }
    offers, free = (
        allocate(there, [Demand(**plain, need=one)], Limits(), gpus_in_use=0)["e"]
        for one in (need, GpuNeed())
    )
    small = {n.name for n in there if not need.holds(n) and not said}
    assert [o for o in free if o.node not in small] == list(offers)
    for name in small & {o.node for o in free}:
        assert "GPUs too small for weights" in need.left_out(there)
        assert name in need.left_out(there)


STORED = {"F32": 40}
WIDE = ModelOptions(model_args={"dtype": "float32"})
LOADED = [  # weights, the model, bytes that the engine loads; None: unknown
    ({"sizes": {"BF16": 20}}, ModelOptions(), 20),
    ({"sizes": {"BF16": 20}}, WIDE, 40),
    ({"sizes": {"BF16": 20}}, ModelOptions(model_args={"dtype": "odd"}), None),
    ({"sizes": {"BF16": 20}}, ModelOptions(model_args={"load_in_8bit": True}), None),
    ({"sizes": {"BF16": 20}}, ModelOptions(model_args={"device_map": {"": 0}}), None),
    ({"sizes": {"BF16": 20}}, ModelOptions(engine="an-engine-of-yours"), None),
    ({"sizes": STORED, "dtype": "bfloat16"}, ModelOptions(), 20),
    ({"sizes": STORED, "dtype": None}, ModelOptions(), 40),
    ({"sizes": STORED, "dtype": "float32"}, ModelOptions(engine="vllm"), 20),
    ({"sizes": {"I32": 10, "F16": 2}, "dtype": "float16", "quantized": True}, WIDE, 12),
]


@pytest.mark.parametrize(("weights", "model", "loaded"), LOADED)
def test_weights_count_in_the_dtype_that_the_engine_loads(weights, model, loaded):
    """That of the config with dtype "auto", quantised ones in their own; nothing is said of what an argument shrinks."""
    assert loaded_bytes(Weights(**weights), model) == loaded


@given(st.integers(0, 300 * GB), st.integers(0, 10 * GB), st.sampled_from([None, "cpu"]), st.booleans())
def test_memory_that_jobs_ask_for_follows_the_weights_and_a_setting_stands(stored, largest, device, wide):
    """A precursor holds the files; a trial the tensors in conversion, on a CPU all of the weights; a build none."""
    args = {"model_args": {"dtype": "float32"} if wide else {}}
    plain, kept = (
        of(
            {"BF16": stored},
            largest=min(largest, stored),
            device=device,
            trial={"memory_mb": setting},
            **args,
        )
        for setting in (None, 123)
    )
    own = (stored if device else min(largest, stored)) * (2 if wide else 1)
    assert 0 <= trial_memory_mb(plain) - BASE_MEMORY_MB - own // (1 << 20) <= 1
    assert precursor_memory_mb(plain) << 20 > stored
    assert job_resources("build", plain.options)["memory_mb"] == BASE_MEMORY_MB
    assert trial_memory_mb(kept) == job_resources("build", kept.options)["memory_mb"] == 123


# --- engines and secrets -----------------------------------------------------------------------------------------------


def with_engine(engine, batch_size, **options):
    made = record(2, suite={"batch_size": batch_size}, **options)
    return made.model_copy(update={"model": ModelOptions(engine=engine)})


@pytest.mark.parametrize(
    ("engine", "given", "begins_with"),
    [("hf", "auto", "auto"), ("vllm", "auto", PLANNED_BATCH), ("vllm", 4, 4), ("hf", 4, 4)],
)
def test_auto_starts_no_trial_to_probe_an_engine_that_chooses_its_batches(engine, given, begins_with):
    """Its requests are planned in batches of a fixed size, from the start on."""
    state, _ = machine.start_evaluation(ev.Accepted(at=0.0, record=with_engine(engine, given)))
    assert state.batch_size == begins_with


def test_trials_ask_for_their_engines_memory_and_other_jobs_do_not():
    more = {}
    for extra in (0, 1000):
        world = World(5, rec=with_engine("vllm", 8, engine_memory_mb=extra), nodes=1)
        world.run_to_scores()
        for info in world.state.jobs.by_name.values():
            more[info.job.purpose] = info.job.memory_mb - more.get(info.job.purpose, 0)
    assert {purpose: mb for purpose, mb in more.items() if mb} == {"trial": 1000}


# --- time limits -------------------------------------------------------------------------------------------------------


def limit_of(work, load, lanes, most, attempt=0):
    """Seconds that a trial asks for."""
    state, _ = machine.start_evaluation(
        ev.Accepted(at=0.0, record=record(trial={"time_limit": slurm_time(most)}))
    )
    state.plan.work_seconds_95, state.plan.load_seconds_95 = work, load
    state.nodes.by_name = {"n1": NodeUse(name="n1", lanes=lanes, status="ready")}
    state.trials.on_lane = {"n1/0": attempt}
    return trial_limit_seconds(state, ["n1/0", "n1/1"])


@given(st.floats(1, 1e7), st.floats(0, 1e4), st.integers(1, 64), st.integers(0, 40))
def test_a_limit_covers_load_and_an_even_share_and_stays_below_the_settings(work, load, lanes, attempt):
    """At least what is predicted and a quarter of an hour, doubled an attempt, unless the settings allow less. Without a
    prediction, as of a trial that probes for the batch size, the settings stand. Eight times the lanes: an eighth."""
    for most in (600, DAY):
        limit = limit_of(work, load, lanes, most, attempt)
        wanted = max(SHORTEST_LIMIT_SECONDS, load + work / lanes) * 2 ** min(attempt, 20)
        assert limit == most or limit >= wanted
        assert limit <= most == limit_of(0.0, 0.0, lanes, most)
    assert [limit_of(80_000.0, 30.0, lanes, DAY) for lanes in (8, 64)] == [10_150, 1_400]


def test_workers_ask_for_the_time_of_trials_and_metrics():
    """For less than the settings' limit; twice as long after some that had no metric job done."""
    world = World(1, rec=record(entries=4, trial={"time_limit": slurm_time(DAY)}))
    trial = (
        world.until(lambda w: w.state.live_jobs("trial")).state.live_jobs("trial")[0].job.time_limit_seconds
    )
    first, again = (
        worker_job(
            replace(world.state, scoring=replace(world.state.scoring, fruitless=Tries(failures=n))),
            SITE,
            1,
            world.now,
        )
        for n in (0, 1)
    )
    assert trial <= first.job.time_limit_seconds < DAY
    assert again.job.time_limit_seconds == 2 * first.job.time_limit_seconds


# --- builds ------------------------------------------------------------------------------------------------------------

FEW, MANY = st.sampled_from([1, 8, 100]), st.sampled_from([None, 101, 0.5])


@given(
    few=st.lists(FEW, max_size=9),
    many=st.lists(MANY, max_size=4),
    jobs=st.integers(1, 5),
    groups=st.booleans(),
)
def test_entries_with_few_documents_share_one_build_job(few, many, jobs, *, groups):
    """Four of them at most. Each other entry has a job of its own, up to the setting, and so has each that may be a group: a
    limit holds for each of its tasks. Every entry is in exactly one job."""
    assume(few or many)
    world = World(1, Faults(), limited([*few, *many], groups=groups, build_jobs=jobs))
    world.tick()
    built = [info.entries for info in world.state.live_jobs("build")]
    assert len(built) == min(jobs, len(many) + (len(few) if groups else -(-len(few) // 4)))
    assert sorted(index for entries in built for index in entries) == list(range(len([*few, *many])))


def test_a_trial_that_gave_up_waiting_for_request_sets_costs_its_node_nothing():
    """However many do: there was no queue yet, and another waits in its place."""
    world = World(1, rec=limited([8, 8], early_trials=True), builds_from=100.0)
    gone = 0
    while world.queue is None:
        for name, trial in list(world.state.trials.live.items()):
            job = world.jobs.get(trial.job)
            if job is not None and job.members[trial.member].phase == "running":
                lost = ended(LaneId.parse(trial.lane).node, name, "queue-lost")
                world.leave(lost.model_copy(update={"shards": 0}))
                world.end_member(job, job.members[trial.member])
                gone += 1
        world.tick()
        assert world.state.ended_at is None
    assert gone > MAX_DEATHS
    assert not any([world.state.trials.deaths, *(n.deaths for n in world.state.nodes.by_name.values())])
    world.run_to_scores()


# --- names -------------------------------------------------------------------------------------------------------------


@given(st.sets(st.text("ab-./é", min_size=1, max_size=90), min_size=2, max_size=6))
def test_different_nodes_have_different_job_names(names):
    """Also where they share their first 40 characters, or hold what no file name may; and those of two folders with one
    checkpoint's content. Short names stand as they are: `squeue` shows them."""
    made = {str(JobName.of("e-12345678", "stage", name, 0)) for name in names}
    assert len(made) == len(names)
    assert max(map(len, made)) <= len("es-12345678-stage--a0") + 40
    assert str(JobName.of("e-12345678", "trial", "n17", 2)) == "es-12345678-trial-n17-a2"
    base = record()
    copies = (base.checkpoint.model_copy(update={"source": f"/run/step-{i}"}) for i in (1, 2))
    ids = [evaluation_id(copied, base.suite, base.model, None, base.inputs) for copied in copies]
    assert len({str(JobName.of(name, "stage", "n1", 0)) for name in ids}) == 2


@given(
    text=st.text(min_size=1),
    first=st.integers(0),
    end=st.integers(0),
    cut=st.sampled_from(["", "4", "fast-8192-8"]),
    kind=st.sampled_from(["build", "stage", "trial", "metric"]),
)
def test_names_of_shards_lanes_and_jobs_are_read_back(*, text, first, end, cut, kind):
    """Whatever task or node stands in them."""
    job = JobName.of("step-1-suite-12345678", kind, text, first)
    for name in (ShardId(text, first, end, cut), LaneId(text, end), job):
        assert type(name).parse(str(name)) == name
