"""Whole evaluations on a real Slurm while faults strike at seeded moments; docs/benchmarks.md has the laws and figures.

scripts/chaos: one `evalspan eval` a run, struck by one fault or by several. scripts/chaos daemon: a daemon watches a folder
in which checkpoints appear, each with other weights, so many that --flight are in flight; some are announced by `evalspan
submit` or the training hook as well, some over and over. For --minutes faults strike, several at a time; then all is mended
and the daemon may end.

Rule: laws are read from what is on disk and on the cluster afterwards, never from what the coordinator prints. A run's row
goes to stderr when it ends. Exit status 0: every run gave the same scores and left nothing; 1: one did not; 2: it cannot be
run here.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.harness import Options, command, option, say
from dev_cluster import procs
from support.toys import expected, toy_model

from chaos_lib.faults import FAULTS, deal, schedule
from chaos_lib.run import Run, under_faults
from chaos_lib.site import TASKS, Place, Site, place
from coordinator.hook import PIN_PREFIX

PATIENCE_S = 300.0  # for one evaluation
CALM_S = 600.0  # for what is in flight when the storm ends
CLEAN_S = 60.0  # a controller that was away ends its jobs later
MODELS = 6
HUNG_S = 90  # five evaluations share the machine
SMALL_MB = 256
WEIGHTS = "model.safetensors"
WATCH = '\n[watch]\nfolders = ["{run}"]\nsuite = "{suite}"\n'
NOTIFY = (
    "import sys; from coordinator import hook; where, work, suite = sys.argv[1:4]\n"
    "for _ in range(int(sys.argv[4])): hook.notify(where, suite=suite, work_dir=work)\n"
    "hook.flush(60)"
)
Row = dict[str, Any]


# --- laws --------------------------------------------------------------------------------------------------------------


def scores(evaluation: Path) -> dict[str, Any]:
    """Task -> its results, or why it failed; empty without results."""
    results = evaluation / "results.json"
    if not results.exists():
        return {}
    found = json.loads(results.read_text())
    return {**found["results"], **{task: {"failed": why} for task, why in found.get("failed", {}).items()}}


def laws_broken(site: Site, evaluation: Path, wanted: dict[str, Any]) -> Iterator[str]:
    """What an evaluation's journal and its scores show that must not be; without `wanted` scores are not compared."""
    events, found = site.events(evaluation), scores(evaluation)
    if wanted and found != wanted:
        yield f"other scores: {json.dumps(found)}"
    planned = [s for e in events if e["kind"] == "planned" for x in e["leaves"] for s in x["shards"]]
    counted = Counter(s for e in events if e["kind"] == "shards-dumped" for s, _ in e["shards"])
    again = Counter(e["shard"] for e in events if e["kind"] == "shard-corrupted")
    if len(planned) != len(set(planned)):
        yield "a shard was planned twice"
    for shard in planned:
        if counted[shard] != 1 + again[shard]:
            yield f"{shard} was counted {counted[shard]} times, corrupted {again[shard]} times"
    outcomes = [e["outcome"] for e in events if e["kind"] == "outcome-seen"]
    entries = sorted(o["entry"] for o in outcomes if o["kind"] == "scored")
    if len(entries) != len(set(entries)):
        yield f"scored twice: {entries}"


def _times_broken(run: Run) -> Iterator[str]:
    """What the journal of an evaluation whose clock jumped must not show."""
    events = run.site.events()
    # events of one look carry the time of its begin, what came of them in between a later one
    if any(a["at"] - b["at"] > CLEAN_S for a, b in pairwise(events)):
        yield "the journal's times run backwards"
    # the clock alone says how long a killed coordinator was away
    span = sum(b["at"] - a["at"] for a, b in pairwise(events) if b["kind"] != "restarted")
    if span > PATIENCE_S:
        yield f"the journal spans {span:.0f} s"
    if "trial-hung" not in dict(run.strikes) and any(e["kind"] == "trial-hung" for e in events):
        yield "a trial that no fault stopped was judged hung"


# --- one evaluation ----------------------------------------------------------------------------------------------------


def disturbed(place: Place, names: Sequence[str], seed: int, wanted: dict[str, Any], events: int) -> Row:
    """Run an evaluation, strike these faults at moments drawn from `seed`, and judge what comes of it.

    `wanted`, `events`: scores and number of events of the undisturbed run (the one without names); without scores they
    are not compared. The row's `broken`: the laws that do not hold, one line each.
    """
    chosen = [FAULTS[n] for n in names]
    label = "+".join(names)
    dice = random.Random(f"{label}/{seed}")
    site = Site.make(
        place,
        f"r{time.time_ns() % 10**10}-{seed}",
        partition="spare" if any(f.partition == "spare" for f in chosen) else "gpu",
        on_small=any(f.on_small for f in chosen),
        own_clock=any(f.own_clock for f in chosen),
    )
    started = time.monotonic()
    with under_faults(site, dice) as run:
        for fault in chosen:
            run.begin(run.strike_after, fault, 1 + int(events * dice.uniform(*fault.span)))
        if len(chosen) > 1:  # together they may take every node
            run.begin(run.administer)
        run.await_end(PATIENCE_S, "the evaluation")
        seconds = time.monotonic() - started
        run.join(60)
        folder = next(iter(site.evaluations()), site.work)
        run.broken += laws_broken(site, folder, wanted) if folder != site.work else ["no evaluation"]
        run.broken += _times_broken(run) if site.own_clock else []
        run.broken += [f"left behind: {what}" for what in site.wait_clean(CLEAN_S)]
    place.mend()
    row = {
        "fault": label or "none",
        "seed": seed,
        "struck": dict(run.strikes),
        "seconds": seconds,
        "events": len(site.events()),
        "scores": scores(folder),
        "broken": run.broken,
    }
    if not run.broken:
        site.remove()
    return row


def measure_evaluations(options: Options) -> tuple[Row, bool]:
    """A fault's counts are of runs: struck, of those with a law broken, and missed."""
    names = options.fault or list(FAULTS)
    seeds = range(options.first, options.first + options.seeds)
    dealt = [(faults, seed) for seed in seeds for faults in deal(names, seed, options.together)]
    with place() as where:
        rows = [disturbed(where, (), 0, {}, 0)]
        calm = rows[0]
        for faults, seed in dealt if not calm["broken"] else []:
            rows.append(disturbed(where, faults, seed, calm["scores"], calm["events"]))
            say(json.dumps({key: value for key, value in rows[-1].items() if key != "scores"}))
    counts = {name: Counter[str]() for name in names}
    for row in rows[1:]:
        for name in row["fault"].split("+"):
            struck = name in row["struck"]
            counts[name].update(struck=struck, broken=struck and bool(row["broken"]), missed=not struck)
    broken = [row for row in rows if row["broken"]]
    return {"runs": len(rows) - 1, "faults": counts, "broken": broken}, not broken


# --- a daemon ----------------------------------------------------------------------------------------------------------


class Storm:
    """A daemon's run under faults, and the checkpoints that it is to evaluate."""

    def __init__(self, run: Run, models: Sequence[Path], flight: int) -> None:
        self.run, self.site = run, run.site
        self.models, self.flight = models, flight
        self.folder = run.site.folder / "run"
        self.checkpoints: dict[Path, int] = {}  # that appeared -> number of its model

    def in_flight(self) -> int:
        return len(self.checkpoints) - len(list(self.site.work.glob("*/results.json")))

    def feed(self, dice: random.Random) -> None:
        """Save checkpoints in the watched folder, slowly perhaps, and announce them in other ways, too."""
        while self.run.wait(lambda: self.in_flight() < self.flight):
            number = len(self.checkpoints)
            checkpoint, model = self.folder / f"step-{number:03d}", number % len(self.models)
            self.checkpoints[checkpoint] = model
            shutil.copytree(self.models[model], checkpoint, ignore=shutil.ignore_patterns(WEIGHTS))
            weights = (self.models[model] / WEIGHTS).read_bytes()
            with (checkpoint / WEIGHTS).open("wb") as file:
                file.write(weights[: len(weights) // 2])
                file.flush()
                time.sleep(dice.uniform(0, 3))
                file.write(weights[len(weights) // 2 :])
            self.site.give(checkpoint)
            suite, times = self.site.suite, dice.choice(("1", "100"))
            submit = ["submit", str(checkpoint), "--suite", str(suite), "--priority", str(number % 3)]
            words = [self.site.cluster.python, "-c", NOTIFY, checkpoint, self.site.work, suite.stem, times]
            notify = self.site.cluster.user_argv(words, cwd=self.site.folder)
            if argv := dice.choice(([], self.site.command(*submit), notify, notify)):
                # a full disk may refuse a notice: the daemon lists the watched folder all the same
                with (self.site.folder / "notices.log").open("a") as log:
                    subprocess.run(argv, env=self.site.env, stdout=log, stderr=log, timeout=180, check=False)

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
        begun, waiting = time.monotonic(), list(plan)
        self.run.begin(self.run.administer)
        self.run.begin(self.feed, dice)
        while (now := time.monotonic() - begun) < seconds:
            if waiting and waiting[0][0] <= now:
                at, name = waiting.pop(0)
                self.run.begin(self.run.strike, FAULTS[name], f"{at:.0f} s")
            self.watch()
            time.sleep(0.1)
        self.run.over = True
        self.run.join(180)

    def calm(self, where: Place) -> None:
        """Mend everything, let the daemon finish, stop it by SIGTERM; another one, `--until-idle`, finds nothing to do."""
        for name in ("sbatch", "squeue"):
            self.site.unwrap(name)
        where.mend("allocated", "completing")

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

    def judge(self, wanted: Sequence[dict[str, Any]]) -> Iterator[str]:
        """Every checkpoint has one evaluation, with lm-eval's own scores of its model, and nothing is left."""
        evaluations: dict[Path, list[Path]] = defaultdict(list)
        for folder in self.site.evaluations():
            evaluations[_checkpoint(folder)].append(folder)
        for checkpoint, model in self.checkpoints.items():
            mine = evaluations.pop(checkpoint, [])
            if len(mine) != 1:
                yield f"{checkpoint.name} has {len(mine)} evaluations"
            for folder in mine:
                yield from (f"{checkpoint.name}: {x}" for x in laws_broken(self.site, folder, wanted[model]))
        yield from (f"an evaluation of {checkpoint}" for checkpoint in evaluations)
        yield from (f"pinned still: {pin.parent.name}" for pin in self.folder.glob(f"*/{PIN_PREFIX}*"))
        yield from (f"notice left: {f.name}" for f in self.site.work.glob("inbox/*.json"))
        yield from (f"left behind: {what}" for what in self.site.wait_clean(CLEAN_S))


def _checkpoint(evaluation: Path) -> Path:
    return Path(json.loads((evaluation / "evaluation.json").read_text())["checkpoint"]["source"])


def storm(where: Place, seed: int, *, minutes: float, flight: int, names: Sequence[str]) -> Row:
    """One storm and its verdict."""
    models = [toy_model(where.model.parent, number) for number in range(MODELS)]
    wanted = [expected(model, TASKS) for model in models]
    odd = {"partition": "spare", "on_small": True, "own_clock": True, "hung_seconds": HUNG_S}
    site = Site.make(where, f"storm-{seed}", daemon=True, **odd)
    with (site.folder / "evalspan.toml").open("a") as config:
        config.write(WATCH.format(run=site.folder / "run", suite=site.suite))
    site.cluster.run_as_user(["mkdir", "-p", str(site.folder / "run")], check=True)
    with under_faults(site, random.Random(f"victims/{seed}")) as run:
        blown = Storm(run, models, flight)
        blown.blow(schedule(seed, 60 * minutes, names), 60 * minutes, random.Random(f"storm/{seed}"))
        blown.calm(where)
        run.broken += blown.judge(wanted)
    struck = Counter(name for name, _ in run.strikes)
    return {
        "seed": seed,
        "minutes": minutes,
        "strikes": struck.total(),
        "struck": dict(sorted(struck.items())),
        "came_to_nothing": dict(run.missed),
        "checkpoints": len(blown.checkpoints),
        "when": [f"{name}, {what}" for name, what in run.strikes] if run.broken else [],
        "broken": run.broken,
    }


def measure_daemon(options: Options) -> tuple[Row, bool]:
    with place(SMALL_MB) as where:
        names = options.fault or list(FAULTS)
        report = storm(where, options.seed, minutes=options.minutes, flight=options.flight, names=names)
    return report, not report["broken"] and bool(report["checkpoints"] and report["strikes"])


FAULT = option("--fault", text="again for more; default: all", action="append", choices=list(FAULTS))
OF_EVALUATIONS = (
    FAULT,
    option("--seeds", 1, "so many moments of each fault (1)", metavar="N"),
    option("--first", 0, "the first seed (0)"),
    option("--together", 1, "faults in a run, dealt anew for each seed (1)", metavar="K"),
)
OF_DAEMON = (
    FAULT,
    option("--minutes", 10.0, "that faults strike (10)"),
    option("--seed", 0),
    option("--flight", 5, "checkpoints at once (5)"),
)
if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["daemon"]:
        sys.exit(command("chaos daemon", __doc__, measure_daemon, *OF_DAEMON, argv=given[1:], slurm=True))
    sys.exit(command("chaos", __doc__, measure_evaluations, *OF_EVALUATIONS, argv=given, slurm=True))
