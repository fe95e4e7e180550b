"""Laws of asks, of answers, and of what the report says that they cost: pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.results.report.usage import judge_use
from evaljobs.contract.specs import JudgeConfig
from evaljobs.judges.judgement import Ask, Judgement, ask_key, cost_at_most, read_answer, reply_cost

JUDGE = JudgeConfig(
    url="http://h/v1", model="m", price_per_million_prompt_tokens=2.5, price_per_million_completion_tokens=10
)
ASKS = st.builds(Ask, system=st.text(), user=st.text(), form=st.sampled_from(["rating", "winner"]))


RATINGS = [
    ("Good. Rating: [[5]]", 5.0), ("[[8.5]] and later [[2]]", 8.5), ("[3] is cited, yet [[9]]", 9.0), ("[[10]]", 10.0),
    ("Rating: [6]", 6.0),  # FastChat's second pattern
    *((none, None) for none in ("In [2023] it was fine", "[[0]]", "[[11]]", "[[five]]", "", "[[9" + "9" * 400 + "]]")),
    # a search quadratic in these would take days
    *((f"{start}{'1' * 7_000_000}", None) for start in ("[", "[[")), ("[[" * 3_500_000, None), ("[[1." * 2_000_000, None),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "value"), RATINGS, ids=lambda value: str(value)[:20])
def test_ratings_are_read_as_fastchat_reads_them(answer, value):
    """[[x]] first, [x] else, within 1 to 10; what is none has a reason."""
    reply = read_answer("rating", answer)
    assert reply.value == value
    assert bool(reply.error) == (value is None)


@pytest.mark.parametrize(
    ("answer", "value"),
    [("so [[A]]", "A"), ("[[B]]", "B"), ("[[C]]", "tie"), ("[[B]] not [[A]]", "A"), ("A", None), ("", None)],
)
def test_winners_are_read_as_fastchat_reads_them(answer, value):
    """A is looked for before B before C, wherever they stand."""
    reply = read_answer("winner", answer)
    assert reply.value == value
    assert bool(reply.error) == (value is None)


@given(st.text())
def test_no_answer_breaks_the_reader(text):
    """Whatever a judge writes is a value of its form, or a reason."""
    rating = read_answer("rating", text)
    assert rating.error if rating.value is None else 1 <= float(rating.value) <= 10
    assert read_answer("winner", text).value in (None, "A", "B", "tie")


@given(ASKS, ASKS)
def test_a_key_is_the_content(one, two):
    """Equal asks of one judge have one key; any difference, in ask or judge, is another key."""
    assert (ask_key(one, JUDGE) == ask_key(two, JUDGE)) == (one == two)
    other = JUDGE.model_copy(update={"temperature": 0.5})
    assert ask_key(one, other) != ask_key(one, JUDGE)
    capped = JUDGE.model_copy(update={"concurrency": 1, "max_cost": 3.0, "retries": 0})
    assert ask_key(one, capped) == ask_key(one, JUDGE), "how fast it is asked is no content"


@given(ASKS, st.integers(0, 5000))
def test_no_request_costs_more_than_its_most(ask, completion):
    """Tokens are at most bytes, and completions at most max_tokens: the most bounds the bill."""
    tokens = len((ask.system + ask.user).encode(errors="replace"))
    paid = reply_cost(JUDGE, tokens, min(completion, JUDGE.max_tokens))
    assert 0 <= paid <= cost_at_most(JUDGE, ask)


OPTIONS = JudgeConfig(url="http://j/v1", model="m", price_per_million_prompt_tokens=1.0, max_cost=2.0)
ROWS = st.lists(
    st.builds(
        Judgement,
        key=st.text("ab", min_size=1),
        evaluation=st.sampled_from(["ours", "theirs"]),
        job=st.sampled_from(["execute-a-0", "execute-b-0", "gone"]),
        answer=st.sampled_from(["[[5]]", None]),
        prompt_tokens=st.none() | st.integers(0, 1000),
        completion_tokens=st.none() | st.integers(0, 1000),
        cost_millionths=st.integers(0, 10**7),
        **{key: st.just("rating") for key in ("url", "model", "form", "system", "user")},
        **{key: st.just(1) for key in ("temperature", "max_tokens")},
    ),
    max_size=20,
)


@given(rows=ROWS)
def test_every_judgement_counts_once_and_only_ours_cost(rows):
    """Counts by task add up to the files; the cost is this evaluation's, with failed tries."""
    use = judge_use(OPTIONS, rows, {"execute-a-0": "a", "execute-b-0": "b"}, "ours")
    assert sum(t.judgements + t.missing for t in use.tasks.values()) == len(rows)
    assert set(use.tasks) <= {"a", "b", "other"}
    own = [r for r in rows if r.evaluation == "ours"]
    assert abs(use.cost - sum(r.cost_millionths for r in own) / 1e6) < 1e-9
    assert sum(t.prompt_tokens for t in use.tasks.values()) == sum(r.prompt_tokens or 0 for r in own)
    assert sum(t.reused for t in use.tasks.values()) == len(rows) - len(own)
    assert (use.priced, use.max_cost) == (True, 2.0)
