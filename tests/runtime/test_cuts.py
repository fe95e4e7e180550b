"""A plan is of the batches of each task's cut, and earlier responses count only in the same cut."""

from __future__ import annotations

import json

import pytest
from support.simulated.parts import record

from coordinator.evaluation import events as ev
from coordinator.evaluation import step as machine
from coordinator.evaluation.actions import FindResponses, MakePlan
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import cut_on_disk
from coordinator.intake import request_sets
from coordinator.intake.present import Present
from coordinator.planning.make_plan import PlanningError, make_plan
from coordinator.runtime import reuse
from coordinator.runtime.journal import line_of
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.paths import batch_index_file, entry_manifest, request_set_manifest
from evaljobs.contract.specs import BatchIndex, EntryManifest, FrameRef, RequestSetManifest
from evaljobs.contract.storage import write_record

TOKENS = {"8": (80_000,) * 2, "4": (30_000,) * 4, "fast-100-8": (10_000,) * 3}
SUITES = {
    "": {},
    "4": {"name": "four"},
    "fast-100-8": {"name": "quick", "mode": "fast", "token_budget": 100},
}


@pytest.fixture
def folder(tmp_path):
    """The request set of task t0 in three cuts."""
    entry = tmp_path / "sets"
    known = {"task": "t0", "key": "k"}
    write_record(entry_manifest(entry), EntryManifest(entry="t0", sets={"t0": "t0"}))
    counts = {"documents": 16, "requests": 16, "prompt_tokens": 1, "generation_cap_tokens": 0}
    manifest = RequestSetManifest(**known, **counts, output_type="multiple_choice")
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


def plan_of(folder, cut, suite=None):
    sets = {0: {"t0": str(folder / "t0")}}
    wanted = MakePlan(sets=sets, batch_size=8, lanes=(("n/0", "n"),), cuts={0: cut} if cut else {})
    made = record(1, suite=suite)
    weights = made.checkpoint.files[0].model_copy(update={"size": 14 * 10**9})
    checkpoint = made.checkpoint.model_copy(update={"files": (weights,)})
    made = made.model_copy(update={"checkpoint": checkpoint})
    return make_plan(made, wanted, folder.parent / "observations.jsonl", "a100", 1.0)


def test_a_plan_is_of_the_batches_of_its_cut_and_its_shards_name_it(folder):
    """Fewer tokens take less; batches of another cut do not count as built."""
    seconds = []
    for cut in ("fast-100-8", "4", ""):
        planned = plan_of(folder, cut)
        names = [ShardId.parse(shard) for shard in planned.leaves[0].shards]
        assert {name.cut for name in names} == {planned.leaves[0].cut} == {cut}
        assert sum(n.end_batch - n.first_batch for n in names) == len(TOKENS[cut_on_disk(cut, 8)])
        assert {s for lane in planned.lanes for s, _, _ in lane.shards} == set(planned.leaves[0].shards)
        assert request_sets.found(folder, cut, None) == {"t0": str(folder / "t0")}
        seconds.append(planned.gpu_seconds)
    assert seconds == sorted(set(seconds))
    assert request_sets.found(folder, "fast-50-8", None) is None
    with pytest.raises(PlanningError, match="batches-fast-50-8"):
        plan_of(folder, "fast-50-8")
    assert cut_on_disk("", "auto") == ""


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
    state, _ = machine.start(ev.Accepted(at=2.0, record=ours))
    cuts = {0: wanted} if wanted else {}
    sought = FindResponses(sets={0: {"t0": str(folder / "t0")}}, batch_size=8, cuts=cuts)
    found = reuse.find(state, sought, site.paths, Present(site), 3.0)
    assert dict(found.sources) == ({"t0": before} if of == wanted else {})
    if of == wanted:
        assert {ShardId.parse(shard).cut for shard, _ in found.shards} == {wanted}
