"""Laws of screen mode in the machine: looks are at whole prefixes of the order of asking, trials go on meanwhile, and an answer
withdraws the rest.
"""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.drawn import some
from support.simulated.parts import Faults, record
from support.simulated.world import World

from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation import screening, shards
from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.actions import JudgeScreen, WithdrawShards
from coordinator.decide.evaluation.records import Screening, ScreenScore
from evaljobs.contract.outcomes import Scored
from evaljobs.contract.specs import FrameRef, ScreenOptions

FRAME = FrameRef(file="t.frames", offset=0, length=1)


def screen_record(entries):
    """A screen of so many tasks."""
    whole = record(entries, suite={"mode": "screen", "screen": ScreenOptions()})
    return whole.model_copy(update={"screening": Screening(reference="r", order="aaaaaaaa")})


def begun(leaves):
    """An evaluation of one entry whose leaf tasks have these blocks of documents, planned; and its journal."""
    accepted = ev.Accepted(at=0.0, record=screen_record(1), code="")
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
def test_looks_are_at_whole_prefixes_and_no_shard_waits_for_one_in_the_queue(sizes, data):
    """Whatever the order in which shards come, and whichever look settles it. All that is not done is queued, by its block, so that
    a running trial finds work; what no look has asked for yet is no reason to start one. An answer withdraws what is not done, and
    a replay of the journal is the same state.
    """
    number = iter(range(1000))
    leaves = [[[next(number) for _ in range(size)] for size in row] for row in [[1, *row] for row in sizes]]
    state, journal = begun(leaves)
    entry, place = state.entries[0], {s: b for leaf in state.shards.leaves.values()
                                      for s, b in zip(leaf.planned.shards, leaf.planned.shard_blocks, strict=True)}  # fmt: skip
    settles, look = data.draw(st.integers(1, 5)), None

    def take(event):
        journal.append(event)
        return list(machine.apply_event(state, event))

    def undone():
        return {s for s in place if state.shards.by_name[s].frame is None}

    while not entry.terminal:
        (fill,) = shards.refill_queue(state)
        assert {s: rank for rows in fill.lanes.values() for s, rank, _ in rows} == {
            s: place[s] for s in undone()
        }
        needed = sum(place[s] <= entry.looked for s in undone())
        assert (state.shards.todo, state.shards.undecided) == (needed, len(undone()) - needed)
        for event in list(screening.looks_due(state, 4.0)):
            done = {place[s] for s in undone()}
            assert event.blocks == min(done, default=max(place.values()) + 1)
            assert event.blocks > entry.looked
            assert look is None
            take(event)
            assert not list(screening.looks_due(state, 4.0))  # one look at a time
            look = event
        if look is None or (undone() and data.draw(st.booleans())):
            shard = data.draw(st.sampled_from(sorted(undone())))
            take(ev.ShardsDumped(at=3.0, shards=((shard, FRAME),)))
            continue
        outcome = Scored(name=look.name, entry=0, result_file="f", seconds=1.0)
        assert take(ev.OutcomeSeen(at=5.0, outcome=outcome)) == [JudgeScreen(entry=0)]
        assert screening.judge_again(state) == [JudgeScreen(entry=0)]
        settled = look.blocks >= settles or not undone()
        left, actions = undone(), take(judged(0, look.blocks, settled=settled))
        assert {s for a in actions if isinstance(a, WithdrawShards) for s in a.shards} == (
            left if settled else set()
        )
        look = None
    assert entry.status == "scored"
    assert (state.shards.todo, state.shards.undecided) == (0, 0)
    assert not any(shards.is_to_do(state, shard) for shard in place)
    again, _ = machine.start_evaluation(journal[0])
    for event in journal[1:]:
        machine.apply_event(again, event)
    assert (again.entries, again.shards) == (state.entries, state.shards)


SHAKY = Faults(
    kill=0.01, submit_timeout=0.05, listing=0.2, restart=0.03, slow_outcome=0.3, metric_fails=0.02, wipe_queue=0.01
)  # fmt: skip


@some(40)
@given(
    seed=st.integers(0, 2**32),
    settles=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    slow=st.sampled_from([0.0, 0.9]),
    shaky=st.booleans(),
)
def test_a_screen_ends_whatever_fails_and_its_trials_go_on_while_it_looks(seed, settles, slow, shaky):
    """Each question is answered once, from the block on that answers it, or by all of its documents. No shard is answered twice for
    it, however slow looks are: without faults as many trials load as shards are needed at first, and none ends while a shard of an
    open question waits.
    """
    world = World(
        seed,
        replace(SHAKY if shaky else Faults(), metric_slow=slow),
        screen_record(len(settles)),
        in_order=True,
    )
    world.settles = dict(enumerate(settles))

    def going_on(_):
        state = world.state
        if not shaky and (
            waiting := set(world.queue or ())
            & {
                s
                for e in state.entries
                if not e.terminal
                for n in e.leaves.values()
                for s in state.shards.leaves[n].planned.shards
            }
        ):
            ended = [name for name, trial in state.trials.by_name.items() if name not in state.trials.live]
            assert not ended, f"{ended} ended, and {waiting} waits"
        return False

    world.until(going_on)
    world.assert_scored()
    world.assert_nothing_left()
    looks = [event for event in world.journal if isinstance(event, ev.ScreenJudged)]
    assert Counter(e.entry for e in looks if e.settled) == dict.fromkeys(range(len(settles)), 1)
    for event in looks:
        assert event.settled == (event.score.asked >= min(settles[event.entry], event.score.documents))
    if not shaky:
        assert set(world.frames.values()) == {1}
        assert len(world.of("trial")) <= len(settles)


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
    assert [shards.is_to_do(state, shard) for shard in (first, second)] == [True, True]
    assert (state.shards.todo, state.shards.undecided) == (1, 1)
