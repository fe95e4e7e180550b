"""Requests as tokens, and their fixed batches: lm-eval's own chunks.

Rule: batches are a pure function of a request set and a batch size. lm-eval's own `Collator` makes them, with the keys of the
`hf` model class (lm_eval/models/huggingface.py, 0.4.13). The model class pads a batch that runs alone as it would inside the
whole run, so the tensors are the same. A piece has one answer: it is a request, or one token window of a rolling request.
Imports no torch. Called from `requests.build`, `replay_model` and `trial`.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from evaljobs.contract.specs import DEFERRED_BUILD, BatchIndex

Kind = Literal["loglikelihood", "loglikelihood_rolling", "generate_until"]
BLOCK = 512  # pieces per line of the requests file


class Turn(NamedTuple):
    """The user's next message, and the prompt's tokens without those of earlier answers."""

    message: str
    length: int = 0


class Conversation(NamedTuple):
    """Messages before the first answer, as lm-eval gave them to the template; later turns."""

    history: list[dict[str, str]]
    turns: list[Turn]


@dataclass(frozen=True, slots=True)
class Piece:
    """One request. `index`: its position in build order, with clones; `length`: its input in tokens.

    `context` and `continuation` are token ids, or texts if the model class tokenises them (always for generation).
    """

    kind: Kind
    index: int
    document: int
    context: list[int] | str
    continuation: list[int] | str = ""
    window: int = 0
    length: int = 0
    settings: int = -1  # position in the request set's list of generation settings
    conversation: Conversation | None = None

    def lengths(self, cap: int) -> list[int]:
        """Return the input tokens of each turn, assuming `cap` tokens per earlier answer."""
        later = self.conversation.turns if self.conversation is not None else []
        return [self.length, *(turn.length + number * cap for number, turn in enumerate(later, 1))]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsHead:
    """First line of a requests file: common facts of its pieces, and what replay checks.

    `digests`: kind of request -> digest of lm-eval's instances (`instances_digest`). `order`: kind -> build-order positions,
    if a task mixes kinds, otherwise empty. `grouped`: the model class infers once per context. `follow_up`: the documents'
    column with the next messages (`conversations`). `unasked`: rolling requests of an empty text, whose likelihood is an
    empty sum.
    """

    task: str
    requests: int
    digests: dict[str, str]
    order: dict[str, list[int]]
    settings: list[dict[str, Any]]
    max_gen_tokens: list[int]  # per settings
    text: bool
    grouped: bool
    max_length: int
    follow_up: str = ""
    unasked: Sequence[int] = ()


class Unit(NamedTuple):
    """How the pieces of a batch of fast mode share tokens (`requests.units`).

    `prefix`: leading tokens shared with the task's other requests, computed once per trial. `rows`: the number of pieces in
    each row of the forward pass, in the order of pieces.
    """

    prefix: int
    rows: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One forward pass or one call of generate. Its pieces share their kind and settings."""

    kind: Kind
    text: bool
    settings: dict[str, Any] | None
    pieces: list[Piece]
    unit: Unit | None = None  # of likelihoods in fast mode


# --- files' lines ------------------------------------------------------------------------------------------------


_PIECES = TypeAdapter(list[Piece], config=DEFERRED_BUILD)
_BATCH = TypeAdapter(list[Batch], config=DEFERRED_BUILD)


def _pack(data: bytes) -> bytes:
    return base64.b64encode(zlib.compress(data, 6)) + b"\n"


def _unpack(line: bytes) -> bytes:
    return zlib.decompress(base64.b64decode(line))


def encode_requests(head: RequestsHead, pieces: Sequence[Piece]) -> bytes:
    """Encode a requests file: its head as JSON, then blocks of pieces (JSON, zlib, base64), one per line."""
    fields = {name: value for name, value in asdict(head).items() if name != "unasked" or value}
    lines = [json.dumps(fields, ensure_ascii=False).encode() + b"\n"]
    lines += [_pack(_PIECES.dump_json(list(pieces[at : at + BLOCK]))) for at in range(0, len(pieces), BLOCK)]
    return b"".join(lines)


def decode_head(line: bytes) -> RequestsHead:
    return RequestsHead(**json.loads(line))


def decode_pieces(lines: Iterable[bytes]) -> Iterator[Piece]:
    """Yield the pieces of a requests file, from the lines after its head."""
    for line in lines:
        yield from _PIECES.validate_json(_unpack(line))


def encode_batch(batch: Batch) -> bytes:
    """Encode one line of a batch file."""
    return _pack(_BATCH.dump_json([batch]))


def decode_batch(line: bytes) -> Batch:
    [batch] = _BATCH.validate_json(_unpack(line))
    return batch


# --- lm-eval's chunks --------------------------------------------------------------------------------------------


# a batch and its cost: padded input tokens, and the cap on generated tokens
Chunk = tuple[Batch, int, int]


def batch_chunks(head: RequestsHead, pieces: Sequence[Piece], batch_size: int) -> Iterator[Chunk]:
    """Yield all batches of a request set, in lm-eval's execution order."""
    by_kind: dict[Kind, list[Piece]] = {}
    for piece in pieces:
        by_kind.setdefault(piece.kind, []).append(piece)
    for kind, members in by_kind.items():
        if kind == "generate_until":
            yield from generation_chunks(head, members, batch_size)
        elif kind == "loglikelihood":
            yield from _likelihood(head, members, batch_size)
        else:
            yield from _in_order(head, members, batch_size)


def _in_order(head: RequestsHead, pieces: list[Piece], batch_size: int) -> Iterator[Chunk]:
    for at in range(0, len(pieces), batch_size):
        members = pieces[at : at + batch_size]
        yield _forward(head, members, members)


def _forward(head: RequestsHead, members: list[Piece], inferred: Sequence[Piece]) -> Chunk:
    longest = min(max(p.length for p in inferred) - 1, head.max_length)
    batch = Batch(kind=members[0].kind, text=head.text, settings=None, pieces=members)
    return batch, max(1, longest) * len(inferred), 0


def _likelihood(head: RequestsHead, pieces: Sequence[Piece], batch_size: int) -> Iterator[Chunk]:
    """Yield chunks of n context groups with their members, longest first (_loglikelihood_tokens)."""
    from lm_eval.models.utils import Collator  # noqa: PLC0415

    if head.text:
        yield from _in_order(head, sorted(pieces, key=lambda p: (-p.length, p.index)), batch_size)
        return

    def longest_first(request: Any) -> tuple[int, tuple[int, ...]]:
        tokens = request[1] + request[2]
        return -len(tokens), tuple(tokens)

    def context_of(request: Any) -> list[int]:
        return request[-2] + request[-1][:-1]  # type: ignore[no-any-return]

    requests = [(piece, piece.context, piece.continuation) for piece in pieces]
    collator = Collator(
        requests, sort_fn=longest_first, group_by="contexts" if head.grouped else None, group_fn=context_of
    )
    groups: dict[tuple[int, ...], list[Piece]] = {}
    if head.grouped:
        for request in requests:
            groups.setdefault(tuple(context_of(request)), []).append(request[0])
    for chunk in collator.get_batched(n=batch_size):
        inferred = [request[0] for request in chunk]
        members = inferred
        if head.grouped:
            members = [piece for request in chunk for piece in groups[tuple(context_of(request))]]
        # in build order, lm-eval's stable sort orders ties as in the whole run
        yield _forward(head, sorted(members, key=lambda p: p.index), inferred)


def generation_chunks(head: RequestsHead, pieces: Sequence[Piece], batch_size: int) -> Iterator[Chunk]:
    """Yield chunks of n prompts, longest first, per generation settings (HFLM.generate_until)."""
    from lm_eval.models.utils import Collator  # noqa: PLC0415

    collator = Collator(
        [(piece.context, head.settings[piece.settings], piece) for piece in pieces],
        sort_fn=lambda request: (-request[2].length, request[0]),
        group_by="gen_kwargs",
        group_fn=lambda request: request[1],
    )
    for chunk in collator.get_batched(n=batch_size):
        members = [request[2] for request in chunk]
        cap = head.max_gen_tokens[members[0].settings]
        prefill, answers = _turns_cost(head, members, cap)
        batch = Batch(
            kind="generate_until", text=True, settings=head.settings[members[0].settings], pieces=members
        )
        yield batch, prefill, cap * answers


def _turns_cost(head: RequestsHead, members: Sequence[Piece], cap: int) -> tuple[int, int]:
    """Return padded input tokens of all turns of a batch, and the number of generated answers."""
    room = max(1, head.max_length - cap)
    lengths = [piece.lengths(cap) for piece in members]
    prefill = answers = 0
    for number in range(max(len(own) for own in lengths)):
        asked = [own[number] for own in lengths if number < len(own)]
        prefill += min(max(asked), room) * len(asked)
        answers += len(asked)
    return prefill, answers


def _asked(head: RequestsHead, batch: Batch) -> int:
    """Count the input tokens of a batch's requests, each on its own. The last token of a likelihood is only predicted."""
    if batch.kind != "generate_until":
        return sum(min(max(1, piece.length - 1), head.max_length) for piece in batch.pieces)
    cap = head.max_gen_tokens[batch.pieces[0].settings]
    room = max(1, head.max_length - cap)
    return sum(min(length, room) for piece in batch.pieces for length in piece.lengths(cap))


def encode_batches(
    head: RequestsHead, key: str, made: Sequence[Chunk], batch_size: int
) -> tuple[bytes, BatchIndex]:
    """Return the batch file of a request set in one cut, and its index. `batch_size`: the cut's."""
    lines = [encode_batch(batch) for batch, _, _ in made]
    index = BatchIndex(
        task=head.task,
        key=key,
        batch_size=batch_size,
        offsets=tuple(accumulate(map(len, lines), initial=0)),
        requests=tuple(len(batch.pieces) for batch, _, _ in made),
        prefill_tokens=tuple(prefill for _, prefill, _ in made),
        generated_tokens=tuple(generated for _, _, generated in made),
        asked_tokens=tuple(_asked(head, batch) for batch, _, _ in made),
        documents=tuple(tuple(sorted({p.document for p in batch.pieces})) for batch, _, _ in made),
    )
    return b"".join(lines), index
