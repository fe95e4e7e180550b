"""The part of the live screen that says what each trial does: a row per lane, or with many lanes a row per node.

Rule: words, not codes; several lanes abreast where the terminal is wide; no name is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from os.path import commonprefix

from rich.text import Text

from coordinator.cli.screen.layout import GAP, column_widths, padded
from coordinator.runtime.summary import Summary
from evaljobs.contract.names import LaneId

MAX_ROWS = 16  # rows of lanes; with more, the screen shows a row per node
ABREAST = 4  # most lanes on one row
BETWEEN = "   "  # two lanes on one row
HEADS = ("node", "lane", "trial", "task", "batch")
STYLES = {"inferring": "green", "pending": "dim", "no shard": "dim"}


def lane_rows(summary: Summary, width: int, *, by_node: bool = False) -> Iterator[Text]:
    """What each trial does now, below one heading; `by_node`: counted for each node."""
    if summary.lanes_by_node:
        yield from _by_node(summary.lanes_by_node)
        return
    cells = {lane.lane: (lane.doing, lane.task, lane.batch) for lane in summary.lanes}
    if not cells:
        return
    names = apart(cells)
    rows = [(*_node_and_number(names[lane]), *its) for lane, its in cells.items()]
    widths = column_widths([HEADS, *rows])
    one = sum(widths) + len(GAP) * (len(widths) - 1)
    abreast = min(ABREAST, max(1, (width - 2 + len(BETWEEN)) // (one + len(BETWEEN))))
    if by_node or len(rows) > MAX_ROWS * (abreast if len(rows) > 4 else 1):
        nodes: dict[str, Counter[str]] = {}
        for node, _, doing, *_rest in rows:
            nodes.setdefault(node, Counter())[doing] += 1
        yield from _by_node(nodes)
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


def _by_node(nodes: Mapping[str, Mapping[str, int]]) -> Iterator[Text]:
    """`nodes`: node -> what its trials do -> trials."""
    shown = list(nodes.items())[:MAX_ROWS]
    (wide,) = column_widths([(node,) for node, _ in shown])
    for node, phases in shown:
        counted = ", ".join(f"{count} {what}" for what, count in Counter(phases).most_common())
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
