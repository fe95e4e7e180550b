"""The codec: values survive, and all that comes from the other side is a value or an error."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import json
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaljobs.sandbox.rpc import codec, frames


def _no_handle(value: Any) -> int | str:
    raise LookupError(type(value).__name__)


ENCODER = codec.Encoder(_no_handle)
DECODER = codec.Decoder(lambda body: ("handle", str(body)))

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 9).map(lambda n: 10**5000 + n)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.datetimes()
    | st.timedeltas()
)
hashable = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(collections.deque)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=12,
)
bodies = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["<f8", "O", "date", "1e9"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*"tdOCMhmisefbacrqDFTnN"]), inner, min_size=1, max_size=1)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(values)
def test_a_value_survives_the_crossing(value: Any) -> None:
    """What is decoded equals what was encoded, type by type."""
    again = DECODER.loads(ENCODER.dumps(value))
    assert again == value
    assert type(again) is type(value)


@settings(max_examples=500)
@given(bodies)
def test_hostile_json_is_a_value_that_has_a_way_back_or_refused(body: Any) -> None:
    """Any JSON decodes or raises CodecError; what decodes can be encoded again."""
    try:
        value = DECODER.loads(json.dumps(body))
    except codec.CodecError:
        return
    ENCODER.dumps(value)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_hostile_bytes_are_refused_or_a_value(data: bytes) -> None:
    """Any bytes decode or raise CodecError."""
    try:
        DECODER.loads(data)
    except codec.CodecError:
        return


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 10**6,
        b'{"t":' * 10**5,
        b"9" * 10**5,
        b'{"i":"' + b"f" * 10**6 + b'"}',
        b'{"D":"1E+99999999999999999999"}',
    ],
)
def test_bombs_are_refused_or_cheap(data: bytes) -> None:
    """Deep nesting and long numbers neither crash the process nor take quadratic time."""
    try:
        DECODER.loads(data)
    except codec.CodecError:
        return


def test_a_frame_longer_than_the_bound_is_refused_unread() -> None:
    """A length beyond MAX_FRAME is refused before anything is read or allocated."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(frames.FrameError):
            frames.receive_frame(ours)
        theirs.sendall((5).to_bytes(4, "big") + b"ab")
        theirs.close()
        assert frames.receive_frame(ours) is None


def test_subclasses_cross_as_what_they_hold() -> None:
    """A lying subclass of a data type is only its data on the other side."""

    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert DECODER.loads(ENCODER.dumps([Liar(7)])) == [7]
    assert [
        type(v)
        for v in DECODER.loads(
            ENCODER.dumps([Liar(7), decimal.Decimal(1), fractions.Fraction(1, 2), dt.time(1)])
        )
    ] == [
        int,
        decimal.Decimal,
        fractions.Fraction,
        dt.time,
    ]


def test_numpy_values_cross() -> None:
    """Arrays and scalars keep their type, shape and values."""
    np = pytest.importorskip("numpy")
    array, scalar = DECODER.loads(ENCODER.dumps([np.arange(6.0).reshape(2, 3), np.int32(4)]))
    assert (array == np.arange(6.0).reshape(2, 3)).all()
    assert scalar == 4
    assert type(scalar) is np.int32


def test_a_literal_set_keeps_its_order() -> None:
    """{12, 13, 14, 15, 16} iterates from 16 in a program, and so for a callee."""
    literal, grown = {12, 13, 14, 15, 16}, set(range(12, 17))
    for value in (literal, grown):
        assert list(DECODER.loads(ENCODER.dumps(value))) == list(value)
