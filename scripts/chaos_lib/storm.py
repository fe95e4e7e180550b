"""A daemon while anything may break at any moment: scripts/chaos daemon.

A daemon of an ordinary user watches a folder in which checkpoints appear, each with other weights, so many that --flight
are in flight; some are announced by `evalspan submit` or the training hook as well, some over and over. For --minutes faults
strike at moments drawn from the seed, several at a time; then all is mended and the daemon may end.

Rule: judged from files and cluster alone: every checkpoint that ever appeared has its evaluation, and that one has lm-eval's
own scores of it, digit for digit. Exit code 1 where a law does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import always, command, option
from support.toys import expected, toy_model

from chaos_lib.campaign import laws_broken
from chaos_lib.faults import FAULTS, Fault, Run
from chaos_lib.site import TASKS, Place, Site, place
from coordinator.hook import PIN_PREFIX
from coordinator.runtime.journal import WorkLock
from evaljobs.contract.paths import WorkPaths

GAP_S = (3.0, 17.0)  # between two strikes
CALM_S = 600.0  # for what is in flight when the storm ends
MODELS = 6
HUNG_S = 90  # five evaluations share the machine
SMALL_MB = 256
WEIGHTS = "model.safetensors"
DAEMON = """
[watch]
folders = ["{run}"]
suite = "{suite}"
"""
NOTIFY = (
    "import sys; from coordinator import hook; where, work, suite = sys.argv[1:4]\n"
    "for _ in range(int(sys.argv[4])): hook.notify(where, suite=suite, work_dir=work)\n"
    "hook.flush(60)"
)


def schedule(seed: int, seconds: float, names: Sequence[str]) -> list[tuple[float, str]]:
    """Moments (seconds from the begin) and faults. Every fault once, in some order, before any fault again."""
    dice = random.Random(seed)
    found: list[tuple[float, str]] = []
    hand: list[str] = []
    at = dice.uniform(*GAP_S)
    while at < seconds:
        if not hand:
            hand = dice.sample(sorted(names), len(names))
        found.append((at, hand.pop()))
        at += dice.uniform(*GAP_S)
    return found


@dataclass(slots=True, kw_only=True)
class Storm:
    """A daemon's run. `expected`: model -> task -> lm-eval's results."""

    place: Place
    site: Site
    run: Run
    models: Sequence[Path]
    expected: Sequence[dict[str, Any]]
    suite: Path
    flight: int
    told: dict[Path, int] = field(default_factory=dict)  # checkpoint -> its model
    broken: list[str] = field(default_factory=list)
    strikes: list[str] = field(default_factory=list)
    came_to_nothing: Counter[str] = field(default_factory=Counter)
    busy: set[str] = field(default_factory=set)  # parts that a fault is breaking
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def folder(self) -> Path:
        return self.site.folder / "run"

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def in_flight(self) -> int:
        return len(self.told) - len(list(self.site.work.glob("*/results.json")))

    def feed(self, dice: random.Random) -> None:
        """A checkpoint is saved, slowly perhaps; the watched folder tells of it, others may as well."""
        number = len(self.told)
        place = self.folder / f"step-{number:03d}"
        model = number % len(self.models)
        self.told[place] = model
        shutil.copytree(self.models[model], place, ignore=shutil.ignore_patterns(WEIGHTS))
        weights = (self.models[model] / WEIGHTS).read_bytes()
        with (place / WEIGHTS).open("wb") as file:
            file.write(weights[: len(weights) // 2])
            file.flush()
            time.sleep(dice.uniform(0, 3))
            file.write(weights[len(weights) // 2 :])
        self.site.give(place)
        how = dice.choice(("watched", "submitted", "announced", "announced-100-times"))
        if how == "submitted":
            words = ["submit", str(place), "--suite", str(self.suite), "--priority", str(number % 3)]
            self._as_user(self.site.command(*words))
        elif how != "watched":
            times = "100" if how.endswith("times") else "1"
            python = str(self.site.cluster.python)
            words = [python, "-c", NOTIFY, str(place), str(self.site.work), self.suite.stem, times]
            self._as_user(self.site.cluster.user_argv(words, cwd=self.site.folder))

    def _as_user(self, argv: Sequence[str]) -> None:
        """Whatever comes of it: a full disk refuses a notice, and the watched folder tells of the checkpoint all the same."""
        with (self.site.folder / "notices.log").open("a") as log:
            subprocess.run(argv, env=self.site.env, stdout=log, stderr=log, timeout=180, check=False)

    # --- faults --------------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault, at: float, dice: random.Random) -> None:
        """In a thread of its own; passed over where something else is breaking the same part."""
        with self.lock:
            if self.busy & set(fault.breaks):
                self.came_to_nothing[fault.name] += 1
                return
            self.busy |= set(fault.breaks)
        try:
            if "coordinator" in fault.breaks:
                self.run.wait(lambda: WorkLock(WorkPaths(self.site.work).lock).held())
            hit = None if self.run.over else fault.strike(self.run)
            if "node" in fault.breaks and hit is not None:
                time.sleep(dice.uniform(3, 20))
                self.mend_nodes()
            if hit is None:
                self.came_to_nothing[fault.name] += 1
            else:
                self.strikes.append(f"{at:.0f} s: {fault.name}: {hit}")
        except Exception as error:  # noqa: BLE001 (said in the verdict; the storm goes on)
            self.broken.append(f"{fault.name} could not be struck: {type(error).__name__}: {error}")
        finally:
            with self.lock:
                self.busy -= set(fault.breaks)

    def mend_nodes(self) -> None:
        self.place.mend("allocated", "completing")

    def watch(self) -> None:
        """A daemon that ends without being struck broke a law; another takes its place."""
        process = self.run.process
        if process.poll() is None:
            return
        with self.run.replacing:  # a fault that ends it puts another in its place
            if process is self.run.process:
                said = f"{process.returncode}: {self.site.last_words()}"
                self.broken.append(f"the daemon ended by itself with {said}")
                self.run.process = self.site.start()

    def blow(self, plan: Sequence[tuple[float, str]], seconds: float, seed: int) -> None:
        """Feed checkpoints and strike until the time is over."""
        dice = random.Random(f"storm/{seed}")
        begun = time.monotonic()
        waiting = list(plan)
        threads: list[threading.Thread] = []
        feeder: threading.Thread | None = None
        while (now := time.monotonic() - begun) < seconds:
            if waiting and waiting[0][0] <= now:
                at, name = waiting.pop(0)
                own = random.Random(dice.random())
                thread = threading.Thread(target=self.strike, args=(FAULTS[name], at, own), daemon=True)
                threads.append(thread)
                thread.start()
            if self.in_flight() < self.flight and (feeder is None or not feeder.is_alive()):
                feeder = threading.Thread(target=self.feed, args=(dice,), daemon=True)
                feeder.start()
            self.watch()
            time.sleep(0.1)
        self.run.over = True
        for thread in [*threads, *([feeder] if feeder is not None else [])]:
            thread.join(timeout=180)
        self.broken += ["a fault did not end"] * any(t.is_alive() for t in threads)

    # --- calm ----------------------------------------------------------------------------------------------------------

    def calm(self) -> None:
        """All is mended; the daemon gets its time, is told to stop, and the last one ends for want of work."""
        for name in ("sbatch", "squeue"):
            self.site.unwrap(name)
        self.mend_nodes()
        end = time.monotonic() + CALM_S
        while self.in_flight() > 0 and time.monotonic() < end:
            self.watch()
            time.sleep(0.5)
        if self.in_flight() > 0:
            self.broken.append(f"not ended within {CALM_S:g} s after the storm: {', '.join(self._open())}")
        self.run.process.send_signal(signal.SIGTERM)
        self._ended(60, "told to stop, the daemon")
        self.run.process = self.site.start_program("daemon", "--until-idle")
        self._ended(120, "the last daemon")

    def _open(self) -> list[str]:
        ended = {_checkpoint(f) for f in self.site.evaluations() if (f / "results.json").exists()}
        return sorted(p.name for p in self.told if p not in ended)

    def _ended(self, seconds: float, who: str) -> None:
        try:
            code = self.run.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.broken.append(f"{who} did not end within {seconds:g} s")
            self.run.process.kill()
            self.run.process.wait()
        else:
            self.broken += [f"{who} ended with {code}: {self.site.last_words()}"] * (code != 0)

    # --- verdict ---------------------------------------------------------------------------------------------------------

    def judge(self) -> Iterator[str]:
        evaluations: dict[Path, list[Path]] = {}
        for folder in self.site.evaluations():
            evaluations.setdefault(_checkpoint(folder), []).append(folder)
        for checkpoint, model in self.told.items():
            mine = evaluations.pop(checkpoint, [])
            if len(mine) != 1:
                yield f"{checkpoint.name} has {len(mine)} evaluations"
            for folder in mine:
                for law in laws_broken(self.site.events(folder), _scores(folder), self.expected[model]):
                    yield f"{checkpoint.name}: {law}"
        yield from (f"an evaluation of {place}" for place in evaluations)
        yield from (f"pinned still: {pin.parent.name}" for pin in self.folder.glob(f"*/{PIN_PREFIX}*"))
        yield from (f"notice left: {f.name}" for f in self.site.work.glob("spool/*.json"))
        yield from (f"left behind: {what}" for what in self.site.wait_clean(60))


def _checkpoint(evaluation: Path) -> Path:
    return Path(json.loads((evaluation / "evaluation.json").read_text())["checkpoint"]["source"])


def _scores(evaluation: Path) -> dict[str, Any]:
    results = evaluation / "results.json"
    if not results.exists():
        return {}
    found = json.loads(results.read_text())
    return {**found["results"], **{task: {"failed": why} for task, why in found.get("failed", {}).items()}}


def run(where: Place, seed: int, *, minutes: float, flight: int, names: Sequence[str]) -> dict[str, Any]:
    """One storm and its verdict. A site that broke a law keeps its folder until the cluster goes."""
    models = [toy_model(where.models, seed) for seed in range(MODELS)]
    known = [expected(model, TASKS) for model in models]
    odd = {"partition": "spare", "on_small": True, "own_clock": True, "hung_seconds": HUNG_S}
    site = Site.make(where, f"storm-{seed}", **odd).as_daemon()
    suite = site.folder / "chaos.toml"
    with (site.folder / "evalspan.toml").open("a") as config:
        config.write(DAEMON.format(run=site.folder / "run", suite=suite))
    site.cluster.run_as_user(["mkdir", "-p", str(site.folder / "run")], check=True)
    begun = time.monotonic()
    disturbing = Run(site=site, process=site.start(), dice=random.Random(f"victims/{seed}"))
    storm = Storm(
        place=where, site=site, run=disturbing, models=models, expected=known, suite=suite, flight=flight
    )
    try:
        storm.blow(schedule(seed, 60 * minutes, names), 60 * minutes, seed)
        calm_at = time.monotonic()
        storm.calm()
        calm_s = time.monotonic() - calm_at
        storm.broken += storm.judge()
    finally:
        disturbing.over = True
        disturbing.process.kill()
        disturbing.process.wait()
        if storm.broken:
            site.sweep()
    return _report(storm, seed, minutes, calm_s) | {"seconds": round(time.monotonic() - begun)}


def _report(storm: Storm, seed: int, minutes: float, calm_s: float) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    for folder in storm.site.evaluations():
        kinds.update(e["kind"] for e in storm.site.events(folder))
    struck = Counter(s.split(": ")[1] for s in storm.strikes)
    return {
        "seed": seed,
        "minutes": minutes,
        "strikes": sum(struck.values()),
        "struck": dict(sorted(struck.items())),
        "came_to_nothing": dict(storm.came_to_nothing),
        "checkpoints": len(storm.told),
        "calm_s": round(calm_s),
        "events": dict(kinds.most_common()),
        "broken": storm.broken,
        "holds": not storm.broken and bool(storm.told) and bool(struck),
        "when": storm.strikes,
    }


def measure(said: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    with place(SMALL_MB) as where:
        names = said.fault or list(FAULTS)
        report = run(where, said.seed, minutes=said.minutes, flight=said.flight, names=names)
        if said.keep and report["broken"]:
            _keep(where, said.keep)
    return report, bool(report["holds"])


def main(argv: Sequence[str]) -> int:
    options = (
        option("--minutes", 10.0, "that faults strike (10)"),
        option("--seed", 0),
        option("--flight", 5, "checkpoints at once (5)"),
        option("--fault", says="again for more; default: all", action="append", choices=list(FAULTS)),
        option("--keep", says="copy the site here where a law is broken", type=Path),
    )
    return command("chaos daemon", __doc__, measure, *options, argv=argv, slurm=always)


def _keep(where: Place, to: Path) -> None:
    shutil.copytree(where.cluster.user_dir, to / "site", dirs_exist_ok=True, symlinks=True)
    shutil.copytree(where.small, to / "work", dirs_exist_ok=True, symlinks=True)
    shutil.copytree(where.cluster.dir / "log", to / "log", dirs_exist_ok=True)
