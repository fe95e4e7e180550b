"""A plan is of the batches of each task's cut, and earlier responses count only in the same cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.simulated.parts import record

from coordinator.evaluation import events as ev
from coordinator.evaluation import step as machine
from coordinator.evaluation.actions import FindResponses, MakePlan
from coordinator.evaluation.job_specs import Site
from coordinator.evaluation.records import EvaluationRecord, cut_on_disk
from coordinator.intake import request_sets
from coordinator.intake.present import Present
from coordinator.planning.make_plan import PlanningError, make_plan
from coordinator.runtime import reuse
from coordinator.runtime.journal import line_of
from evaljobs.contract.names import Cut, ShardId
from evaljobs.contract.paths import (
    WorkPaths,
    batch_index_file,
    entry_manifest,
    request_set_manifest,
)
from evaljobs.contract.specs import BatchIndex, EntryManifest, FrameRef, RequestSetManifest
from evaljobs.contract.storage import write_record

TOKENS = {"8": (80_000,) * 2, "4": (30_000,) * 4, "fast-100-8": (10_000,) * 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The request set of task t0 in three cuts."""
    entry = tmp_path / "sets"
    place = entry / "t0"
    write_record(entry_manifest(entry), EntryManifest(entry="t0", sets={"t0": "t0"}))
    manifest = RequestSetManifest(
        task="t0",
        key="k",
        output_type="multiple_choice",
        documents=16,
        requests=16,
        prompt_tokens=1,
        generation_cap_tokens=0,
    )
    write_record(request_set_manifest(place), manifest)
    for cut, tokens in TOKENS.items():
        index = BatchIndex(
            task="t0",
            key="k",
            batch_size=Cut.parse(cut).batch_size,
            offsets=tuple(range(len(tokens) + 1)),
            requests=(1,) * len(tokens),
            prefill_tokens=tokens,
            generated_tokens=(0,) * len(tokens),
            documents=((0,),) * len(tokens),
        )
        write_record(batch_index_file(place, cut), index)
    return entry


def plan_of(folder: Path, cut: str, tmp_path: Path, suite: dict[str, Any] | None = None) -> ev.Planned:
    wanted = MakePlan(
        sets={0: {"t0": str(folder / "t0")}},
        batch_size=8,
        lanes=(("n/0", "n"),),
        cuts={0: cut} if cut else {},
    )
    made = record(1, suite=suite)
    weights = made.checkpoint.files[0].model_copy(update={"size": 14 * 10**9})
    checkpoint = made.checkpoint.model_copy(update={"files": (weights,)})
    made = made.model_copy(update={"checkpoint": checkpoint})
    return make_plan(made, wanted, tmp_path / "observations.jsonl", "a100", 1.0)


def test_a_plan_is_of_the_batches_of_its_cut_and_its_shards_name_it(folder: Path, tmp_path: Path) -> None:
    """Fewer tokens take less; batches of another cut do not count as built."""
    seconds = []
    for cut in ("fast-100-8", "4", ""):
        planned = plan_of(folder, cut, tmp_path)
        names = [ShardId.parse(shard) for shard in planned.leaves[0].shards]
        assert {name.cut for name in names} == {planned.leaves[0].cut} == {cut}
        assert sum(n.end_batch - n.first_batch for n in names) == len(TOKENS[cut_on_disk(cut, 8)])
        assert {s for lane in planned.lanes for s, _, _ in lane.shards} == set(planned.leaves[0].shards)
        assert request_sets.found(folder, cut, None) == {"t0": str(folder / "t0")}
        seconds.append(planned.gpu_seconds)
    assert seconds == sorted(set(seconds))
    assert request_sets.found(folder, "fast-50-8", None) is None
    with pytest.raises(PlanningError, match="batches-fast-50-8"):
        plan_of(folder, "fast-50-8", tmp_path)
    assert cut_on_disk("", "auto") == ""


SUITES: dict[str, dict[str, Any]] = {
    "": {},
    "4": {"name": "four"},
    "fast-100-8": {"name": "quick", "mode": "fast", "token_budget": 100},
}


def earlier(work: WorkPaths, folder: Path, tmp_path: Path, cut: str) -> EvaluationRecord:
    """An evaluation that has ended, with all responses of t0 in this cut."""
    made = record(1, suite=SUITES[cut]).model_copy(update={"evaluation_id": f"c-{cut or 8}-00000000"})
    paths = work.evaluation(made.evaluation_id)
    for each in paths.folders():
        each.mkdir(parents=True)
    (paths.responses / "x.frames").write_bytes(b"x" * 100)
    write_record(paths.evaluation, made)
    planned = plan_of(folder, cut, tmp_path, SUITES[cut])
    frame = FrameRef(file="x.frames", offset=0, length=1)
    dumped = ev.ShardsDumped(at=1.0, shards=tuple((s, frame) for s in planned.leaves[0].shards))
    lines = [line_of(event) for event in (ev.Accepted(at=0.0, record=made), planned, dumped)]
    paths.journal.write_bytes(b"".join(lines))
    said = {"evalspan": {"batch_size": 8, "keys": {"t0": {"requests": "k", "score": "s"}}}}
    paths.results.write_text(json.dumps(said))
    return made


@pytest.mark.parametrize("of", list(SUITES))
@pytest.mark.parametrize("wanted", list(SUITES))
def test_responses_are_used_again_in_the_same_cut_alone(
    folder: Path, tmp_path: Path, of: str, wanted: str
) -> None:
    work = WorkPaths(tmp_path / "work")
    before = earlier(work, folder, tmp_path, of)
    ours = record(1, suite=SUITES[wanted])
    (work.evaluation(ours.evaluation_id).responses).mkdir(parents=True)
    state, _ = machine.start(ev.Accepted(at=2.0, record=ours))
    sought = FindResponses(
        sets={0: {"t0": str(folder / "t0")}}, batch_size=8, cuts={0: wanted} if wanted else {}
    )
    site = Site(work_dir=str(work.root), trial_command=(), worker_command=())
    found = reuse.find(state, sought, work, Present(site), 3.0)
    assert dict(found.sources) == ({"t0": before.evaluation_id} if of == wanted else {})
    if of == wanted:
        assert {ShardId.parse(shard).cut for shard, _ in found.shards} == {wanted}
