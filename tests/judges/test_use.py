"""Laws of what the report says a judge cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.report.judge_cost import judge_use
from evaljobs.contract.specs import JudgeOptions
from evaljobs.judges.judgement import Judgement

OPTIONS = JudgeOptions(url="http://j/v1", model="m", price_per_million_prompt_tokens=1.0, max_cost=2.0)
ROWS = st.lists(
    st.builds(
        Judgement,
        key=st.text("ab", min_size=1),
        evaluation=st.sampled_from(["ours", "theirs"]),
        job=st.sampled_from(["execute-a-0", "execute-b-0", "gone"]),
        url=st.just("u"),
        model=st.just("m"),
        temperature=st.just(0.0),
        max_tokens=st.just(1),
        form=st.just("rating"),
        system=st.just(""),
        user=st.just(""),
        answer=st.sampled_from(["[[5]]", None]),
        prompt_tokens=st.one_of(st.none(), st.integers(0, 1000)),
        completion_tokens=st.one_of(st.none(), st.integers(0, 1000)),
        cost_millionths=st.integers(0, 10**7),
    ),
    max_size=20,
)


@given(rows=ROWS)
def test_every_judgement_counts_once_and_only_ours_cost(rows: list[Judgement]) -> None:
    """Counts by task add up to the files; the cost is this evaluation's, with failed tries."""
    use = judge_use(OPTIONS, rows, {"execute-a-0": "a", "execute-b-0": "b"}, "ours")
    assert sum(t.judgements + t.missing for t in use.tasks.values()) == len(rows)
    assert set(use.tasks) <= {"a", "b", "other"}
    own = [r for r in rows if r.evaluation == "ours"]
    assert abs(use.cost - sum(r.cost_millionths for r in own) / 1e6) < 1e-9
    assert sum(t.prompt_tokens for t in use.tasks.values()) == sum(r.prompt_tokens or 0 for r in own)
    assert sum(t.reused for t in use.tasks.values()) == len(rows) - len(own)
    assert (use.priced, use.max_cost) == (True, 2.0)
