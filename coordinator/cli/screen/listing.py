"""Lines of `evalspan status`, and of the part of `watch` below what runs: evaluations, checkpoints, nodes, the daemon. Pure.

Rule: no line is wider than the terminal unless one name in it is. An id is whole, since people copy it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.text import Text

from coordinator.base.words import clock_time
from coordinator.cli.screen.layout import GAP, column_widths, fitted, padded, wrapped
from coordinator.cli.screen.score_lines import in_brief
from coordinator.cli.screen.standing import OVER, Row, about, all_in_back_off
from coordinator.cluster import JobState
from coordinator.cluster.slurm_reasons import in_words
from coordinator.intake.pending import PendingFile
from coordinator.report.learning_curves import ScoreValue
from coordinator.report.render import by_reason, seconds
from coordinator.runtime.summary import STOPPED
from coordinator.runtime.work_lock import DAEMON, is_daemon

HEADS = {
    "step": "step", "checkpoint": "checkpoint", "suite": "suite", "state": "state", "scored": "scored", "time": "time",
    "scores": "scores", "id": "evaluation",
}  # fmt: skip
ID_HAS = ("checkpoint", "suite")  # they are in the id, too
# columns of a table, the richest first; "scores" takes the room that is left, or is a line below
LAYOUTS = tuple(
    tuple(column for column in HEADS if column not in without)
    for without in ((), ID_HAS, ("scores",), (*ID_HAS, "scores"))
)
RIGHT = ("step", "scored", "time")
LEAST_SCORES = 2  # of a row, where they are a column
MOST_CHECKPOINTS = 5  # paths shown that wait for one reason
DAEMON_LOG = Path("evalspan-daemon.log")  # of scripts/evalspan-daemon.sbatch, in the folder of submission
BELOW = "    "  # begins a line about the row above


def show_rows(rows: Sequence[Row], width: int, now: float, *, whole: bool = False) -> Iterator[Text]:
    """A row for each evaluation, what it waits for and what went wrong below it. `whole`: mended failures, too."""
    cells = [_cells(row, now) for row in rows]
    if not cells:
        return
    least = max(len(fitted(_scores(row), 0, least=LEAST_SCORES)) for row in rows)
    layout = _layout(cells, least, width)
    names = [c for c in layout if c != "scores"]
    widths = dict(
        zip(
            names,
            column_widths([[HEADS[c] for c in names], *[[x[c] for c in names] for x in cells]]),
            strict=True,
        )
    )
    if "scores" in layout:
        room = width - sum(widths.values()) - len(GAP) * len(names)
        most = max([len(HEADS["scores"]), *(len(GAP.join(_scores(row))) for row in rows)])
        widths["scores"] = min(room, most)
    if layout:
        yield Text(_line({c: HEADS[c] for c in layout}, layout, widths), style="bold")
    for row, cell in zip(rows, cells, strict=True):
        if layout:
            if "scores" in layout:
                cell["scores"] = fitted(_scores(row), widths["scores"])
            yield Text(_line(cell, layout, widths), style=_style(row))
        else:
            yield Text(cell["id"], style="bold")
            said = f"step {cell['step']}, {cell['state']}, {cell['scored']} scored, {cell['time']}"
            yield from (Text(line) for line in wrapped(said, width, first="  ", rest="  "))
        if "scores" not in layout and _scores(row):
            yield Text(BELOW + fitted(_scores(row), width - len(BELOW)), style="cyan")
        for what, style in _notes(row, whole=whole):
            yield from (
                Text(line, style=style) for line in wrapped(what, width, first=BELOW, rest=BELOW + "  ")
            )


def _layout(cells: Sequence[Mapping[str, str]], scores: int, width: int) -> tuple[str, ...]:
    """The richest columns that fit; () where none do. `scores`: least characters of that column; 0: there are none."""
    for layout in (one for one in LAYOUTS if scores or "scores" not in one):
        least = {c: max(len(HEADS[c]), *(len(x[c]) for x in cells)) for c in layout if c != "scores"}
        room = width - sum(least.values()) - len(GAP) * (len(layout) - 1)
        if room >= (scores if "scores" in layout else 0):
            return layout
    return ()


def _line(cells: Mapping[str, str], layout: Sequence[str], widths: Mapping[str, int]) -> str:
    right = [i for i, c in enumerate(layout) if c in RIGHT]
    return padded([cells[c] for c in layout], [widths[c] for c in layout], right)


def _cells(row: Row, now: float) -> dict[str, str]:
    taken = row["makespan_seconds"] if row["stage"] in OVER else row["age_seconds"]
    return {
        "step": "-" if row["step"] is None else str(row["step"]),
        "checkpoint": "/".join(Path(row["checkpoint"]).parts[-2:]),
        "suite": row["suite"],
        "state": _state(row, now),
        "scored": f"{row['scored']}/{row['entries']}",
        "time": seconds(taken if taken is not None else row["age_seconds"]),
        "id": row["evaluation_id"],
    }


def _state(row: Row, now: float) -> str:
    if row["stage"] not in OVER:
        since = clock_time(row["accepted_at"] + row["age_seconds"], now)
        return f"stopped since {since}" if row["stopped"] and row["fault"] is None else row["stage"]
    missed = row["entries"] - row["scored"]
    word = row["stage"] if row["stage"] == "cancelled" or not missed else f"{missed} failed"
    return f"{word} {clock_time(row['ended_at'], now)}"


def _style(row: Row) -> str:
    if row["fault"] is not None or (row["stage"] == "ended" and row["scored"] < row["entries"]):
        return "red"
    return "dim" if row["stage"] == "cancelled" else "" if row["stage"] in OVER else "green"


def _scores(row: Row) -> list[str]:
    """Shards and time left while it goes on, and the main metric of each task."""
    going: list[str] = []
    if row["stage"] not in OVER and row["shards"]:
        going.append(f"{row['shards_done']}/{row['shards']} shards")
        if row["eta_seconds"] is not None and row["trials"] and not row["stopped"]:
            going.append(f"{about(row['eta_seconds'])} left")
    return [*filter(None, [", ".join(going)]), *(in_brief(ScoreValue(**score)) for score in row["scores"])]


def _notes(row: Row, *, whole: bool) -> Iterator[tuple[str, str]]:
    """What it waits for and what went wrong, worst first, with the colour."""
    if row["fault"] is not None:
        yield row["fault"], "red"
    for name, why in {**by_reason(row["errors"]), **row["nodes_aside"]}.items():
        yield f"{name}: {why}", "dim" if row["stage"] == "cancelled" else "red"
    if row["stopped"]:
        if row["fault"] is None:
            left = row.get("jobs_left", 0)
            yield f"{STOPPED}{f'; {left} of its jobs still run' if left else ''}", "yellow"
    else:
        yield from (
            (what, "yellow") for what in (all_in_back_off(row["waits_seconds"]), *row["waits_for"]) if what
        )
    yield from ((f"{names}: {why}", "yellow") for names, why in by_reason(row["held_jobs"]).items())
    if whole or row["stage"] not in OVER:
        yield from ((what, "yellow") for what in _mishaps(row))
    for name, why in row["trackers"].items():
        yield f"not in {name}: {why} (`evalspan export --left` tries again)", "yellow"


def _mishaps(row: Row) -> Iterator[str]:
    """Slow trials and failed jobs, which cost time and no score once it has ended."""
    yield from (f"{name} {why}" for name, why in row["stragglers"].items())
    mended = " and was made up for" if row["stage"] in OVER else ""
    yield from (f"{names} failed{mended}: {why}" for names, why in by_reason(row["failed_jobs"]).items())


def show_pending(checkpoints: PendingFile, width: int, now: float) -> Iterator[Text]:
    """Pending checkpoints and refused ones, by their reason. `now`: unix seconds."""
    waiting: dict[str, list[str]] = {}
    for one in checkpoints.waiting:
        named = f"  {one.evaluation_id}" if one.evaluation_id else ""
        said = f"{one.checkpoint}  suite {_suite(one.suite)}  for {seconds(now - one.since)}{named}"
        waiting.setdefault(one.why, []).append(said)
    refused: dict[str, list[str]] = {}
    for bad in reversed(checkpoints.refused):
        said = f"{bad.checkpoint}  suite {_suite(bad.suite)}  at {clock_time(bad.at, now)}"
        refused.setdefault(bad.why, []).append(said)
    yield from _by_reason("waits", "wait", waiting, width, "yellow")
    yield from _by_reason("was refused", "were refused", refused, width, "red")
    if checkpoints.unsigned:
        last = clock_time(checkpoints.unsigned_at, now)
        said = f"notices in Redis refused without this work folder's signature: {checkpoints.unsigned}, the last at {last}"
        yield from (Text(line, style="red") for line in wrapped(said, width, rest="  "))


def _by_reason(
    one: str, many: str, found: Mapping[str, Sequence[str]], width: int, style: str
) -> Iterator[Text]:
    for why, places in found.items():
        head = f"a checkpoint {one}" if len(places) == 1 else f"{len(places)} checkpoints {many}"
        yield from (Text(line, style=style) for line in wrapped(f"{head}: {why}", width, rest="  "))
        for place in places[:MOST_CHECKPOINTS]:
            yield from (Text(line) for line in wrapped(place, width, first=BELOW, rest=BELOW + "  "))
        if len(places) > MOST_CHECKPOINTS:
            left = len(places) - MOST_CHECKPOINTS
            yield Text(f"{BELOW}and {left} more: `evalspan status --json` has all")


def _suite(named: str) -> str:
    """A suite's name, or that of its file; the file that a submission left has a digest in its name."""
    kept = named.endswith(".toml") and Path(named).parts[-3:-1] == ("submissions", "suites")
    return Path(named).stem.rpartition("-")[0] if kept else Path(named).stem if "/" in named else named


def show_stream(count: int, width: int) -> Iterator[Text]:
    """`count`: notices of the hook in Redis that no daemon has read."""
    if count:
        said = f"{count} notice{'s' if count > 1 else ''} of the hook wait{'' if count > 1 else 's'} in Redis for a daemon"
        yield from (Text(line, style="yellow") for line in wrapped(said, width, rest="  "))


def show_cordons(cordoned: Mapping[str, float], width: int) -> Iterator[Text]:
    """`cordoned`: node -> seconds until it may be taken again."""
    for node, left in cordoned.items():
        again = f"`evalspan release {node} --minutes 0` lets it be taken"
        said = f"{node} is cordoned: it is not taken for {seconds(left)} more ({again})"
        yield from (Text(line, style="yellow") for line in wrapped(said, width, rest="  "))


def show_daemon(
    holder: str,
    since: float | None,
    width: int,
    now: float,
    typed: str,
    queued: Sequence[JobState] = (),
    wrapper: str = "",
) -> Iterator[Text]:
    """The daemon's state. `holder`: of the work folder's lock; `typed`: `evalspan daemon` with this call's options.

    `queued`: pending jobs by the name of the daemon's wrapper; `wrapper`: how it is submitted, "" without Slurm.
    """
    began = "" if since is None else f" since {clock_time(since, now)}"
    if is_daemon(holder):
        said, style = f"daemon: running{began}{holder.removeprefix(DAEMON)}", "green"
    elif holder:
        said = f"daemon: not running; {holder}, has the work folder{began} and takes no submissions"
        style = "yellow"
    elif queued:
        jobs = "; ".join(_queued(job, now) for job in queued)
        said, style = f"daemon: not running; {jobs}", "yellow"
    else:
        how = " or ".join(f"`{line}`" for line in filter(None, (wrapper, typed)))
        said, style = f"daemon: not running; to start it: {how}", "yellow"
        if wrapper and DAEMON_LOG.exists():
            said += f"; {DAEMON_LOG} says how its last job ended"
    yield from (Text(line, style=style) for line in wrapped(said, width, rest="  "))


def _queued(job: JobState, now: float) -> str:
    queued = f"the daemon's job {job.job_id} is queued"
    if job.reason == "PartitionTimeLimit":  # the reason's own words are about jobs that evalspan submits
        return (
            f"{queued} (the partition allows less time: {job.reason}); it never starts: `scancel {job.job_id}`, "
            "then `sbatch -t TIME ...` with the time that `sinfo -o '%P %l'` allows"
        )
    starts = "" if job.started_at is None else f"starts {clock_time(job.started_at, now)}"
    why = "; ".join(filter(None, [starts, in_words(job.reason)]))
    return f"{queued}{f' ({why})' if why else ''}"


def show_left_out(count: int, shown: int, width: int, typed: str) -> Iterator[Text]:
    """How many evaluations are not shown, and what shows them. `typed`: `evalspan status` with this call's options."""
    if count:
        said = f"{count} more {'are' if count > 1 else 'is'} not shown: `{typed} --last {shown + count}`"
        yield from (Text(line, style="dim") for line in wrapped(said, width, rest="  "))
