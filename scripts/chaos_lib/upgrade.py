"""Evaluations that one commit begins and another takes up: scripts/try-upgrade OLD [NEW].

The coordinator of OLD is ended while it stages, infers or scores, by SIGKILL and by SIGTERM. Its jobs stand still until the
coordinator of NEW has taken the evaluation up, and go on then. `daemon` does so with the daemon, two checkpoints, one more
that OLD submits while no daemon runs, and a cordoned node. `in-place`: the code of OLD is replaced by that of NEW while jobs
of OLD run. `back` is the other way: OLD is started on a folder that NEW has written to, and NEW ends the evaluation. The
table says how many shards ran twice, and how many the jobs of OLD ran after the takeover.

Exit status 0: all scores are those of an undisturbed run of OLD and nothing is left; 1: not so; 2: it cannot be run here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Options, RunError, command, option, say
from dev_cluster import procs

from chaos_lib.campaign import CLEAN_S, Run, laws_broken, scores, under_faults
from chaos_lib.site import Place, Site, place
from coordinator.runtime.journal import WorkLock
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import read_frames

PATIENCE_S = 300.0
BACK_S = 25.0  # that OLD has the folder of a newer coordinator: two looks at its jobs, and one more try
LOOK_S = 3.0  # in which a coordinator looks at its jobs
CORDONED = "n2"
Row = dict[str, Any]
Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A commit with an environment of its own, in which all packages but evalspan are those of this process."""

    commit: str
    program: Path | None  # the command `evalspan`; None: this tree's
    code: Path = ROOT  # the clone that it runs

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
        return cls(commit=short, program=program, code=clone)

    def become(self, other: Version) -> None:
        """Have this version's clone hold the code of another, as an upgrade in place does."""
        for package in ("coordinator", "evaljobs", "priors"):
            shutil.rmtree(self.code / package)
            shutil.copytree(
                other.code / package, self.code / package, ignore=shutil.ignore_patterns("__pycache__")
            )

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


def _shards(events: Sequence[Event], kind: str) -> int:
    if kind == "planned":
        return sum(len(leaf["shards"]) for e in events if e["kind"] == kind for leaf in e["leaves"])
    return sum(len(e["shards"]) for e in events if e["kind"] == kind)


def _staging(site: Site) -> bool:
    return not any(e["kind"] == "outcome-seen" and e["outcome"]["kind"] == "staged" for e in site.events())


def _inference(site: Site) -> bool:
    return _shards(site.events(), "shards-dumped") > 0


def _metrics(site: Site) -> bool:
    events = site.events()
    return 0 < _shards(events, "planned") == _shards(events, "shards-dumped")


# name -> the jobs that work then, and whether it is the moment
MOMENTS: dict[str, tuple[str, Callable[[Site], bool]]] = {
    "staging": ("stage", _staging),
    "inference": ("trial", _inference),
    "metrics": ("worker", _metrics),
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}
CASES = [
    "undisturbed",
    *(f"{moment} {number}" for moment in MOMENTS for number in SIGNALS),
    *(f"daemon {number}" for number in SIGNALS),
    *(f"in-place {moment}" for moment in MOMENTS),
    "back",
]


# --- one case ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Case:
    """One takeover: `first` begins, `then` goes on. `wanted`: the scores; without them nothing is taken over."""

    name: str
    first: Version
    then: Version
    wanted: dict[str, Any]
    keep: Path | None = None  # a folder for the evaluations' files at the takeover and at the end

    @property
    def daemon(self) -> bool:
        return self.name.startswith("daemon")

    def run(self, where: Place) -> Row:
        """The row of the table; its `broken` has a line for each broken law."""
        began = time.monotonic()
        site = self.first.site(Site.make(where, f"u{time.time_ns() % 10**10}", daemon=self.daemon))
        row: Row = {"case": self.name, "note": "", "lines": {}}
        with under_faults(site, random.Random(self.name), PATIENCE_S) as run:
            if self.daemon:
                run.wait(lambda: WorkLock(WorkPaths(site.work).lock).held())
                _evalspan(site, "release", CORDONED)
                run.wait(WorkPaths(site.work).nodes.exists)
                _submit(site, "tiny-a")
                _submit(site, "tiny-b")
            if self.wanted:
                self._take_over(run, row)
            run.await_end(PATIENCE_S, "the coordinator")
            self._judge(run, row)
        where.mend()
        row["seconds"] = round(time.monotonic() - began)
        if not row["broken"]:
            site.remove()
        return row

    def _take_over(self, run: Run, row: Row) -> None:
        words = self.name.split()
        verb, now = next((MOMENTS[word] for word in words if word in MOMENTS), MOMENTS["inference"])
        number = next((SIGNALS[word] for word in words if word in SIGNALS), signal.SIGTERM)
        pids = run.found(lambda: (now(run.site) and run.site.processes_of(verb)) or run.process.poll())
        if not isinstance(pids, list):
            run.broken.append("its moment did not come")
            return
        _send(pids, signal.SIGSTOP)
        run.process.send_signal(number)
        run.process.wait(timeout=60)
        row["lines"] = {folder: len(run.site.events(folder)) for folder in run.site.evaluations()}
        _keep(run.site, self.keep, self.name, "takeover")
        if self.daemon:
            _submit(run.site, "tiny-c")
        if "in-place" in words:
            self.first.become(self.then)
        elif self.name == "back":
            row["note"] = _given_back(run, self.then)
            run.site = self.first.site(run.site)
        else:
            run.site = self.then.site(run.site)
        run.process = run.site.start(*(("daemon", "--until-idle") if self.daemon else ()))
        procs.poll(lambda: _taken_up(run.site) or run.process.poll() is not None, deadline_s=60, every_s=0.2)
        time.sleep(LOOK_S)
        _send(pids, signal.SIGCONT)

    def _judge(self, run: Run, row: Row) -> None:
        site, folders = run.site, run.site.evaluations()
        count = 3 if self.daemon else 1
        if len(folders) != count:
            run.broken.append(f"{len(folders)} evaluations of {count} checkpoints")
        if self.wanted and not _taken_up(site):
            run.broken.append("not resumed")
        for folder in folders:
            found, events = scores(folder), site.events(folder)
            row["scores"] = found
            run.broken += laws_broken(events, found, self.wanted)
            if failed := [task for task, score in found.items() if "failed" in score] or (
                [] if found else ["all"]
            ):
                run.broken.append(f"{folder.name} failed: {', '.join(failed)}")
            nodes = {e["job"]["node"] for e in events if e["kind"] == "job-intended"}
            if self.daemon and CORDONED in nodes:
                run.broken.append(f"{folder.name} used the cordoned {CORDONED}")
        log = (site.folder / "eval.log").read_text()
        run.broken += [line for line in log.splitlines() if "passed over" in line][:3]
        run.broken += [f"left behind: {what}" for what in site.wait_clean(CLEAN_S)]
        row |= _work_of_before(site, row.pop("lines"))
        row["twice"] = _twice(folders)
        row["broken"] = run.broken
        _keep(site, self.keep, self.name, "end")


def _taken_up(site: Site) -> bool:
    """Has another coordinator gone on with each evaluation that was begun before it?"""
    return any(e["kind"] == "restarted" for folder in site.evaluations() for e in site.events(folder))


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _evalspan(site: Site, *words: str) -> None:
    done = subprocess.run(site.command(*words), env=site.env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(f"evalspan {' '.join(words)}: {done.stderr}")


def _submit(site: Site, name: str) -> None:
    """Submit a copy of the checkpoint."""
    copy = site.folder / name
    shutil.copytree(site.folder / "tiny", copy)
    site.give(copy)
    _evalspan(site, "submit", str(copy), "--suite", str(site.folder / "chaos.toml"))


def _keep(site: Site, keep: Path | None, case: str, when: str) -> None:
    for folder in site.evaluations() if keep is not None else ():
        left = shutil.ignore_patterns("logs", "samples", "specs", "report.json", "status.json", ".*")
        shutil.copytree(folder, keep / case.replace(" ", "-") / when / folder.name, ignore=left)


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


def _work_of_before(site: Site, lines: Mapping[Path, int]) -> Row:
    """What came of jobs from before the takeover, and which jobs came after it."""
    used = later = 0
    jobs: Counter[str] = Counter()
    for folder, count in lines.items():
        before, after = site.events(folder)[:count], site.events(folder)[count:]
        trials = {t for e in before if e["kind"] == "job-intended" for t in e.get("trials", ())}
        frames = [frame for e in after if e["kind"] == "shards-dumped" for _, frame in e["shards"]]
        later += len(frames)
        used += sum(frame["file"].removesuffix(".frames") in trials for frame in frames)
        jobs += Counter(e["job"]["purpose"] for e in after if e["kind"] == "job-intended")
    return {
        "by_old_jobs": f"{used} of {later}" if lines else "",
        "new_jobs": ", ".join(f"{n} {what}" for what, n in sorted(jobs.items())),
    }


def _twice(folders: Sequence[Path]) -> int:
    """Shards whose responses are in more than one record."""
    files = [(folder, file) for folder in folders for file in folder.glob("responses/*.frames")]
    seen = Counter((folder, head.shard) for folder, file in files for _, head in read_frames(file, 0))
    return sum(count - 1 for count in seen.values())


# --- all cases ---------------------------------------------------------------------------------------------------------


def measure(options: Options) -> tuple[str, bool]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="evalspan-upgrade-", dir="/var/tmp") as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        old, new = Version.of(options.old, scratch), Version.of(options.new, scratch)
        with place() as where:
            for case in dict.fromkeys(("undisturbed", *(options.case or CASES))):
                first = (
                    Version.of(options.old, scratch / case.replace(" ", "-")) if "in-place" in case else old
                )
                pair = (new, old) if case == "back" else (first, new)
                wanted = rows[0]["scores"] if rows else {}
                one = Case(name=case, first=pair[0], then=pair[1], wanted=wanted, keep=options.keep)
                rows.append(one.run(where))
                say(json.dumps({k: v for k, v in rows[-1].items() if k != "scores"}))
                if rows[0]["broken"]:
                    break
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
