"""What may go of a work folder, by age and by what needs it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.keeping.retention import GOING, OnDisk, Policy, Shared, Size, removals, unused

NAMES = [f"step-{i}" for i in range(6)]
SETS = [f"set-{i}" for i in range(4)]
SIZES = st.builds(Size, files=st.integers(0, 200), bytes=st.integers(0, 10**9))
PARTS = ["", "scores", *GOING["scores"]]
POLICIES = st.builds(
    Policy,
    keep=st.sampled_from(sorted(GOING)),
    older_than_seconds=st.floats(0, 100),
    baselines=st.lists(st.sampled_from([*NAMES, "step-[01]", "none"]), max_size=2).map(tuple),
)
NOW = 100.0
FEW = settings(max_examples=60)


@st.composite
def folders(draw: st.DrawFn) -> list[OnDisk]:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    return [
        OnDisk(
            evaluation_id=name,
            accepted_at=draw(st.floats(0, 50)),
            ended_at=draw(st.none() | st.floats(50, NOW)),
            parts=draw(st.dictionaries(st.sampled_from(PARTS), SIZES)),
            sets=draw(st.frozensets(st.sampled_from(SETS))),
            reuses=draw(st.frozensets(st.sampled_from(NAMES), max_size=2)),
            checkpoint=draw(st.sampled_from(["", "d1", "d2"])),
        )
        for name in names
    ]


KINDS = {
    "request sets": SETS,
    "converted checkpoints": ["d1-a", "d2-b", "d3-c"],
    "code for jobs": ["code-1", "code-2", "code-3"],
    "unreadable notices": ["x.bad"],
    "cache": ["index.json"],
}


@st.composite
def shared_files(draw: st.DrawFn) -> list[Shared]:
    return [
        Shared(kind=kind, path=f"/w/{name}", size=Size(1, 1), used_at=draw(st.floats(0, NOW)))
        for kind, names in KINDS.items()
        for name in names
    ]


@FEW
@given(folders(), POLICIES)
def test_nothing_goes_of_what_is_open_young_reused_or_a_baseline(
    evaluations: list[OnDisk], policy: Policy
) -> None:
    by_id = {e.evaluation_id: e for e in evaluations}
    reused = {name for e in evaluations if e.ended_at is None for name in e.reuses}
    for removal in removals(evaluations, policy, NOW):
        ended_at = by_id[removal.evaluation_id].ended_at
        assert ended_at is not None
        assert NOW - ended_at >= policy.older_than_seconds
        assert removal.evaluation_id not in {*reused, *policy.baselines}
        assert set(removal.parts) <= set(GOING[policy.keep])


@FEW
@given(folders(), POLICIES)
def test_scores_and_records_never_go(evaluations: list[OnDisk], policy: Policy) -> None:
    """Whatever the policy: results, reports and journals stay, so a learning curve loses no point."""
    found = removals(evaluations, policy, NOW)
    assert not {"", "scores"} & {part for removal in found for part in removal.parts}
    kept_with_responses = {"responses", "samples", "verdicts", "judgements"}
    if policy.keep != "scores":
        assert not kept_with_responses & {part for removal in found for part in removal.parts}


@FEW
@given(folders(), shared_files(), POLICIES, st.sampled_from([None, "code-2", "code-9"]))
def test_what_evaluations_share_goes_only_where_none_needs_it(
    evaluations: list[OnDisk], shared: list[Shared], policy: Policy, code: str | None
) -> None:
    """Sets while an evaluation has responses to them; code while a job may run it; a converted checkpoint while open."""
    going = removals(evaluations, policy, NOW)
    gone = unused(shared, evaluations, going, policy, NOW, code=code)
    assert all(NOW - item.used_at >= policy.older_than_seconds for item in gone)
    names = {item.name for item in gone}
    lose = {removal.evaluation_id for removal in going if "responses" in removal.parts}
    for each in evaluations:
        if each.ended_at is None:
            assert not names & each.sets
            assert not any(
                name.startswith(each.checkpoint) for name in names & set(KINDS["converted checkpoints"])
            )
        elif "responses" in each.parts and each.evaluation_id not in lose:
            assert not names & each.sets
    came = {item.name: item.used_at for item in shared}
    for name in names & set(KINDS["code for jobs"]):
        assert code in came
        assert came[name] < came[str(code)]
        assert all(e.accepted_at >= came[str(code)] for e in evaluations if e.ended_at is None)
    assert "index.json" not in names
