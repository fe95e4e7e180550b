"""The part of the live screen that says what each trial does: a row per lane, or with many lanes a row per node.

Rule: words, not codes; several lanes abreast where the terminal is wide; no name is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from os.path import commonprefix

from rich.text import Text

from coordinator.cli.screen.layout import GAP, column_widths, padded
from coordinator.evaluation.state import State
from evaljobs.contract.names import LaneId, ShardId
from evaljobs.queue.work_queue import Progress, QueueSnapshot

MAX_ROWS = 16  # rows of lanes; with more, the screen shows a row per node
ABREAST = 4  # most lanes on one row
BETWEEN = "   "  # two lanes on one row
HEADS = ("node", "lane", "trial", "task", "batch")
PENDING = "pending"
IDLE = "no shard"
PHASES = {
    "import": "importing",
    "load": "loading",
    "infer": "inferring",
    "wait": "waits for requests",
}
STYLES = {"inferring": "green", PENDING: "dim", IDLE: "dim"}


def lane_rows(
    state: State, snapshot: QueueSnapshot | None, width: int, *, by_node: bool = False
) -> Iterator[Text]:
    """What each trial does now, below one heading; `by_node`: counted for each node."""
    trials = snapshot.trials if snapshot is not None else {}
    lanes = {trial.lane: name for name, trial in state.trials.live.items()}
    cells = {
        lane: _cells(state, lanes[lane], trials.get(lanes[lane])) for lane in sorted(lanes, key=_natural)
    }
    if not cells:
        return
    names = apart(cells)
    rows = [(*_node_and_number(names[lane]), *its) for lane, its in cells.items()]
    widths = column_widths([HEADS, *rows])
    one = sum(widths) + len(GAP) * (len(widths) - 1)
    abreast = min(ABREAST, max(1, (width - 2 + len(BETWEEN)) // (one + len(BETWEEN))))
    if by_node or len(rows) > MAX_ROWS * (abreast if len(rows) > 4 else 1):
        yield from _by_node(rows)
        return
    if one + 2 > width:
        for node, number, doing, task, batch in rows:
            yield Text.assemble(f"  {node} lane {number}  ", (doing, STYLES.get(doing, "yellow")))
            if task:
                yield Text(f"    {task}{GAP}{batch}")
        return
    abreast = abreast if len(rows) > 4 else 1
    head = padded(HEADS, widths).ljust(one)
    yield Text(("  " + BETWEEN.join([head] * min(abreast, len(rows)))).rstrip(), style="dim")
    for first in range(0, len(rows), abreast):
        line = Text("  ")
        for at, row in enumerate(rows[first : first + abreast]):
            line.append(BETWEEN if at else "")
            line.append(GAP.join(c.ljust(w) for c, w in zip(row[:2], widths[:2], strict=True)) + GAP)
            line.append(row[2].ljust(widths[2]), style=STYLES.get(row[2], "yellow"))
            line.append(GAP + GAP.join(c.ljust(w) for c, w in zip(row[3:], widths[3:], strict=True)))
        line.rstrip()
        yield line


def _cells(state: State, trial: str, progress: Progress | None) -> tuple[str, str, str]:
    """(what it does, its task, its batch) of a trial."""
    if progress is None:
        doing = "starting" if trial in state.index.running else PENDING
        return doing, "", ""
    doing = PHASES.get(progress.phase, progress.phase or "starting")
    if not progress.shard:
        return IDLE if progress.phase == "infer" else doing, "", ""
    batch = f"{progress.batches_done} of {progress.batches}" if progress.batches else ""
    return doing, _task(progress.shard), batch


def _task(shard: str) -> str:
    try:
        return ShardId.parse(shard).task
    except ValueError:
        return shard


def _by_node(rows: Iterable[tuple[str, ...]]) -> Iterator[Text]:
    nodes: dict[str, Counter[str]] = {}
    for node, _, doing, *_rest in rows:
        nodes.setdefault(node, Counter())[doing] += 1
    shown = list(nodes.items())[:MAX_ROWS]
    (wide,) = column_widths([(node,) for node, _ in shown])
    for node, phases in shown:
        counted = ", ".join(f"{count} {what}" for what, count in phases.most_common())
        yield Text(f"  {node.ljust(wide)}{GAP}{counted}")
    if len(nodes) > MAX_ROWS:
        yield Text(f"  and {len(nodes) - MAX_ROWS} more nodes", style="dim")


def _node_and_number(lane: str) -> tuple[str, str]:
    found = LaneId.parse(lane)
    return found.node, str(found.number)


def apart(lanes: Iterable[str], most: int = 24) -> dict[str, str]:
    """Lane -> its name on screen, without the shared prefix if one exceeds `most` characters."""
    names = list(lanes)
    if max(map(len, names), default=0) <= most:
        return {name: name for name in names}
    nodes = [name.rpartition("/")[0] for name in names]
    shared = commonprefix(nodes).rpartition("-")[0]  # noqa: RUF071 (names, not paths)
    return {name: f"...{name[len(shared) :]}" if shared else name for name in names}


def _natural(lane: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts n2 before n10."""
    parts = "".join(c if c.isdigit() else f"\0{c}\0" for c in lane).replace("\0\0", "").split("\0")
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts if p]
