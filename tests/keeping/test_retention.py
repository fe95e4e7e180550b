"""What may go of a work folder, by age and by what needs it."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.config.schema import RetentionConfig
from coordinator.keeping.retention import GOING, OnDisk, Shared, Size, WorkFolder, going

NOW = 100 * 3600.0
TIMES = st.floats(0, NOW / 2), st.floats(NOW / 2, NOW)
NAMES = [f"step-{i}" for i in range(4)]
SETS = [f"set-{i}" for i in range(4)]
CONVERTED, CODE = ["d1-a", "d2-b", "d3-c"], ["code-1", "code-2", "code-3"]
SHARED = {
    "request sets": SETS,
    "converted checkpoints": CONVERTED,
    "code for jobs": CODE,
    "cache": ["index.json"],
}
POLICIES = st.builds(
    RetentionConfig,
    keep=st.sampled_from(sorted(GOING)),
    older_than=st.integers(0, 100).map("{}h".format),
    baselines=st.sampled_from([(), ("none", "step-2"), ("step-[01]",)]),
)
SIZES = st.builds(Size, files=st.integers(0, 200), bytes=st.integers(0, 10**9))
EVALUATIONS = st.builds(
    OnDisk,
    evaluation_id=st.sampled_from(NAMES),
    accepted_at=TIMES[0],
    ended_at=st.none() | TIMES[1],
    parts=st.dictionaries(st.sampled_from(["", "scores", *GOING["scores"]]), SIZES),
    sets=st.frozensets(st.sampled_from(SETS)),
    reuses=st.sampled_from([*map(frozenset, ((), NAMES[:2], NAMES[2:]))]),
    checkpoint=st.sampled_from(["", "d1", "d2"]),
)
ITEMS = st.tuples(
    *(
        st.builds(
            Shared, kind=st.just(kind), path=st.just(f"/w/{name}"), size=SIZES, used_at=st.floats(0, NOW)
        )
        for kind, names in SHARED.items()
        for name in names
    )
)
FOLDERS = st.builds(WorkFolder, st.lists(EVALUATIONS, unique_by=lambda e: e.evaluation_id).map(tuple), ITEMS)


@settings(max_examples=200)
@given(FOLDERS, POLICIES, st.sampled_from([None, "code-2", "code-9"]))
def test_nothing_goes_that_is_young_or_needed_or_a_record(
    folder: WorkFolder, policy: RetentionConfig, code: str | None
) -> None:
    """Of evaluations: nothing of an open one, of one that is used again, of a baseline; no score and no record.

    Of what they share: no set while an evaluation has responses to it, no code that a job may run, no converted
    checkpoint of an open one.
    """
    gone = going(folder, policy, NOW, code=code)
    reused = {name for e in folder.evaluations if e.ended_at is None for name in e.reuses}
    by_id = {e.evaluation_id: e for e in folder.evaluations}
    for each in gone.evaluations:
        assert each.ended_at is not None
        assert NOW - each.ended_at >= policy.older_than_seconds
        assert each.evaluation_id not in reused
        assert not any(fnmatchcase(each.evaluation_id, glob) for glob in policy.baselines)
        assert each.parts.items() <= by_id[each.evaluation_id].parts.items()
        assert each.parts.keys() <= set(GOING[str(policy.keep)]) - {"", "scores"}
        if policy.keep == "responses":
            assert not each.parts.keys() & {"responses", "samples", "verdicts", "judgements"}
    assert all(NOW - item.used_at >= policy.older_than_seconds for item in gone.shared)
    names = {item.name for item in gone.shared}
    lose = {each.evaluation_id for each in gone.evaluations if "responses" in each.parts}
    for each in folder.evaluations:
        if each.ended_at is None:
            assert not any(name.startswith(each.checkpoint) for name in names & set(CONVERTED))
        if each.ended_at is None or ("responses" in each.parts and each.evaluation_id not in lose):
            assert not names & each.sets
    came = {item.name: item.used_at for item in folder.shared}
    for name in names & set(CODE):
        assert came[name] < came[str(code)]
        assert all(e.accepted_at >= came[str(code)] for e in folder.evaluations if e.ended_at is None)
    assert "index.json" not in names
