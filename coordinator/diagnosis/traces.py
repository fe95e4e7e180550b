"""Files that are no logs: torch elastic's error JSON, and dumps of the NCCL flight recorder. Called from: `verdict`.

Rule: a dump is a pickle that others may have written, so it is read without any class of it. At most MOST_BYTES of it.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, NoReturn

MOST_BYTES = 64 << 20


class Plain(pickle.Unpickler):
    """Reads what holds containers, text and numbers alone."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def as_log(
    logs: Mapping[str, Iterable[bytes]],
) -> tuple[list[tuple[str, Iterable[bytes]]], dict[str, dict[str, Any]]]:
    """Logs with their chunks, and dumps. An error file becomes a log of its traceback; earlier ones come first."""
    texts: list[tuple[float, str, Iterable[bytes]]] = []
    dumps: dict[str, dict[str, Any]] = {}
    for name, chunks in logs.items():
        rest = iter(chunks)
        first = next(rest, b"")
        if first[:1] not in (b"\x80", b"{"):
            texts.append((0.0, name, chain([first], rest)))
            continue
        data = _limited(first, rest)
        made = _read(data)
        if isinstance(made, dict) and isinstance(made.get("entries"), list):
            dumps[name] = made
        elif isinstance(made, dict) and "message" in made:
            at, text = _error(made["message"])
            texts.append((at, name, [text.encode()]))
        else:
            texts.append((0.0, name, chain([data], rest)))
    return [(name, chunks) for _, name, chunks in sorted(texts, key=lambda text: text[0])], dumps


def _limited(first: bytes, rest: Iterator[bytes]) -> bytes:
    parts, size = [first], len(first)
    while size < MOST_BYTES and (part := next(rest, b"")):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _read(data: bytes) -> Any:
    try:
        return Plain(io.BytesIO(data)).load() if data[:1] == b"\x80" else json.loads(data)
    except Exception:  # noqa: BLE001 (bytes that others wrote: then they are a log)
        return None


def _error(message: Any) -> tuple[float, str]:
    """Elastic's error file: `{"message": {"message", "extraInfo": {"py_callstack", "timestamp"}}}`, or a plain text."""
    if not isinstance(message, dict):
        return 0.0, str(message)
    more = message.get("extraInfo") or {}
    stack = str(more.get("py_callstack") or "")
    try:
        at = float(more.get("timestamp") or 0)
    except (TypeError, ValueError):
        at = 0.0
    said = str(message.get("message") or "")
    return at, stack if said.strip() and said.strip().splitlines()[0] in stack else f"{stack}\n{said}"


# --- the flight recorder -----------------------------------------------------------------------------------------------


class Stuck(NamedTuple):
    """The first collective that did not complete. `mismatch`: ranks called different ones, which is the program's doing."""

    line: str
    mismatch: bool


def stuck(dumps: Mapping[str, Mapping[str, Any]]) -> Stuck | None:
    """Of the dumps of one run, a file a rank; None where each collective that they hold has completed."""
    calls: dict[
        str, dict[int, dict[int, Mapping[str, Any]]]
    ] = {}  # group -> sequence number -> rank -> its entry
    members: dict[str, set[int]] = {}
    for name, dump in dumps.items():
        rank = _rank(name, dump)
        for entry in dump["entries"]:
            group = " ".join(map(str, entry.get("process_group") or ["default"]))
            if not entry.get("is_p2p"):
                calls.setdefault(group, {}).setdefault(int(entry["collective_seq_id"]), {})[rank] = entry
                members.setdefault(group, set()).add(rank)
    found = [
        (min(e.get("time_created_ns", 0) for e in by_rank.values()), made)
        for group, by_number in calls.items()
        for number, by_rank in by_number.items()
        if (made := _look(group, number, by_rank, by_number, members[group]))
    ]
    return min(found)[1] if found else None


def _look(
    group: str,
    number: int,
    by_rank: Mapping[int, Mapping[str, Any]],
    by_number: Mapping[int, Mapping[int, Any]],
    ranks: set[int],
) -> Stuck | None:
    if all(entry.get("state") == "completed" for entry in by_rank.values()):
        return None
    kinds = {str(entry.get("profiling_name")) for entry in by_rank.values()}
    what = f"{'/'.join(sorted(kinds))} number {number} of group {group}"
    if len(kinds) > 1:
        return Stuck(f"flight recorder: ranks called different collectives: {what}", mismatch=True)
    # a rank whose first call came later has dropped this one from its buffer
    began = {rank for n, there in by_number.items() if n < number for rank in there}
    absent = sorted(rank for rank in ranks - by_rank.keys() if rank in began or number == min(by_number))
    if absent:
        return Stuck(
            f"flight recorder: ranks {absent} never joined {what}, for which {len(by_rank)} others wait",
            mismatch=False,
        )
    left = sorted(rank for rank, entry in by_rank.items() if entry.get("state") != "completed")
    return Stuck(
        f"flight recorder: {what} was joined by all ranks and did not complete on ranks {left}",
        mismatch=False,
    )


def _rank(name: str, dump: Mapping[str, Any]) -> int:
    digits = re.search(r"(\d+)(?:\.\w+)?$", name)
    return int(dump.get("rank", digits[1] if digits else -1))
