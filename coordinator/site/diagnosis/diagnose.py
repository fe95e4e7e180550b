"""From logs and the scheduler's word to one verdict: the failure that began it. Called from: `coordinator.runtime.causes`, `cli`.

Rule: of the failures of the last attempt that the program did not survive, the one of the least precedence counts, then the
earliest. What the scheduler says of a kill stands above what a log says; what it ended cannot have begun it. What other ranks
say of a death that no rule knows explains it no better: then it is not known. A dump is a pickle that others may have written, so it is read without any class
of it, and at most MOST_BYTES of it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

from coordinator.base.pickles import read_pickle
from coordinator.site.diagnosis.log import Hit, Scan
from coordinator.site.diagnosis.rules import EXCEPTION_PRECEDENCES, Owner, Rule, rule_table
from evaljobs.contract.specs import Record

MOST_TELLING = 5  # lines shown if no reason is known
HARDWARE_PRECEDENCE = (
    15  # precedences up to it: such a failure counts also where the program went on for a while ...
)
FOLLOWER_PRECEDENCE = 60  # ... and other ranks then said no more than that something was lost
LEAST_RUN = 4  # lines between a requeue and a failure from which on this is another attempt's
# Slurm's states that count whatever a log says
CERTAIN_STATES = tuple(
    word for word, (_, precedence) in rule_table().states.items() if precedence < FOLLOWER_PRECEDENCE
)
_ENDING = ("Preempted", "TimeLimit")  # lines after it say what the kill did
_BY_KILL = (
    "",
    *_ENDING,
    "Cancelled",
    "RuntimeError",
    "ConnectionError",
    "CalledProcessError",
    "DataloaderKilled",
)
_NOT_KNOWN = "not known: read the lines below"
_NO_LOG = "no log of a job: no line tells of progress, a time, a rank or a failure"
_NAMED = re.compile(r"exitcode|received by PID")  # the launcher names the rank that failed first


class Diagnosis(Record):
    """Why a job failed. `reason` None: not known. `line_number` None: the scheduler or a dump says it, and no line of a log."""

    reason: str | None
    owner: Owner
    recoverable: bool  # a restart, perhaps on another node, can help
    line: str
    line_number: int | None
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A diagnosis with what a person wants to see beside it. `traceback`: of the line; `telling`: (log, number, line); `earlier`:
    how attempts before the last one ended, of a job that was started again; `last`: the last lines; `is_log`: whether anything
    of a job was there to read.
    """

    diagnosis: Diagnosis
    log: str = ""
    traceback: tuple[str, ...] = ()
    telling: tuple[tuple[str, int, str], ...] = ()
    earlier: tuple[Diagnosis, ...] = ()
    last: tuple[str, ...] = ()
    is_log: bool = True


def diagnose(
    logs: Mapping[str, Iterable[bytes]], *, state: str = "", exit_code: str = "", most: int = MOST_TELLING
) -> Finding:
    """Read these logs, dumps or error files (name -> chunks of bytes). `state`, `exit_code`: sacct's, "" where not known.

    `most`: telling lines.
    """
    word = state.split(maxsplit=1)[0].rstrip("+") if state.strip() else ""
    if word == "COMPLETED":
        return Finding(diagnosis=_of("Healthy", "sacct: COMPLETED", None))
    texts, dumps = dumps_as_log(logs)
    scans = [Scan(name).read(chunks) for name, chunks in texts]
    attempts = [_attempts(scan) for scan in scans]
    earlier = tuple(
        _found(best).diagnosis for ended in attempts for hits in ended[:-1] if (best := _first(hits, scans))
    )
    hits = [hit for scan, ended in zip(scans, attempts, strict=True) for hit in _counted(scan, ended[-1])]
    hits += filter(None, (_said(word, state, exit_code), _stuck(dumps)))
    best = _first(hits, scans)
    if best is not None and best.rule.reason:
        return replace(_found(best), earlier=earlier)
    telling = [(s.name, number, line) for s in scans for number, line in s.telling(most)][-most:]
    failed = bool(word) or (exit_code not in ("", "0", "0:0"))
    if best is None and not telling and not failed and scans:
        if not any(scan.is_log for scan in scans):
            return Finding(diagnosis=_unknown("", None, _NO_LOG), is_log=False)
        return Finding(diagnosis=_of("Healthy", "", None), earlier=earlier)
    place = (best.log, best.number or None, best.line) if best else telling[-1] if telling else None
    log, number, line = place or ("", None, f"sacct: {state} {exit_code}".strip())
    if best is not None and (best.log, best.number, best.line) not in telling:
        telling = sorted([*telling[-(most - 1) :], (best.log, best.number, best.line)])
    last = tuple(line for scan in scans for line in scan.tail)
    owner: Owner = best.rule.owner if best else "none"
    return Finding(
        diagnosis=_unknown(line, number, owner=owner),
        log=log,
        telling=tuple(telling),
        earlier=earlier,
        last=last,
    )


def _unknown(line: str, number: int | None, advice: str = _NOT_KNOWN, owner: Owner = "none") -> Diagnosis:
    return Diagnosis(
        reason=None, owner=owner, recoverable=False, line=line, line_number=number, advice=advice
    )


def diagnosis_in_words(cause: Diagnosis | None, said: str) -> str:
    """Describe a failed job, for instance its error, with reason, owner and line."""
    if cause is None or cause.reason is None or cause.reason in said:
        return said
    new = cause.line and not cause.line.startswith("sacct:") and cause.line not in said
    return f"{cause.reason} (owner: {cause.owner}): {said}{f': {cause.line}' if new else ''}"


def diagnose_state(word: str) -> Diagnosis:
    """Diagnose a job of which only the scheduler's end state is known."""
    return diagnose({}, state=word).diagnosis


def diagnose_text(text: str, *, state: str = "") -> Diagnosis:
    """Diagnose an error that a job left, in one line or with its traceback."""
    return diagnose({"": [text.encode()]} if text else {}, state=state).diagnosis


def _said(word: str, state: str, exit_code: str) -> Hit | None:
    """Return the scheduler's failure. A signal only counts if a single cause sends it."""
    said = rule_table().states.get(word) or (
        rule_table().states["SIGBUS"] if exit_code.endswith(":7") else None
    )
    if said is None:
        return None
    line = f"sacct: {state.strip()}" + (f", ExitCode {exit_code}" if exit_code else "")
    return _hit(said[0], line, said[1])


def _stuck(dumps: Mapping[str, Mapping[str, Any]]) -> Hit | None:
    if not dumps or (found := find_stuck_collective(dumps)) is None:
        return None
    return _hit("NCCLTimeoutError", found.line, FOLLOWER_PRECEDENCE - 1, "user" if found.mismatch else None)


def _hit(reason: str, line: str, precedence: int, owner: Owner | None = None) -> Hit:
    """Return a hit that no line of a log gave."""
    rule = next(rule for rule in rule_table().rules if rule.reason == reason)
    made = Rule(reason, precedence, rule.pattern, "", "", owner or rule_table().reasons[reason].owner)
    return Hit(rule=made, log="", line=line, number=0, last=0)


def _attempts(scan: Scan) -> list[list[Hit]]:
    """What was found of each attempt: a log of a job that was requeued or restarted holds several."""
    starts = set(scan.marks["start"])
    for end in scan.hits:
        if end.rule.reason == "Preempted" and rule_table().marks["requeue"].search(end.line):
            after = [hit for hit in scan.hits if hit.number > end.number and not hit.soft]
            run = min((h.number - len(h.traceback) for h in after), default=0) > end.number + LEAST_RUN
            if run or scan.survived(end.last) or any(hit.rule.reason not in _BY_KILL for hit in after):
                starts.add(end.number + 1)
    last = max((hit.number for hit in scan.hits), default=0)
    bounds = [0, *sorted(n for n in starts if n <= last or scan.survived(n - 1)), scan.lines + 1]
    parts = [[h for h in scan.hits if first <= h.number < end] for first, end in pairwise(bounds)]
    return [*filter(None, parts[:-1]), parts[-1]]


def _counted(scan: Scan, found: Sequence[Hit]) -> list[Hit]:
    """Hits that may have begun the failure: not those that came of the scheduler's kill, nor deaths behind what peers say."""
    ends = [
        hit.number
        for hit in found
        if (hit.rule.reason in _ENDING and not hit.soft)
        or (rule_table().marks["person"].search(hit.line) and not scan.survived(hit.last))
    ]
    end = min(ends, default=scan.lines)
    noise = min(
        (hit.number for hit in found if hit.rule.precedence >= FOLLOWER_PRECEDENCE), default=scan.lines
    )
    hits = [
        hit
        for hit in found
        if not hit.dropped
        and (hit.number <= end or hit.rule.precedence < 20)
        and (hit.rule.reason or hit.number <= noise or _NAMED.search(hit.line))
    ]
    lasting = [
        h for h in hits if not h.soft and not scan.survived(h.last, by_progress=h.rule.reason not in _ENDING)
    ]
    if all(hit.rule.precedence >= FOLLOWER_PRECEDENCE for hit in lasting) and lasting:
        lasting += [hit for hit in hits if hit.rule.precedence <= HARDWARE_PRECEDENCE and not hit.soft]
    return lasting


def _first(hits: Sequence[Hit], scans: Sequence[Scan]) -> Hit | None:
    """The hit that began it: of one precedence the earliest by the times that all have, else by the order of the logs."""
    place = {scan.name: index for index, scan in enumerate(scans)}
    timed = len({re.sub(r"\d", "0", hit.time) for hit in hits}) == 1 and len({hit.log for hit in hits}) > 1

    def order(hit: Hit) -> tuple[int, str, int, int]:
        return hit.rule.precedence, hit.time if timed else "", place.get(hit.log, len(place)), hit.number

    return min(hits, key=order, default=None)


def _found(hit: Hit) -> Finding:
    owner = hit.rule.owner
    ours = ("/evaljobs/", "/coordinator/")
    if (
        hit.rule.precedence in EXCEPTION_PRECEDENCES
        and any(part in hit.frame for part in ours)
        and "/suites/" not in hit.frame
    ):
        owner = "evalspan"
    return Finding(
        diagnosis=_of(hit.rule.reason, hit.line, hit.number or None, owner),
        log=hit.log,
        traceback=hit.traceback,
    )


def _of(reason: str, line: str, number: int | None, owner: Owner | None = None) -> Diagnosis:
    if not reason:
        return _unknown(line, number, owner=owner or "none")
    its = rule_table().reasons[reason]
    return Diagnosis(
        reason=reason,
        owner=owner or its.owner,
        recoverable=its.recoverable,
        line=line,
        line_number=number,
        advice=its.advice,
    )


# --- files that are no logs: torch elastic's error JSON, and dumps of the NCCL flight recorder -----------------------


MOST_BYTES = 64 << 20


def dumps_as_log(
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
    if data[:1] == b"\x80":
        return read_pickle(io.BytesIO(data))
    with suppress(ValueError, RecursionError):  # then it is a log
        return json.loads(data)


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


class StuckCollective(NamedTuple):
    """The first collective that did not complete. `mismatch`: ranks called different ones, which is the program's doing."""

    line: str
    mismatch: bool


def find_stuck_collective(dumps: Mapping[str, Mapping[str, Any]]) -> StuckCollective | None:
    """Of the dumps of one run, a file a rank; None where each collective that they hold has completed."""
    # group -> sequence number -> rank -> its entry
    calls: dict[str, dict[int, dict[int, Mapping[str, Any]]]] = {}
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
) -> StuckCollective | None:
    if all(entry.get("state") == "completed" for entry in by_rank.values()):
        return None
    kinds = {str(entry.get("profiling_name")) for entry in by_rank.values()}
    what = f"{'/'.join(sorted(kinds))} number {number} of group {group}"
    if len(kinds) > 1:
        return StuckCollective(f"flight recorder: ranks called different collectives: {what}", mismatch=True)
    # a rank whose first call came later has dropped this one from its buffer
    began = {rank for n, there in by_number.items() if n < number for rank in there}
    absent = sorted(rank for rank in ranks - by_rank.keys() if rank in began or number == min(by_number))
    if absent:
        return StuckCollective(
            f"flight recorder: ranks {absent} never joined {what}, for which {len(by_rank)} others wait",
            mismatch=False,
        )
    left = sorted(rank for rank, entry in by_rank.items() if entry.get("state") != "completed")
    return StuckCollective(
        f"flight recorder: {what} was joined by all ranks and did not complete on ranks {left}",
        mismatch=False,
    )


def _rank(name: str, dump: Mapping[str, Any]) -> int:
    digits = re.search(r"(\d+)(?:\.\w+)?$", name)
    return int(dump.get("rank", digits[1] if digits else -1))
