"""Laws of the shards that a trial runs while Redis is away."""

from hypothesis import given
from hypothesis import strategies as st

from evaljobs.trial.claims import UpcomingShards

NAME = st.sampled_from([f"s{n}" for n in range(8)])
NAMES = st.lists(NAME, unique=True)
CALLS = st.one_of(
    st.tuples(st.just("renew"), NAMES), st.tuples(st.just("had"), NAME), st.tuples(st.just("take"), NAMES)
)


@given(st.lists(CALLS, max_size=30))
def test_a_trial_runs_no_shard_twice_and_only_those_that_redis_last_named(calls):
    """In their order, each once, without those that it cannot run; none while Redis answers."""
    ahead, names, had = UpcomingShards(), [], set()
    for call, given_ in calls:
        if call == "renew":
            ahead.renew(given_)
            names = given_
            assert ahead.take(lambda _name: True) is None, "Redis answers: claims are asked of it"
        elif call == "had":
            ahead.had(given_)
            had.add(given_)
        else:
            ahead.away = True
            left = [name for name in names if name not in had and name in given_]
            shard = ahead.take(lambda name, runs=given_: name in runs)
            assert shard == (left[0] if left else None)
            had |= set(left[:1])
