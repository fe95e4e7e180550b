"""A daemon while anything may break at any moment: scripts/chaos daemon.

A daemon of an ordinary user watches a folder in which checkpoints appear, each with other weights, so many that --flight
are in flight; some are announced by `evalspan submit` or the training hook as well, some over and over. For --minutes faults
strike at moments drawn from the seed, several at a time; then all is mended and the daemon may end.

Rule: judged from files and cluster alone: every checkpoint that ever appeared has its evaluation, and that one has lm-eval's
own scores of it, digit for digit. Exit code 1 where a law does not hold.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Options, option
from dev_cluster import procs
from support.toys import expected, toy_model

from chaos_lib.campaign import CLEAN_S, Run, laws_broken, scores, under_faults
from chaos_lib.faults import FAULTS, Fault, schedule
from chaos_lib.site import TASKS, Place, Site, place
from coordinator.hook import PIN_PREFIX
from coordinator.runtime.work_lock import WorkLock
from evaljobs.contract.paths import WorkPaths

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


class Storm:
    """A daemon's run under faults, and the checkpoints that it is to evaluate."""

    def __init__(self, place: Place, run: Run, models: Sequence[Path], flight: int) -> None:
        self.place, self.run, self.site = place, run, run.site
        self.models, self.flight = models, flight
        self.folder = run.site.folder / "run"
        self.checkpoints: dict[Path, int] = {}  # that appeared -> number of its model
        self.busy: set[str] = set()  # parts that a fault is breaking
        self.lock = threading.Lock()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def in_flight(self) -> int:
        return len(self.checkpoints) - len(list(self.site.work.glob("*/results.json")))

    def feed(self, dice: random.Random) -> None:
        """Save a checkpoint in the watched folder, slowly perhaps, and announce it in other ways, too."""
        number = len(self.checkpoints)
        checkpoint = self.folder / f"step-{number:03d}"
        model = number % len(self.models)
        self.checkpoints[checkpoint] = model
        shutil.copytree(self.models[model], checkpoint, ignore=shutil.ignore_patterns(WEIGHTS))
        weights = (self.models[model] / WEIGHTS).read_bytes()
        with (checkpoint / WEIGHTS).open("wb") as file:
            file.write(weights[: len(weights) // 2])
            file.flush()
            time.sleep(dice.uniform(0, 3))
            file.write(weights[len(weights) // 2 :])
        self.site.give(checkpoint)
        suite = self.site.folder / "chaos.toml"
        submit = self.site.command(
            "submit", str(checkpoint), "--suite", str(suite), "--priority", str(number % 3)
        )

        def notify(times: int) -> list[str]:
            words = ["-c", NOTIFY, str(checkpoint), str(self.site.work), suite.stem, str(times)]
            return self.site.cluster.user_argv([self.site.cluster.python, *words], cwd=self.site.folder)

        if argv := dice.choice(([], submit, notify(1), notify(100))):
            # a full disk may refuse a notice: the daemon lists the watched folder all the same
            with (self.site.folder / "notices.log").open("a") as log:
                subprocess.run(argv, env=self.site.env, stdout=log, stderr=log, timeout=180, check=False)

    # --- faults --------------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault, at: float, dice: random.Random) -> None:
        """In a thread of its own; passed over where another fault is breaking the same part."""
        with self.lock:
            if self.busy & set(fault.breaks):
                self.run.missed[fault.name] += 1
                return
            self.busy |= set(fault.breaks)
        if "coordinator" in fault.breaks:
            self.run.wait(lambda: WorkLock(WorkPaths(self.site.work).lock).held())

        def strike(run: Run) -> str | None:
            hit = fault.strike(run)
            if hit is not None and "node" in fault.breaks:
                time.sleep(dice.uniform(3, 20))
                self.mend_nodes()
            return hit

        self.run.strike(fault.name, strike, f"{at:.0f} s")
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
                end = f"{process.returncode}: {self.site.last_words()}"
                self.run.broken.append(f"the daemon ended by itself with {end}")
                self.run.process = self.site.start()

    def blow(self, plan: Sequence[tuple[float, str]], seconds: float, dice: random.Random) -> None:
        """Feed checkpoints and strike until the time is over."""
        begun = time.monotonic()
        waiting = list(plan)
        threads: list[threading.Thread] = []
        feeder = threading.Thread()
        while (now := time.monotonic() - begun) < seconds:
            if waiting and waiting[0][0] <= now:
                at, name = waiting.pop(0)
                what = (FAULTS[name], at, random.Random(dice.random()))
                threads.append(threading.Thread(target=self.strike, args=what, daemon=True))
                threads[-1].start()
            if self.in_flight() < self.flight and not feeder.is_alive():
                feeder = threading.Thread(target=self.feed, args=(dice,), daemon=True)
                threads.append(feeder)
                feeder.start()
            self.watch()
            time.sleep(0.1)
        self.run.over = True
        for thread in threads:
            thread.join(timeout=180)
        self.run.broken += ["a fault did not end"] * any(t.is_alive() for t in threads)

    # --- calm ----------------------------------------------------------------------------------------------------------

    def calm(self) -> None:
        """Mend everything, let the daemon finish, stop it by SIGTERM; another one, `--until-idle`, finds nothing to do."""
        for name in ("sbatch", "squeue"):
            self.site.unwrap(name)
        self.mend_nodes()

        def all_ended() -> bool:
            self.watch()
            return self.in_flight() <= 0

        if not procs.poll(all_ended, deadline_s=CALM_S, every_s=0.5):
            ended = {_checkpoint(f) for f in self.site.evaluations() if (f / "results.json").exists()}
            names = ", ".join(sorted(c.name for c in self.checkpoints if c not in ended))
            self.run.broken.append(f"not ended within {CALM_S:g} s after the storm: {names}")
        self.run.process.send_signal(signal.SIGTERM)
        self.run.await_end(60, "after SIGTERM the daemon")
        self.run.process = self.site.start("daemon", "--until-idle")
        self.run.await_end(120, "the last daemon")

    # --- verdict ---------------------------------------------------------------------------------------------------------

    def judge(self, wanted: Sequence[dict[str, Any]]) -> Iterator[str]:
        """Laws that do not hold; `wanted`: of each model, task -> lm-eval's results."""
        evaluations: dict[Path, list[Path]] = {}
        for folder in self.site.evaluations():
            evaluations.setdefault(_checkpoint(folder), []).append(folder)
        for checkpoint, model in self.checkpoints.items():
            mine = evaluations.pop(checkpoint, [])
            if len(mine) != 1:
                yield f"{checkpoint.name} has {len(mine)} evaluations"
            for folder in mine:
                for law in laws_broken(self.site.events(folder), scores(folder), wanted[model]):
                    yield f"{checkpoint.name}: {law}"
        yield from (f"an evaluation of {checkpoint}" for checkpoint in evaluations)
        yield from (f"pinned still: {pin.parent.name}" for pin in self.folder.glob(f"*/{PIN_PREFIX}*"))
        yield from (f"notice left: {f.name}" for f in self.site.work.glob("inbox/*.json"))
        yield from (f"left behind: {what}" for what in self.site.wait_clean(CLEAN_S))


def _checkpoint(evaluation: Path) -> Path:
    return Path(json.loads((evaluation / "evaluation.json").read_text())["checkpoint"]["source"])


def run(where: Place, seed: int, *, minutes: float, flight: int, names: Sequence[str]) -> dict[str, Any]:
    """One storm and its verdict. A site that broke a law keeps its folder until the cluster goes."""
    models = [toy_model(where.model.parent, number) for number in range(MODELS)]
    wanted = [expected(model, TASKS) for model in models]
    odd = {"partition": "spare", "on_small": True, "own_clock": True, "hung_seconds": HUNG_S}
    site = Site.make(where, f"storm-{seed}", daemon=True, **odd)
    with (site.folder / "evalspan.toml").open("a") as config:
        config.write(DAEMON.format(run=site.folder / "run", suite=site.folder / "chaos.toml"))
    site.cluster.run_as_user(["mkdir", "-p", str(site.folder / "run")], check=True)
    begun = time.monotonic()
    with under_faults(site, random.Random(f"victims/{seed}")) as disturbing:
        storm = Storm(where, disturbing, models, flight)
        storm.blow(schedule(seed, 60 * minutes, names), 60 * minutes, random.Random(f"storm/{seed}"))
        calm_at = time.monotonic()
        storm.calm()
        calm_s = time.monotonic() - calm_at
        disturbing.broken += storm.judge(wanted)
    kinds = Counter(e["kind"] for folder in site.evaluations() for e in site.events(folder))
    struck = Counter(name for name, _ in disturbing.strikes)
    return {
        "seed": seed,
        "minutes": minutes,
        "strikes": struck.total(),
        "struck": dict(sorted(struck.items())),
        "came_to_nothing": dict(disturbing.missed),
        "checkpoints": len(storm.checkpoints),
        "calm_s": round(calm_s),
        "events": dict(kinds.most_common()),
        "broken": disturbing.broken,
        "holds": not disturbing.broken and bool(storm.checkpoints) and bool(struck),
        "when": [f"{name}, {what}" for name, what in disturbing.strikes],
        "seconds": round(time.monotonic() - begun),
    }


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    with place(SMALL_MB) as where:
        names = options.fault or list(FAULTS)
        report = run(where, options.seed, minutes=options.minutes, flight=options.flight, names=names)
        if options.keep and report["broken"]:
            folders = {"site": where.cluster.user_dir, "work": where.small, "log": where.cluster.dir / "log"}
            for name, folder in folders.items():
                shutil.copytree(folder, options.keep / name, dirs_exist_ok=True, symlinks=True)
    return report, bool(report["holds"])


OPTIONS = (
    option("--minutes", 10.0, "that faults strike (10)"),
    option("--seed", 0),
    option("--flight", 5, "checkpoints at once (5)"),
    option("--fault", text="again for more; default: all", action="append", choices=list(FAULTS)),
    option("--keep", text="copy the site here where a law is broken", type=Path),
)
