"""Laws of the pairing: good nodes are never accused, bad ones are found in few rounds."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from coordinator.operations.node_check.pairing import Outcome, Pairing


def checked(
    nodes: int, bad: set[str], *, rounds: int = 10_000, lost: random.Random | None = None
) -> tuple[Pairing, list[int]]:
    """A check of nodes "0", "1", … and how many tests each round had. `lost`: draws tests that do not take place."""
    pairing, sizes = Pairing([str(n) for n in range(nodes)], most_rounds=rounds), []
    while worlds := pairing.worlds():
        assert len({n for world in worlds for n in world}) == sum(map(len, worlds)), (
            "a node is in one test at a time"
        )
        sizes.append(len(worlds))
        pairing.learn(
            {
                w: Outcome(
                    passed=None if lost and lost.random() < 0.1 else bad.isdisjoint(w), why="it failed"
                )
                for w in worlds
            }
        )
    return pairing, sizes


@st.composite
def clusters(draw: st.DrawFn, *, most: float) -> tuple[int, set[str]]:
    """Number of nodes, and which are bad: at most this share."""
    nodes = draw(st.integers(2, 90))
    bad = draw(st.sets(st.integers(0, nodes - 1), max_size=int(most * nodes)))
    return nodes, {str(n) for n in bad}


@given(clusters(most=1.0), st.integers(1, 12), st.randoms(use_true_random=False))
def test_no_good_node_is_accused_and_no_bad_one_passes(
    drawn: tuple[int, set[str]], rounds: int, lost: random.Random
) -> None:
    """However many are bad, however few the rounds, and where tests do not take place. No good one: undetermined."""
    nodes, bad = drawn
    pairing, sizes = checked(nodes, bad, rounds=rounds, lost=lost)
    assert set(pairing.bad) <= bad
    assert bad.isdisjoint(pairing.good)
    assert len(sizes) <= rounds
    all_bad, _ = checked(nodes, {str(n) for n in range(nodes)})
    assert all_bad.undetermined
    assert not all_bad.bad


@given(clusters(most=0.25))
def test_a_quarter_of_bad_nodes_is_found_in_two_rounds(drawn: tuple[int, set[str]]) -> None:
    """Of an odd number one suspect may be left for round 3. Round 1 pairs all; three are together where they are odd."""
    nodes, bad = drawn
    two, sizes = checked(nodes, bad, rounds=2)
    assert sizes[0] == nodes // 2
    assert len(two.suspects) <= nodes % 2
    three, _ = checked(nodes, bad, rounds=3)
    assert set(three.bad) == bad
    assert len(three.good) == nodes - len(bad)


@given(clusters(most=0.5))
def test_fewer_than_half_are_found_in_bounded_rounds(drawn: tuple[int, set[str]]) -> None:
    """Each way of pairing suspects, then a suspect a round at least."""
    nodes, bad = drawn
    if len(bad) > (nodes - 1) // 2:
        return
    pairing, sizes = checked(nodes, bad)
    assert (set(pairing.bad), len(sizes) <= nodes + nodes // 2) == (bad, True)


def test_sixty_four_nodes_with_a_bad_one_take_two_rounds_for_each_of_a_hundred_seeds() -> None:
    """33 tests: 32 pairs, then the two suspects with good nodes."""
    for seed in range(100):
        bad = {str(random.Random(seed).randrange(64))}
        pairing, sizes = checked(64, bad)
        assert (set(pairing.bad), sizes) == (bad, [32, 2])


def test_a_node_that_is_tested_alone_is_not_accused_by_a_failed_test() -> None:
    """An interpreter without torch fails on good nodes, too."""
    pairing, sizes = checked(1, {"0"})
    assert (pairing.bad, pairing.undetermined, sizes) == ({}, True, [1])


def test_evidence_of_its_own_accuses_a_node_and_clears_its_partner_where_their_test_passed() -> None:
    """A failed test with an accused node says nothing of the partner, who is tested again."""
    pairing = Pairing(["a", "b", "c", "d", "e", "f"])
    assert pairing.worlds() == [("a", "b"), ("c", "d"), ("e", "f")]
    pairing.accuse("a", "wrong product")
    pairing.accuse("c", "slow")
    pairing.learn(
        {
            ("a", "b"): Outcome(passed=False, why="x"),
            ("c", "d"): Outcome(passed=True),
            ("e", "f"): Outcome(passed=True),
        }
    )
    assert (set(pairing.good), pairing.suspects) == ({"d", "e", "f"}, ["b"])
    assert pairing.worlds() == [("b", "d")]
    assert [pairing.verdict(n) for n in "ab"] == [("bad", "wrong product"), ("suspect", "x")]
    pairing.doubt("f", "slow")
    assert pairing.worlds() == [("b", "d"), ("f", "e")]
