"""Laws of screen mode in the machine: looks are at whole prefixes of the order of asking, what depends on a look is held until
then, and an answer withdraws the rest.
"""

from hypothesis import given
from hypothesis import strategies as st
from support.simulated.parts import record

from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation import screening, shards
from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.actions import JudgeScreen, WithdrawShards
from coordinator.decide.evaluation.records import Screening, ScreenScore
from coordinator.decide.evaluation.state import Trial
from evaljobs.contract.outcomes import Scored
from evaljobs.contract.specs import FrameRef, ScreenOptions

FRAME = FrameRef(file="t.frames", offset=0, length=1)


def begun(leaves):
    """An evaluation of one entry whose leaf tasks have these blocks of documents, planned; and its journal."""
    whole = record(1)
    suite = whole.suite.model_copy(update={"mode": "screen", "screen": ScreenOptions()})
    whole = whole.model_copy(update={"suite": suite, "screening": Screening(reference="r", order="aaaaaaaa")})
    accepted = ev.Accepted(at=0.0, record=whole, code="")
    state, _ = machine.start_evaluation(accepted)
    sets = {f"leaf{i}": f"/sets/{i}" for i in range(len(leaves))}
    planned = [
        ev.PlannedLeaf(
            task=name, name=name, entry=0, key="k", folder=place, executes=False, sampled=False,
            documents=sum(map(len, blocks)),
            shards=tuple(f"{name}|screen-aaaaaaaa-8:{n}|{n + 1}" for n, block in enumerate(blocks) if block),
            shard_documents=tuple(tuple(block) for block in blocks if block),
            shard_blocks=tuple(n for n, block in enumerate(blocks) if block),
        )
        for (name, place), blocks in zip(sets.items(), leaves, strict=True)
    ]  # fmt: skip
    rows = tuple(
        (shard, float(block), 1.0)
        for leaf in planned
        for shard, block in zip(leaf.shards, leaf.shard_blocks, strict=True)
    )
    journal = [
        ev.RequestSetsFound(at=1.0, sets={0: sets}, folders={0: "/sets"}, batch_size=8),
        ev.Planned(
            at=2.0, batch_size=8, leaves=tuple(planned), lanes=(ev.PlannedLane(lane="n/0", node="n", shards=rows),),
            predicted_makespan_seconds=1.0, lower_bound_seconds=1.0, gpu_seconds=1.0,
        ),
    ]  # fmt: skip
    for event in journal:
        machine.apply_event(state, event)
    return state, [accepted, *journal]


def judged(entry, look, *, settled):
    score = ScreenScore(
        task="t0", verdict="worse" if settled else "open", metric="acc,none", asked=look, documents=100, reference=0.5,
        estimate=0.4, low=0.3, high=0.5,
    )  # fmt: skip
    return ev.ScreenJudged(at=9.0, entry=entry, settled=settled, score=score)


blocks = st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=3)


@given(sizes=blocks, data=st.data())
def test_looks_are_at_whole_prefixes_and_shards_are_held_until_a_look_needs_them(sizes, data):
    """Whatever the order in which shards come, whichever look settles it, and however many trials run. Beyond the block that the
    last look left open, only trials without other work get shards, of the next block alone. An answer withdraws what is not done,
    nothing is ever stuck, and a replay of the journal is the same state.
    """
    number = iter(range(1000))
    leaves = [[[next(number) for _ in range(size)] for size in row] for row in [[1, *row] for row in sizes]]
    state, journal = begun(leaves)
    entry, place = state.entries[0], {s: b for leaf in state.shards.leaves.values()
                                      for s, b in zip(leaf.planned.shards, leaf.planned.shard_blocks, strict=True)}  # fmt: skip
    settles, trials, look = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3)), None
    state.trials.live |= {
        str(i): Trial(name=str(i), job="j", member=i, lane=f"n/{i}", running=True) for i in range(trials)
    }

    def take(event):
        journal.append(event)
        return list(machine.apply_event(state, event))

    def undone():
        return {s for s in place if state.shards.by_name[s].frame is None}

    while not entry.terminal:
        before = {s for s in place if shards.is_to_do(state, s)}
        for event in list(screening.blocks_due(state, 4.0)):
            take(event)
        assert not list(screening.blocks_due(state, 4.0))
        todo = {s for s in place if shards.is_to_do(state, s)}
        ahead = {s for s in todo - before if place[s] > entry.looked}
        assert {place[s] for s in todo} <= {*range(entry.looked + 2)}
        assert not ahead or len(todo) <= trials
        assert (state.shards.todo, state.shards.held) == (len(todo), len(undone() - todo))
        for event in list(screening.looks_due(state, 4.0)):
            done = {place[s] for s in undone()}
            assert event.blocks == min(done, default=max(place.values()) + 1)
            assert event.blocks > entry.looked
            assert look is None
            take(event)
            assert not list(screening.looks_due(state, 4.0))  # one look at a time
            look = event
        if look is None or (todo and data.draw(st.booleans())):
            shard = data.draw(st.sampled_from(sorted(todo)))
            take(ev.ShardsDumped(at=3.0, shards=((shard, FRAME),)))
            continue
        outcome = Scored(name=look.name, entry=0, result_file="f", seconds=1.0)
        assert take(ev.OutcomeSeen(at=5.0, outcome=outcome)) == [JudgeScreen(entry=0)]
        assert screening.judge_again(state) == [JudgeScreen(entry=0)]
        settled = look.blocks >= settles or not undone()
        actions = take(judged(0, look.blocks, settled=settled))
        queued = {s for a in actions if isinstance(a, WithdrawShards) for s in a.shards}
        assert queued == (todo if settled else set())
        look = None
    assert entry.status == "scored"
    assert (state.shards.todo, state.shards.held) == (0, 0)
    assert not any(shards.is_to_do(state, shard) for shard in place)
    again, _ = machine.start_evaluation(journal[0])
    for event in journal[1:]:
        machine.apply_event(again, event)
    assert (again.entries, again.shards) == (state.entries, state.shards)


def test_a_shard_that_turned_out_unreadable_during_a_look_is_asked_again():
    """The answer of that look counts for nothing: its documents are not those on disk."""
    state, _ = begun([[[0], [1]]])
    first, second = state.shards.leaves["leaf0"].planned.shards
    machine.apply_event(state, ev.ShardsDumped(at=3.0, shards=((first, FRAME),)))
    (look,) = screening.looks_due(state, 4.0)
    machine.apply_event(state, look)
    machine.apply_event(
        state, ev.OutcomeSeen(at=5.0, outcome=Scored(name=look.name, entry=0, result_file="f", seconds=1.0))
    )
    machine.apply_event(state, ev.ShardCorrupted(at=6.0, shard=first, error="torn"))
    assert list(machine.apply_event(state, judged(0, 1, settled=True))) == []
    assert state.entries[0].status == "built"
    assert [shards.is_to_do(state, shard) for shard in (first, second)] == [True, False]
