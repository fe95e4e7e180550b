"""scripts/bench_held: slot-seconds of evaluations by cause, beside the fewest possible. A slot is a GPU, or a share of the CPU.

A daemon evaluates checkpoints one after another, as a backlog, on one suite. Each slot's seconds, from the first trial's
submission to the last trial's exit, have one cause:

queue            before a slot's first trial starts
start            of the interpreter, until the trial begins
import           torch, transformers and lm-eval's class
load             the weights, and the engine's start (a CUDA context), which lm-eval's classes begin in the same call
warm_up          the first forward pass
wait             for requests or a shard
inference, dump  answering shards; writing responses
exit             from a trial's outcome until the cluster saw its end
between          from a trial's exit until the same slot's next trial starts
idle_tail        from a slot's last exit until the last trial's exit

The fewest possible are the tokens that were computed at the model's rate: the best of these runs, and of a first evaluation
of few documents on as many slots as there are cores; on a CPU with fewer cores than slots, each slot has a share. That
evaluation also leaves the predictions and the list of libraries that precursors read ahead. `of_suite`: the same costs at a
suite whose inference takes --suite-seconds, since only inference grows with the suite. On a busy machine these seconds say
little; `import_cpu_seconds` are those of one trial's imports on a core of its own.

--image FILE, as root: environment and weights on a disk of their own (made once, in FILE) that reads --mb-per-second; each
run begins with an empty page cache of that disk. `cold`: as a site runs it; `unlearnt`: without the list, so that trials
read all themselves. Needs a control group of version 1 with `blkio`. The interpreter's own library stays warm.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import gpu
from bench.harness import Options, RunError, command, option, row, say, targets
from coordinator.intake.inbox import Notice, leave_notice
from coordinator.site.cluster.local import gpu_names
from evaljobs.contract.paths import WorkPaths

KINDS = (
    "quickstart_mmlu",
    "quickstart_hellaswag",
)  # likelihoods: a model with random weights may never end a text
RECORDED = {"import": "imports", "load": "load", "warm_up": "warm", "wait": "wait", "inference": "infer"}
RECORDED |= {"dump": "dump", "start": "other"}  # cause -> field of the report's GPUs
AGAIN = ("queue", "start", "import", "exit", "between")  # what a trial that takes a next evaluation pays once
FIXED = (*AGAIN, "load", "warm_up", "wait", "idle_tail")
TARGETS = {"warm": 1.10, "cold": 1.25}  # of held over fewest, at a suite of 5 minutes on 8 slots
IMPORTS = "import torch; from evaljobs.trial import trial; from evaljobs.trial.engines import loading; "
IMPORTS += "loading.import_engine('hf')"
GROUP = Path("/sys/fs/cgroup/blkio/evalspan-bench-held")
IMAGE_ROOM = 1.2  # sparse: times the bytes that it shall hold


# --- a disk that is slow and cold ------------------------------------------------------------------------------------


class SlowDisk:
    """Environment and weights on a loop device of their own, whose reads are limited for processes of a control group."""

    def __init__(self, given: Options, place: Path, model: Path) -> None:
        if os.geteuid() or not GROUP.parent.is_dir():
            raise RunError(
                "--image needs root and a control group of version 1 with blkio (/sys/fs/cgroup/blkio)"
            )
        self.image, self.place, self.bytes_per_second = given.image, place, int(given.mb_per_second * 1e6)
        self.environment, self.model = place / "environment", place / "model"
        place.mkdir()
        if not self.image.exists():
            say(f"writing {self.image}")
            self._make(model)

    def _make(self, model: Path) -> None:
        new = self.image.with_suffix(".new")
        size = sum(int(_said("du", "-sB1", source).split()[0]) for source in (sys.prefix, model))
        with new.open("wb") as file:
            file.truncate(int(size * IMAGE_ROOM) + (256 << 20))
        _said("mkfs.ext4", "-q", "-m", "0", new)
        with self._mounted(new):
            shutil.copytree(model, self.model)
            _said("cp", "-a", sys.prefix, self.environment)
        new.rename(self.image)

    @contextlib.contextmanager
    def _mounted(self, image: Path) -> Iterator[str]:
        device = _said("losetup", "--find", "--show", image).strip()
        try:
            _said("mount", "-o", "noatime", device, self.place)
            try:
                yield device
            finally:
                _said("umount", "--lazy", self.place)  # processes of a run that was ended may still read
        finally:
            _said("losetup", "--detach", device)

    @contextlib.contextmanager
    def cold(self, *, slow: bool) -> Iterator[Path]:
        """Mount it with nothing in the page cache; yield the file by which a process joins those for which it is slow."""
        with self._mounted(self.image) as device:
            GROUP.mkdir(exist_ok=True)
            number = Path(device).stat().st_rdev
            limit = f"{os.major(number)}:{os.minor(number)} {self.bytes_per_second if slow else 0}"
            try:
                (GROUP / "blkio.throttle.read_bps_device").write_text(limit)
                yield GROUP / "cgroup.procs"
            finally:
                with contextlib.suppress(OSError):  # as above
                    GROUP.rmdir()


def _said(*words: object) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{words[0]}: {done.stderr.strip()}")
    return done.stdout


# --- evaluations -----------------------------------------------------------------------------------------------------


def evaluate(given: Options, name: str, disk: SlowDisk | None, *lends: str) -> list[Path]:
    """The folders of a daemon's evaluations in a new work folder, which begins with the parts `lends` of the first one."""
    folder = Path(given.folder) / name
    model = disk.model if disk else Path(given.model)
    tasks = Options(folder=given.folder, limit=given.documents)
    file = gpu.suite(tasks, name, KINDS, batch_size=8)
    work, config = WorkPaths(folder / "work"), folder / "evalspan.toml"
    for part in lends:
        shutil.copytree(Path(given.folder) / "first" / "work" / part, work.root / part)
    work.inbox.mkdir(parents=True, mode=0o700, exist_ok=True)
    work.root.chmod(0o700)
    lines = [
        f"[cluster]\nslots = {given.slots}",
        f'[stage]\nroots = ["{given.memory}"]',
        "[trial]\nmemory_mb = 4000",
    ]
    lines += ['device = "cpu"\nthreads = 1'] if given.device == "cpu" else []
    lines += [f'python = "{disk.environment}/bin/python"'] if disk else []
    config.write_text("\n".join(lines) + "\n")
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(disk.cold(slow=name != "first")) if disk else "/dev/null"
        for number in range(given.checkpoints):
            about = {"step": number, "suite": str(file), "noticed_at": time.time() + number}
            leave_notice(work, Notice(checkpoint=str(_another(model, folder / f"step-{number}")), **about))
        joined = [
            "bash",
            "-c",
            f'echo $$ > {group}; exec "$@"',
            "bash",
            Path(sys.executable).with_name("evalspan"),
        ]
        words = ["daemon", "--until-idle", "--work-dir", work.root, "--config", config]
        with (folder / "daemon.log").open("w") as log:
            argv = [*map(str, [*joined, *words])]
            status = subprocess.run(argv, stdout=log, stderr=log, check=False, cwd=folder).returncode
    found = sorted(place.parent for place in work.root.glob("*/report.json"))
    if status or len(found) != given.checkpoints:
        raise RunError(f"{name}: {(folder / 'daemon.log').read_text()[-2000:]}")
    return found


def _another(model: Path, place: Path) -> Path:
    """A checkpoint of its own: links to a model's files, and a config with its own time, so that nothing is reused."""
    place.mkdir()
    for file in model.iterdir():
        if file.name == "config.json":
            shutil.copyfile(file, place / file.name)
        else:
            (place / file.name).symlink_to(file)
    return place


# --- seconds ---------------------------------------------------------------------------------------------------------


def measured(folders: Sequence[Path], slots: int) -> dict[str, Any]:
    """Slot-seconds by cause of a daemon's evaluations, and the tokens that they computed."""
    reports = [json.loads((folder / "report.json").read_text()) for folder in folders]
    if bad := [report for report in reports if report["status"] != "done"]:
        raise RunError(f"an evaluation is {bad[0]['status']}: {bad[0]['warnings']}")
    submitted, exits = times_of_trials(folders)
    trials = [trial for report in reports for trial in report["gpus"]]
    starts = sorted(trial["started_at"] for trial in trials)
    ends = sorted(exits[trial["trial"]] for trial in trials)
    begin, end = min(submitted), ends[-1]
    seconds = {cause: sum(trial[field] for trial in trials) for cause, field in RECORDED.items()}
    seconds["exit"] = sum(exits[trial["trial"]] - trial["started_at"] - trial["held"] for trial in trials)
    seconds["queue"] = sum(at - begin for at in starts[:slots])
    seconds["idle_tail"] = sum(end - at for at in ends[-slots:])
    total = slots * (end - begin)
    seconds["between"] = total - sum(seconds.values())
    ahead = ("environment_bytes", "environment_seconds")
    read = {key: sum(report[key] for report in reports) for key in ahead}
    known = {"trials": len(trials), "tokens": sum(map(tokens_of, reports))}
    return {"seconds": seconds, "total": total, **known, **read}


def times_of_trials(folders: Sequence[Path]) -> tuple[list[float], dict[str, float]]:
    """When jobs of trials were submitted, and when the cluster saw each trial's end, by the journals. Unix seconds."""
    submitted, exits = list[float](), dict[str, float]()
    lines = (line for folder in folders for line in (folder / "journal.jsonl").read_text().splitlines())
    for event in map(json.loads, lines):
        if "-trial-" not in str(event.get("job", "")):
            continue
        if event["kind"] == "job-submitted":
            submitted.append(event["at"])
        elif event["kind"] == "job-ended":
            exits[f"{event['job']}.{event['index']}"] = event["at"]
    return submitted, exits


def of_suite(found: dict[str, Any], slots: int, suite_seconds: float, checkpoints: int) -> dict[str, float]:
    """The costs of one evaluation whose inference takes so long: over the fewest, and what a trial that goes on would save."""
    fixed, again = (
        sum(found["seconds"][cause] for cause in causes) / checkpoints for causes in (FIXED, AGAIN)
    )
    whole = slots * suite_seconds
    return {"over_fewest": 1 + fixed / whole, "saved_by_warm_trials": again / (whole + fixed)}


def tokens_of(report: dict[str, Any]) -> int:
    """Tokens that an evaluation's trials computed and generated."""
    return int(report["tokens"]["computed"] + (report["tokens"]["generated"] or 0))


def rate_of(folder: Path) -> float:
    """Tokens a second of one slot."""
    report = json.loads((folder / "report.json").read_text())
    return tokens_of(report) / float(report["tokens"]["infer_seconds"])


def import_cpu_seconds() -> float:
    """CPU seconds of a process that imports what a trial imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _said(sys.executable, "-c", IMPORTS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    os.environ |= gpu.OFFLINE | {"OMP_NUM_THREADS": "1"}
    gpus, cores = len(gpu_names()), len(os.sched_getaffinity(0))
    slots, own = options.slots, min(options.slots, gpus or cores)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-held-", dir=options.scratch) as scratch,
        tempfile.TemporaryDirectory(prefix="bench-held-", dir="/dev/shm") as memory,
    ):
        model = options.model.resolve() if options.model else Path(scratch) / "model"
        about = {
            "folder": scratch,
            "memory": memory,
            "model": str(model),
            "device": "cuda" if gpus else "cpu",
        }
        given = vars(options) | about
        if not options.model:
            gpu.make_model(Options(model=str(model), small=True))
        disk = SlowDisk(options, Path(scratch) / "disk", model) if options.image else None
        few = {"slots": own, "documents": options.first_documents, "checkpoints": 1}
        [first] = evaluate(Options(**given | few), "first", disk)
        rate = rate_of(first) * (1 if gpus else own / slots)
        found = {"slots": slots, "cores": cores, "import_cpu_seconds": import_cpu_seconds()}
        for name in options.runs if disk else ["warm"]:
            lends = ("priors",) if name == "unlearnt" else ("priors", "cache/environments")
            folders = evaluate(Options(**given), name, disk if name != "warm" else None, *lends)
            ran = measured(folders, slots)
            rate = max(rate, ran["tokens"] / ran["seconds"]["inference"])
            projected = of_suite(ran, slots, options.suite_seconds, options.checkpoints)
            found[name] = ran | {"of_suite": projected, "load_average": os.getloadavg()[0]}
            say(f"{name}: {json.dumps(found[name])}")
            if name in TARGETS:
                rows.append(row(f"{name}: held / fewest", projected["over_fewest"], TARGETS[name]))
        for ran in (found[name] for name in options.runs if name in found):
            ran["fewest"] = ran["tokens"] / rate
            ran["over_fewest"] = ran["total"] / ran["fewest"]
        found["tokens_per_slot_second"] = rate
    return targets(rows, **found)


OPTIONS = (
    option("--slots", 8),
    option("--checkpoints", 1, "that wait as a backlog"),
    option("--documents", 120, "of each of two tasks; 120 are shipped"),
    option("--first-documents", 8, "of each task in the evaluation that measures the rate"),
    option("--suite-seconds", 300.0, "of inference, that `of_suite` is stated for"),
    option("--model", text="a checkpoint's folder (default: one with random weights is made)", type=Path),
    option("--image", text="file of the slow disk, which is made if it is missing", type=Path),
    option("--mb-per-second", 20.0, "that the slow disk reads"),
    option("--runs", ["warm", "cold"], nargs="+", choices=("warm", "cold", "unlearnt"), type=str),
    option("--scratch", text="a folder on disk (default: the temporary folder)", type=Path),
)
if __name__ == "__main__":
    sys.exit(command("bench_held", __doc__, measure, *OPTIONS))
