"""Ended jobs of any kind: state, exit code, nodes and logs, from `scontrol` and `sacct`.

Rule: each may know what the other does not: `scontrol` forgets a job after MinJobAge, and not every site has accounting,
which is queried once a job has ended. Called from: `evalspan diagnose`, `evalspan supervise`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import NamedTuple

from coordinator.site.cluster import ClusterError
from coordinator.site.cluster.slurm_accounts import parse_rows
from coordinator.site.cluster.slurm_limits import remedy_of
from coordinator.site.cluster.slurm_parse import PHASES
from coordinator.site.cluster.slurm_rules import Ask

FIELDS = "JobIDRaw,JobID,JobName,State,ExitCode,NodeList,WorkDir,SubmitLine,User"
JOB_ID = re.compile(r"(\d+)(?:_(\d+))?(?:\.batch)?")
# sacct's exit code of a script whose command was killed by a signal, for which scontrol reports 137:0 and 143:0
_KILLED = {"9:0": "0:9", "15:0": "0:15"}
_OUTPUT = re.compile(r"(?:^|\s)(?:--output[= ]|-o ?|--error[= ]|-e ?)(\S+)")


class PastJob(NamedTuple):
    """`state` and `exit_code` in Slurm's words; `logs`: paths of its output, which may be gone."""

    state: str
    exit_code: str
    nodes: str
    logs: tuple[str, ...]

    @property
    def word(self) -> str:
        """The state without its suffix, as in "CANCELLED by 1000"."""
        return self.state.split(" ")[0].rstrip("+")

    @property
    def has_ended(self) -> bool:
        return PHASES.get(self.word) == "ended" and self.word != "COMPLETING"


def look_up(job_id: str, ask: Ask, sure: Collection[str]) -> PastJob | None:
    """Return the job of this id, or this array member; None if Slurm knows none. Raise ClusterError if it does not answer.

    `sure`: states that count even if only a step has them.
    """
    now: dict[str, str] = {}
    try:
        shown = ask(["scontrol", "--oneliner", "show", "job", job_id]).strip().splitlines()
        now = dict(re.findall(r"(\w+)=(.*?)(?= \w+=|$)", shown[0])) if shown else {}
    except ClusterError as error:
        if remedy_of(str(error)) != "gone":
            raise
    rows: list[dict[str, str]] = []
    if not now or PastJob(now.get("JobState", ""), "", "", ()).has_ended:
        try:
            rows = parse_rows(ask(["sacct", "-j", job_id, "-P", "-n", "-o", FIELDS]), FIELDS)
        except ClusterError as error:
            if not now and remedy_of(str(error)) == "away":  # its end is unknown so far
                raise
    if not now and not rows:
        return None
    job = rows[0] if rows else {}
    steps = [row for row in rows if row["State"].split(" ")[0] in sure]  # a step may tell more than its job
    state = (steps or [job])[0].get("State") or now.get("JobState", "")
    if now.get("JobState") in sure:
        state = now["JobState"]
    logs = (now.get(key, "") for key in ("StdOut", "StdErr"))
    code = now.get("ExitCode") or job.get("ExitCode", "")
    return PastJob(
        state,
        _KILLED.get(code, code),
        job.get("NodeList") or now.get("NodeList", ""),
        tuple(dict.fromkeys(path for path in logs if path not in ("", "/dev/null"))) or _named(job, now),
    )


def _named(job: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files that the submission named, or Slurm's default."""
    array = JOB_ID.fullmatch(job.get("JobID", ""))
    member = array[2] if array and array[2] else None
    default = "slurm-%A_%a.out" if member else "slurm-%j.out"
    words = {
        "j": job.get("JobIDRaw", ""),
        "A": array[1] if array else job.get("JobIDRaw", ""),
        "a": member or "",
        "x": job.get("JobName", ""),
        "u": job.get("User", ""),
        "N": job.get("NodeList", ""),
        "%": "%",
    }
    folder = job.get("WorkDir") or now.get("WorkDir", "")
    names = _OUTPUT.findall(job.get("SubmitLine", "")) or [default]
    made = (re.sub(r"%\d*(.)", lambda m: words.get(m[1], m[0]), name.strip("'\"")) for name in names)
    return tuple(dict.fromkeys(str(PurePath(folder, name)) for name in made))
