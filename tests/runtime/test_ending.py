"""What is written at an evaluation's end, whatever is gone by then; which ended evaluation answers a question of now; which
responses count in a cut."""

import json
import shutil

import pytest
from support.simulated.parts import Faults, record
from support.simulated.world import World

from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.actions import FindResponses, MakePlan
from coordinator.decide.evaluation.job_specs import Site
from coordinator.decide.evaluation.records import Inputs, cut_on_disk, evaluation_id
from coordinator.decide.evaluation.state import Phase
from coordinator.decide.planning.make_plan import make_plan
from coordinator.intake import request_sets
from coordinator.intake.source_keys import Present
from coordinator.results.report.load_series import read_document
from coordinator.results.report.measurements import ShardSpan, without_measurements
from coordinator.results.report.scores import ScoreValue
from coordinator.results.report.usage import DRAINED, GpuUse
from coordinator.runtime import finalize, reuse
from coordinator.runtime.chance import at_chance, fell_to_chance
from coordinator.runtime.journal import Journal, line_of, replayed_state
from coordinator.runtime.present_inputs import changed_since, record_as_of_now, without_reuse
from coordinator.runtime.summary import Summary, fields_of_record, write_summary
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.paths import EvaluationPaths, batch_index_file, entry_manifest, request_set_manifest
from evaljobs.contract.specs import BatchIndex, EntryManifest, FrameRef, RequestSetManifest
from evaljobs.contract.storage import write_atomic, write_record
from evaljobs.lmeval.shown_inputs import digest_of
from priors.estimate import PriorHistory
from priors.table import read_observations


@pytest.fixture
def ended(tmp_path):
    """A world that has run, its journal and score files on disk, its request sets and responses nowhere."""
    world = World(3, Faults())
    world.run()
    paths = EvaluationPaths(tmp_path / "id")
    paths.scores.mkdir(parents=True)
    Journal(paths.journal).append(world.journal)
    config = {"model": "hf", "batch_size": None, "limit": 4}
    for entry in world.state.entries:
        file = paths.scores / f"{entry.index}.json"
        file.write_text(json.dumps({"results": {entry.name: {"acc,none": 0.5}}, "config": config}))
        entry.result_file = str(file)
    return world, paths


@pytest.mark.parametrize(
    ("scores", "guessed"),
    [
        ({"a": (0.26, 0.01), "b": (0.02, 0.01)}, True),
        ({"a": (0.28, 0.01), "b": (0.02, 0.01)}, False),
        ({"a": (0.26, 0.01), "b": (0.03, 0.01)}, False),
        ({"a": (0.10, 0.0), "b": (0.0, 0.0)}, True),
    ],
)
def test_guessing_is_told_by_two_standard_errors_of_each_task(scores, guessed):
    """`a` has four choices, `b` is generated; a perplexity has no chance level."""
    tables = {t: {"ppl,none": 9.0, "acc,none": v, "acc_stderr,none": e} for t, (v, e) in scores.items()}
    results = {"results": tables, "higher_is_better": {t: {"ppl": False, "acc": True} for t in tables}}
    assert at_chance(results, {"a": {"chance": 0.25}, "b": {"chance": 0.0}}) is guessed
    assert not at_chance(results, {})


def test_a_training_that_falls_to_chance_is_told_by_its_last_checkpoint_above(tmp_path):
    """Not by a later one, one of another training or suite, one without scores, or one that was at chance itself."""

    def leave(step, suite="suite", folder="/runs/a", **more):
        known = record(1).model_copy(update={"evaluation_id": f"e{step}-{suite}-{folder[-1]}"})
        spec = known.checkpoint.model_copy(update={"source": f"{folder}/step-{step}", "step": step})
        known = known.model_copy(update={"checkpoint": spec})
        paths = EvaluationPaths(tmp_path / known.evaluation_id)
        paths.root.mkdir()
        paths.journal.write_bytes(b"x")
        scores = (ScoreValue(task="a", metric="acc", filter="none", value=0.6),)
        fields = fields_of_record(known) | {
            "suite": suite,
            "written_at": 0.0,
            "ended_at": 1.0,
            "journal_bytes": 1,
            "scores": scores,
        }
        write_summary(paths, Summary(**fields | more))
        return known, paths

    leave(100)
    leave(200)
    for step, more in (
        (300, {"at_chance": True}),
        (310, {"scores": ()}),
        (320, {"suite": "other"}),
        (330, {"folder": "/runs/b"}),
        (500, {}),
    ):
        leave(step, **more)
    now, paths = leave(400, at_chance=True)
    assert "step 200 (e200-suite-a) did not" in fell_to_chance(now, paths)
    assert fell_to_chance(*leave(50)) == ""


def test_scores_are_written_whatever_report_and_priors_find(ended, tmp_path, caplog):
    """Request sets gone, observations that cannot be written, a journal that cannot be read: each a warning, and the scores. The
    report of before counts no more: costs are unknown, as a value, in a series, and with the status of the end.
    """
    world, paths = ended
    state, names = world.state, {e.name for e in world.state.entries}
    paths.responses.mkdir()
    for file in {s.frame.file for s in state.shards.by_name.values() if s.frame is not None}:
        (paths.responses / file).write_bytes(b"")
    (tmp_path / "folder").mkdir()
    finalize.write_results(state, paths, {}, tmp_path / "folder")
    assert json.loads(paths.results.read_text())["results"].keys() == names
    report = finalize.make_report_or_none(state, paths)
    spans = tuple(
        finalize.ShardSpan(shard=name, trial="t", started_at=1.0, seconds=1.0)
        for name in state.shards.by_name
    )
    finalize.add_to_priors(state, report.model_copy(update={"shards": spans}), tmp_path / "o.jsonl")
    assert "the priors learn nothing of it: the request set of" in caplog.text
    paths.results.unlink()
    paths.journal.write_text('{"kind": "of-another-version"}\n')
    finalize.write_results(state, paths, {}, tmp_path / "o.jsonl")
    assert json.loads(paths.results.read_text())["results"].keys() == names
    assert "there is no new report" in caplog.text
    found = finalize.results_of(state, paths)
    costs = (found.makespan_seconds, found.paused_seconds, found.gpu_seconds)
    assert (found.status, len(found.scores), costs) == ("done", len(names), (None, 0.0, None))
    assert "times and costs are unknown: JournalError: " in found.report.warnings[-1]
    paths.evaluation.write_text(state.record.model_dump_json())
    point = read_document(paths)
    assert (point.status, point.scores, point.makespan_seconds) == ("done", found.scores, None)


def test_during_a_retry_results_are_those_of_now(ended, tmp_path):
    """Not the scores and failures of the end before it, whose results.json stays until the next end."""
    world, paths = ended
    again, *others = world.state.entries
    again.status, again.error = "failed", "no such thing"
    finalize.write_results(world.state, paths, {}, tmp_path / "observations.jsonl")
    assert finalize.results_of(world.state, paths).failed == {again.name: "no such thing"}
    again.status, again.error = "built", ""
    world.state.ending.phase, world.state.ending.ended_at = Phase.RUNNING, None
    found = finalize.results_of(world.state, paths, world.journal)
    assert (found.status, found.failed) == ("stopped", {}), "no process holds its work folder"
    assert {s.task for s in found.scores} == {e.name for e in others}


def test_a_score_file_that_is_gone_costs_its_entry_alone(ended):
    """It is named as failed, with the reason; the others have their scores, and the batch size that trials used: tasks are
    scored by a model without batches.
    """
    state = ended[0].state
    gone, *others = state.entries
    (ended[1].scores / f"{gone.index}.json").unlink()
    results = finalize.merged_results(state, *finalize.scores_in(state))
    assert results["results"].keys() == {e.name for e in others}
    assert "cannot be read (any more)" in results["failed"][gone.name]
    assert results["config"] == {"model": "hf", "batch_size": state.batch_size, "limit": 4}


# --- the evaluation of a question's inputs of now --------------------------------------------------------------------


@pytest.fixture
def site(tmp_path):
    return Site(work_dir=str(tmp_path / "work"), trial_command=("false",), worker_command=("false",))


def asked(site):
    """What a person asks for now, and how it is known before anyone looks at what earlier evaluations used."""
    base, inputs = record(1), Inputs(lm_eval="0.4.13")
    name = evaluation_id(base.checkpoint, base.suite, base.model, base.judge, inputs)
    plain = base.model_copy(update={"inputs": inputs, "evaluation_id": name})
    return record_as_of_now(plain, site), plain


def end(site, made, *files, **rows):
    """The evaluation has ended, and its scoring used these files. Returns its id."""
    paths = site.paths.evaluation(made.evaluation_id)
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.journal.write_bytes(b"{}\n")
    shown = {"build": {}, "score": {**rows, **{str(file): digest_of(str(file)) for file in files}}}
    write_atomic(paths.results, json.dumps({"evalspan": {"shown": shown}}).encode())
    write_atomic(paths.evaluation, made.model_dump_json().encode())
    over = Summary(**fields_of_record(made), written_at=2.0, ended_at=2.0, journal_bytes=3)
    assert write_summary(paths, over)
    return made.evaluation_id


def test_an_ended_evaluation_is_todays_until_a_file_it_used_changes(site, tmp_path):
    """Taking the edit back finds the first one again; the message names the file. An open one goes on whatever has changed:
    its tasks say which file it was.
    """
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("A = 1\n")
    other.write_text("B = 1\n")
    first = end(site, asked(site)[0], one)
    assert asked(site)[0].evaluation_id == first
    one.write_text("A = 2\n")
    now = asked(site)[0]
    assert now.evaluation_id != first
    assert f"{one} changed since {first}: this is a new evaluation" in changed_since(now, site)
    second = end(site, now, one, other)
    assert asked(site)[0].evaluation_id == second
    other.write_text("B = 2\n")  # a file that the first one did not use
    third = end(site, asked(site)[0], one, other)
    assert asked(site)[0].evaluation_id == third
    assert len({first, second, third}) == 3
    one.write_text("A = 1\n")
    assert asked(site)[0].evaluation_id == first
    site.paths.evaluation(first).journal.write_bytes(b"{}\n{}\n")  # a retry
    one.write_text("A = 3\n")
    assert asked(site)[0].evaluation_id == first


def test_a_file_that_a_node_sees_otherwise_costs_one_evaluation(site):
    """And not a new one each time that it is asked for."""
    rows = {"/of-a-node": "digest there"}
    first = end(site, asked(site)[0], **rows)
    second = end(site, asked(site)[0], **rows)
    assert second != first
    assert asked(site)[0].evaluation_id == second


def test_fresh_names_another_evaluation_each_time(site):
    base = asked(site)[1]
    later = base.model_copy(update={"accepted_at": base.accepted_at + 1})
    assert (
        len(
            {
                base.evaluation_id,
                without_reuse(base, site).evaluation_id,
                without_reuse(later, site).evaluation_id,
            }
        )
        == 3
    )


# --- plans and answers in a cut --------------------------------------------------------------------------------------

TOKENS = {"8": (80_000,) * 2, "4": (30_000,) * 4, "fast-100-8": (10_000,) * 3}
SUITES = {"": {}, "4": {"name": "four"}, "fast-100-8": {"name": "quick", "mode": "fast", "token_budget": 100}}


@pytest.fixture
def folder(tmp_path):
    """The request set of task t0 in three cuts."""
    entry = tmp_path / "sets"
    known = {"task": "t0", "key": "k"}
    write_record(entry_manifest(entry), EntryManifest(entry="t0", sets={"t0": "t0"}))
    counts = {"documents": 16, "requests": 16, "prompt_tokens": 1}
    manifest = RequestSetManifest(**known, **counts)
    write_record(request_set_manifest(entry / "t0"), manifest)
    for cut, tokens in TOKENS.items():
        ones = {"requests": (1,), "generated_tokens": (0,), "documents": ((0,),)}
        index = BatchIndex(
            **known,
            **{name: one * len(tokens) for name, one in ones.items()},
            batch_size=Cut.parse(cut).batch_size,
            offsets=tuple(range(len(tokens) + 1)),
            prefill_tokens=tokens,
        )
        write_record(batch_index_file(entry / "t0", cut), index)
    return entry


def of_14_gb(suite):
    made = record(1, suite=suite)
    weights = made.checkpoint.files[0].model_copy(update={"size": 14 * 10**9})
    return made.model_copy(update={"checkpoint": made.checkpoint.model_copy(update={"files": (weights,)})})


def plan_of(folder, cut, suite=None, tasks=("t0",)):
    sets = {0: {task: str(folder / task) for task in tasks}}
    wanted = MakePlan(sets=sets, batch_size=8, lanes=(("n/0", "n"),), cuts={0: cut} if cut else {})
    history = PriorHistory(read_observations(folder.parent / "observations.jsonl"))
    return make_plan(
        of_14_gb(suite), wanted, request_sets.read_wanted(wanted), history, hardware="gpu", now=1.0
    )


def test_a_plan_is_of_the_batches_of_its_cut_and_its_shards_name_it(folder):
    """Fewer tokens take less; batches of another cut do not count as built."""
    seconds = []
    for cut in ("fast-100-8", "4", ""):
        planned = plan_of(folder, cut)
        names = [ShardId.parse(shard) for shard in planned.leaves[0].shards]
        assert {name.cut for name in names} == {planned.leaves[0].cut} == {cut}
        assert sum(n.end_batch - n.first_batch for n in names) == len(TOKENS[cut_on_disk(cut, 8)])
        assert {s for lane in planned.lanes for s, _, _ in lane.shards} == set(planned.leaves[0].shards)
        assert request_sets.find_request_sets(folder, cut, None) == {"t0": str(folder / "t0")}
        seconds.append(planned.gpu_seconds)
    assert seconds == sorted(set(seconds))
    assert request_sets.find_request_sets(folder, "fast-50-8", None) is None
    with pytest.raises(request_sets.RequestSetError, match="batches-fast-50-8"):
        plan_of(folder, "fast-50-8")
    assert cut_on_disk("", "auto") == ""


def test_the_next_plan_counts_with_the_seconds_that_a_run_showed(folder):
    """Of inference by its batches, of which a document may have several; of a metric job by the tasks that share it; of a
    trial until its first batch.
    """
    shutil.copytree(folder / "t0", folder / "t1")
    for file in (folder / "t1").iterdir():
        file.write_text(file.read_text().replace('"t0"', '"t1"'))
    cut = "fast-100-8"
    planned = plan_of(folder, cut, SUITES[cut], ("t0", "t1"))
    shards = [shard for leaf in planned.leaves for shard in leaf.shards]
    frame = FrameRef(file="x.frames", offset=0, length=1)
    dumped = ev.ShardsDumped(at=2.0, shards=tuple((shard, frame) for shard in shards))
    state = replayed_state([ev.Accepted(at=0.0, record=of_14_gb(SUITES[cut])), planned, dumped])
    state.entries[0].status = "scored"
    spans = tuple(ShardSpan(shard=shard, trial="t", started_at=1.0, seconds=30.0) for shard in shards)
    parts = {"infer": 90.0, "imports": 4.0, "load": 10.0, "warm": 1.0, "other": 5.0}
    gpu = GpuUse(
        trial="t", node="n", gpus=1, device="", started_at=1.0, held=110.0, shards=3, ended=DRAINED, **parts
    )
    seen = {"shards": spans, "metric_seconds": {state.entries[0].name: 60.0}, "gpus": (gpu,)}
    report = without_measurements(state, "").model_copy(update=seen)
    finalize.add_to_priors(state, report, folder.parent / "observations.jsonl")
    again = plan_of(folder, cut, SUITES[cut], ("t0", "t1"))
    assert sum(its for lane in again.lanes for _, _, its in lane.shards) == pytest.approx(30.0 * len(shards))
    assert sum(leaf.metric_seconds for leaf in again.leaves) == pytest.approx(60.0)
    start = again.predicted_makespan_seconds - 30.0 * len(shards) - 60.0 / 2  # one lane, then the last metric
    assert start == pytest.approx(20.0, abs=1.0)


def earlier(site, folder, cut):
    """An evaluation that has ended, with all responses of t0 in this cut."""
    made = record(1, suite=SUITES[cut]).model_copy(update={"evaluation_id": f"c-{cut or 8}-00000000"})
    paths = site.paths.evaluation(made.evaluation_id)
    for each in paths.folders():
        each.mkdir(parents=True)
    (paths.responses / "x.frames").write_bytes(b"x" * 100)
    write_record(paths.evaluation, made)
    planned = plan_of(folder, cut, SUITES[cut])
    frame = FrameRef(file="x.frames", offset=0, length=1)
    dumped = ev.ShardsDumped(at=1.0, shards=tuple((s, frame) for s in planned.leaves[0].shards))
    lines = [line_of(event) for event in (ev.Accepted(at=0.0, record=made), planned, dumped)]
    paths.journal.write_bytes(b"".join(lines))
    said = {"evalspan": {"batch_size": 8, "keys": {"t0": {"requests": "k", "score": "s"}}}}
    paths.results.write_text(json.dumps(said))
    return made.evaluation_id


@pytest.mark.parametrize("of", SUITES)
@pytest.mark.parametrize("wanted", SUITES)
def test_responses_are_used_again_in_the_same_cut_alone(folder, tmp_path, of, wanted):
    site = Site(work_dir=str(tmp_path / "work"), trial_command=(), worker_command=())
    before = earlier(site, folder, of)
    ours = record(1, suite=SUITES[wanted])
    site.paths.evaluation(ours.evaluation_id).responses.mkdir(parents=True)
    state, _ = machine.start_evaluation(ev.Accepted(at=2.0, record=ours))
    cuts = {0: wanted} if wanted else {}
    sought = FindResponses(sets={0: {"t0": str(folder / "t0")}}, batch_size=8, cuts=cuts)
    found = reuse.find_responses(state, sought, site.paths, Present(site), 3.0)
    assert dict(found.sources) == ({"t0": before} if of == wanted else {})
    if of == wanted:
        assert {ShardId.parse(shard).cut for shard, _ in found.shards} == {wanted}
