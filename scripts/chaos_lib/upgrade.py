"""Evaluations that one commit begins and another takes up: scripts/try-upgrade OLD [NEW].

The coordinator of OLD is ended while it stages, infers or scores, by SIGKILL and by SIGTERM. The one of NEW goes on in the
same work folder, while jobs of OLD still run. `back` is the other way: OLD is started on a folder that NEW has written to.
NEW ends that evaluation. The table says how many shards ran twice, and how many the jobs of OLD ran after the takeover.

Exit status 0: all scores are those of an undisturbed run of OLD and nothing is left; 1: not so; 2: it cannot be run here.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Options, RunError, command, option, say
from dev_cluster import procs

from chaos_lib.campaign import CLEAN_S, Run, laws_broken, scores, under_faults
from chaos_lib.site import Place, Site, place

PATIENCE_S = 300.0
BACK_S = 25.0  # that OLD has the folder of a newer coordinator: two looks at its jobs, and one more try
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A commit with an environment of its own, in which all packages but evalspan are those of this process."""

    commit: str
    program: Path | None  # the command `evalspan`; None: this tree's

    @classmethod
    def of(cls, commit: str, scratch: Path) -> Version:
        """`commit`: "" is this tree as it stands. RunError where git does not know it."""
        if not commit:
            return cls(commit=f"{_git('rev-parse', '--short', 'HEAD')} (this tree)", program=None)
        short = _git("rev-parse", "--short", f"{commit}^{{commit}}")
        clone, environment = scratch / short / "clone", scratch / short / "venv"
        archive = subprocess.run(
            ["git", "-C", ROOT, "archive", short], capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(clone, filter="data")
        (clone / "coordinator" / "commit.txt").write_text(short)
        venv.create(environment)
        (packages,) = environment.glob("lib/python*/site-packages")
        shared = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
        (packages / "evalspan.pth").write_text("\n".join([str(clone), *shared]) + "\n")
        program = environment / "bin" / "evalspan"
        python = environment / "bin" / "python"
        program.write_text(
            f"#!{python}\nimport sys\nfrom coordinator.__main__ import main\nsys.exit(main())\n"
        )
        program.chmod(0o755)
        return cls(commit=short, program=program)

    def site(self, site: Site) -> Site:
        """The same folder under this version. RunError where its command would run other code."""
        mine = replace(site, program=self.program)
        if self.program is not None:
            ask = [self.program.with_name("python"), "-c", "import coordinator; print(coordinator.__file__)"]
            where = site.cluster.run_as_user(ask, env=mine.env).stdout
            if str(self.program.parents[2]) not in where:
                raise RunError(f"{self.program} runs {where}, not {self.commit}")
        return mine


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(done.stderr.strip())
    return done.stdout.strip()


# --- moments -----------------------------------------------------------------------------------------------------------


def _shards(events: list[dict[str, Any]], kind: str) -> int:
    if kind == "planned":
        return sum(len(leaf["shards"]) for e in events if e["kind"] == kind for leaf in e["leaves"])
    return sum(len(e["shards"]) for e in events if e["kind"] == "shards-dumped")


def _outcomes(events: list[dict[str, Any]], kind: str) -> int:
    return sum(e["kind"] == "outcome-seen" and e["outcome"]["kind"] == kind for e in events)


def _staging(site: Site) -> bool:
    return bool(site.processes_of("stage")) and not _outcomes(site.events(), "staged")


def _inference(site: Site) -> bool:
    events = site.events()
    return _shards(events, "dumped") > 0 and len(site.processes_of("trial")) > 0


def _metrics(site: Site) -> bool:
    events = site.events()
    return 0 < _shards(events, "planned") == _shards(events, "dumped") and bool(site.processes_of("worker"))


MOMENTS: dict[str, Callable[[Site], bool]] = {
    "staging": _staging,
    "inference": _inference,
    "metrics": _metrics,
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}
CASES = [*(f"{moment} {number}" for moment in MOMENTS for number in SIGNALS), "back"]


# --- one case ----------------------------------------------------------------------------------------------------------


def taken_up(
    where: Place, case: str, old: Version, new: Version, *, wanted: dict[str, Any], keep: Path | None = None
) -> Row:
    """Run `case`; without `wanted`, an undisturbed evaluation of OLD. The row's `broken` has a line for each broken law.

    `keep`: a folder for the evaluation's files, as they are at the takeover and at the end.
    """
    began = time.monotonic()
    moment, _, number = case.partition(" ")
    first, second = (new, old) if case == "back" else (old, new)
    site = first.site(Site.make(where, f"u{time.time_ns() % 10**10}"))
    row: Row = {"case": case, "broken": [], "note": ""}
    with under_faults(site, random.Random(case), PATIENCE_S) as run:
        look = MOMENTS["inference" if case == "back" else moment] if wanted else None
        if look is not None and run.wait(lambda: look(site) or run.process.poll() is not None):
            _end(run, SIGNALS[number or "SIGKILL"])
            lines = len(site.events())
            _keep(site, keep, case, "takeover")
            if case == "back":
                row["note"] = _given_back(run, second)
            run.site = new.site(site)
            run.process = run.site.start()
        run.await_end(PATIENCE_S, "the evaluation")
        events = site.events()
        row["scores"] = next(map(scores, site.evaluations()), {})
        run.broken += (
            [] if look is None or any(e["kind"] == "restarted" for e in events) else ["not taken up"]
        )
        run.broken += _broken(run, events, row["scores"], wanted)
        if look is not None:
            row |= _work_of_before(events, lines)
        row["twice"] = _twice(site)
        _keep(site, keep, case, "end")
        row["broken"] = run.broken
    where.mend()
    row["seconds"] = round(time.monotonic() - began)
    if not row["broken"]:
        site.remove()
    return row


def _end(run: Run, number: signal.Signals) -> None:
    run.process.send_signal(number)
    run.process.wait(timeout=60)


def _keep(site: Site, keep: Path | None, case: str, when: str) -> None:
    for folder in site.evaluations() if keep is not None else ():
        left = shutil.ignore_patterns("logs", "samples", "specs", "report.json", "status.json", ".*")
        shutil.copytree(folder, keep / case.replace(" ", "-") / when / folder.name, ignore=left)
        (keep / case.replace(" ", "-") / "work").write_text(str(site.work))


def _given_back(run: Run, old: Version) -> str:
    """What OLD does with a folder that a newer coordinator has written to, in BACK_S."""
    journal = run.site.evaluations()[0] / "journal.jsonl"
    before, jobs = journal.read_bytes(), _jobs(run.site)
    at = len((run.site.folder / "eval.log").read_text())
    older = old.site(run.site).start()
    ended = procs.poll(lambda: older.poll() is not None, deadline_s=BACK_S, every_s=0.2)
    older.kill()
    older.wait()
    said = (run.site.folder / "eval.log").read_text()[at:].strip().splitlines()
    gone = sorted(set(jobs) - set(_jobs(run.site)))
    what = "journal unchanged" if journal.read_bytes() == before else "journal changed"
    status = f"exit {older.returncode}" if ended else "went on"
    say(f"back: {status}; {what}; {len(said)} lines; jobs gone meanwhile: {gone}")
    say("\n".join(said[:6]))
    return f"{status}, {what}, {len(said)} lines"


def _jobs(site: Site) -> list[str]:
    return site.user(["squeue", "--noheader", "--array", "--format=%F_%K %j"]).splitlines()


def _broken(
    run: Run, events: list[dict[str, Any]], found: dict[str, Any], wanted: dict[str, Any]
) -> Iterator[str]:
    yield from laws_broken(events, found, wanted)
    if len(run.site.evaluations()) != 1:
        yield f"{len(run.site.evaluations())} evaluations of one checkpoint and suite"
    failed = {task: why["failed"] for task, why in found.items() if "failed" in why}
    if failed or not found:
        yield f"failed: {json.dumps(failed)[:300]}"
    yield from (f"left behind: {what}" for what in run.site.wait_clean(CLEAN_S))


def _work_of_before(events: list[dict[str, Any]], lines: int) -> Row:
    """What jobs from before the takeover did: shards that they ran after it, and outcomes that failed."""
    before = [e for e in events[:lines] if e["kind"] == "job-intended"]
    trials = {t for e in before for t in e.get("trials", ())}
    later = [frame for e in events[lines:] if e["kind"] == "shards-dumped" for _, frame in e["shards"]]
    used = sum(frame["file"].removesuffix(".frames") in trials for frame in later)
    outcomes = (e["outcome"] for e in events[lines:] if e["kind"] == "outcome-seen")
    failed = [f"{o['name']}: {o['error']}" for o in outcomes if o["kind"] == "failed"]
    jobs = Counter(e["job"]["purpose"] for e in events[lines:] if e["kind"] == "job-intended")
    return {
        "by_old_jobs": f"{used} of {len(later)}",
        "new_jobs": ", ".join(f"{n} {what}" for what, n in sorted(jobs.items())) or "none",
        "failed": failed,
    }


def _twice(site: Site) -> int:
    """Shards whose responses are in more than one record."""
    from evaljobs.contract.storage import read_frames  # noqa: PLC0415

    seen = Counter(
        head.shard
        for folder in site.evaluations()
        for file in folder.glob("responses/*.frames")
        for _, head in read_frames(file, 0)
    )
    return sum(count - 1 for count in seen.values())


# --- all cases ---------------------------------------------------------------------------------------------------------


def measure(options: Options) -> tuple[str, bool]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="evalspan-upgrade-", dir="/var/tmp") as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        old, new = Version.of(options.old, scratch), Version.of(options.new, scratch)
        with place() as where:
            calm = taken_up(where, "undisturbed", old, new, wanted={})
            rows.append(calm)
            say(f"undisturbed: {calm['seconds']} s {calm['broken']}")
            for case in [] if calm["broken"] else (options.case or CASES):
                rows.append(taken_up(where, case, old, new, wanted=calm["scores"], keep=options.keep))
                said = {k: v for k, v in rows[-1].items() if k != "scores"}
                say(json.dumps(said))
    return table(rows, old, new), not any(row["broken"] for row in rows)


def table(rows: list[Row], old: Version, new: Version) -> str:
    """A line a case."""
    lines = [
        f"OLD {old.commit}, NEW {new.commit}",
        "| case | same scores, nothing left | shards run twice | shards after the takeover by old jobs | jobs after it | s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        well = "; ".join(row["broken"]) or "yes"
        cells = [row["case"], f"{well} {row['note']}".strip(), row["twice"], row.get("by_old_jobs", "")]
        lines.append("| " + " | ".join(map(str, [*cells, row.get("new_jobs", ""), row["seconds"]])) + " |")
    return "\n".join(lines)


OPTIONS = (
    ("old", {"metavar": "OLD", "help": "the commit that begins the evaluations"}),
    (
        "new",
        {
            "metavar": "NEW",
            "nargs": "?",
            "default": "",
            "help": "the commit that goes on; default: this tree",
        },
    ),
    option(
        "--keep", None, "a new folder for files of the evaluations at the takeover and at the end", type=Path
    ),
    option(
        "--case",
        text="of these, again for more; default: all",
        action="append",
        choices=CASES,
        metavar="CASE",
    ),
)

if __name__ == "__main__":
    sys.exit(command("try-upgrade", f"{__doc__}\nCases: {', '.join(CASES)}.", measure, *OPTIONS, slurm=True))
