"""What can go wrong, each as one function that breaks a thing and, where it is mended, mends it again.

Rule: a fault strikes once its moment has come (so many events in the journal) and what it needs is there; one that
never finds it is "missed", which is no pass. Numbers are those of the issue that asked for them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos_lib.site import Site


@dataclass(slots=True, kw_only=True)
class Run:
    """An evaluation under way: its process is replaced where a fault ends it."""

    site: Site
    process: subprocess.Popen[str]
    dice: random.Random
    patience: float = math.inf  # seconds that it may take
    struck: dict[str, str] = field(default_factory=dict)  # fault -> what was hit
    over: bool = False
    replacing: threading.Lock = field(
        default_factory=threading.Lock
    )  # held from its kill until its successor's start

    def victim(self, verb: str) -> int | None:
        """Host pid of one of the site's jobs of this verb, once there is one; None where the evaluation is over."""
        found: list[int] = []

        def there() -> bool:
            found[:] = self.site.processes_of(verb)
            return bool(found)

        return self.dice.choice(found) if self.wait(there) else None

    def wait(self, law: Callable[[], bool]) -> bool:
        """False where the evaluation is over before `law` holds."""
        while not law():
            if self.over:
                return False
            time.sleep(0.05)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`strike` returns what was hit, or None where it was too late. `span`: moments, as shares of an undisturbed run's events.

    `breaks`: parts of the site that no other fault may break at the same time.
    """

    number: int
    name: str
    strike: Callable[[Run], str | None]
    span: tuple[float, float] = (0.0, 0.9)
    breaks: tuple[str, ...] = ()
    partition: str = "gpu"
    on_small: bool = False
    own_clock: bool = False


def _kill_eval(run: Run) -> str | None:
    with run.replacing:
        if run.over:
            return None
        old = run.process
        old.send_signal(signal.SIGKILL)
        old.wait()
        run.process = run.site.start()
        return f"pid {old.pid}"


def _wipe_redis(run: Run) -> str | None:
    server = run.site.work / "redis" / "server.json"
    if not run.wait(server.exists):
        return None
    pid = json.loads(server.read_text())["pid"]
    if not pid:
        return None
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it was down already
        return None
    for pattern in ("redis/**/*.aof*", "redis/**/*.rdb"):
        for path in run.site.work.glob(pattern):
            path.unlink(missing_ok=True)
    return f"pid {pid}"


def _controller_down(run: Run) -> str | None:
    run.site.cluster.kill_controller()
    time.sleep(30)
    run.site.cluster.start_controller()
    return "30 s"


def _controller_frozen(run: Run) -> str | None:
    run.site.cluster.freeze_controller()
    time.sleep(20)
    run.site.cluster.thaw_controller()
    return "20 s"


def _node_of(run: Run, verb: str) -> str | None:
    """A node that runs a job of this verb."""
    pid = run.victim(verb)
    if pid is None:
        return None
    return next((n for n in run.site.cluster.gpu_nodes if pid in run.site.cluster.node_pids(n)), None)


def _node_killed(verb: str) -> Callable[[Run], str | None]:
    def strike(run: Run) -> str | None:
        node = _node_of(run, verb)
        if node is not None:
            run.site.cluster.kill_node(node)
        return node

    return strike


def _slurmd_killed(run: Run) -> str | None:
    node = _node_of(run, "trial")
    if node is not None:
        run.site.cluster.kill_slurmd(node)
        time.sleep(5)
        run.site.cluster.start_node(node)
    return node


def _signal_of(verb: str, number: signal.Signals) -> Callable[[Run], str | None]:
    def strike(run: Run) -> str | None:
        pid = run.victim(verb)
        if pid is None:
            return None
        time.sleep(run.dice.uniform(0, 6))  # in its imports, its load or its work
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return f"pid {pid}"
        return None

    return strike


def _out_of_memory(run: Run) -> str | None:
    """From now on the kernel gives a trial no more memory: in its imports, its load or its work an allocation fails."""
    pid = run.victim("trial")
    if pid is None:
        return None
    time.sleep(run.dice.uniform(0, 6))
    with contextlib.suppress(OSError):
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        # by the user: this takes no privilege of a process of one's own, but root in a container may lack it
        done = run.site.cluster.run_as_user(["prlimit", f"--pid={pid}", f"--as={size}"])
        return f"pid {pid} at {size >> 20} MB" if done.returncode == 0 else None
    return None


def _hung(run: Run) -> str | None:
    """Stop a trial: at any moment, or when it has just begun to infer, so that most likely it holds a shard."""
    if run.dice.random() < 0.5:
        return _signal_of("trial", signal.SIGSTOP)(run)
    pid: int | None = None

    def there() -> bool:
        nonlocal pid
        files = [f.stem for f in run.site.work.glob("*/responses/*.frames")]
        run.dice.shuffle(files)
        pid = next((p for name in files if (p := run.site.process_of_trial(name)) is not None), None)
        return pid is not None

    if not run.wait(there) or pid is None:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        return f"pid {pid}"
    return None


_TEST_ONLY = 'case "$*" in *--test-only*) exec "$REAL" "$@";; esac\n'
_TIMES_OUT = (
    _TEST_ONLY + 'if mkdir "$ONCE/1" 2>/dev/null; then "$REAL" "$@" >/dev/null 2>&1; exec sleep 600; fi\n'
    'exec "$REAL" "$@"'
)
_FAILS_3 = (
    _TEST_ONLY + 'for i in 1 2 3; do if mkdir "$ONCE/$i" 2>/dev/null; then\n'
    'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1; fi; done\n'
    'exec "$REAL" "$@"'
)


def _wrapped_sbatch(script: str, marks: int) -> Callable[[Run], str | None]:
    def strike(run: Run) -> str | None:
        run.site.wrap("sbatch", script)
        folder = run.site.folder / "marks-sbatch"
        hit = run.wait(lambda: len(list(folder.iterdir())) >= marks)
        made = len(list(folder.iterdir()))
        run.site.unwrap("sbatch")
        return f"{made} submissions" if hit or made else None

    return strike


def _wrapped_squeue(script: str) -> Callable[[Run], str | None]:
    def strike(run: Run) -> str | None:
        run.site.wrap("squeue", f'touch "$ONCE/$$"\n{script}')
        time.sleep(run.dice.uniform(5, 40))
        run.site.unwrap("squeue")
        asked = len(list((run.site.folder / "marks-squeue").iterdir()))
        return f"{asked} listings" if asked else None

    return strike


def _preempted(run: Run) -> str | None:
    node = _node_of(run, "trial")
    if node is None:
        return None
    run.site.user(
        ["sbatch", "--partition=gpu", f"--nodelist={node}", "--gres=gpu:2", "--mem=100", "--job-name=intruder", "--output=/dev/null", "--wrap=sleep 5"]
    )  # fmt: skip
    return node


def _two_at_once(run: Run) -> str | None:
    done = subprocess.run(
        run.site.coordinate(), env=run.site.env, capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stderr.strip().splitlines()
    if done.returncode == 0 and not run.site.daemon:
        return None  # the first was over by then
    if done.returncode != 2 or len(lines) != 1:
        raise AssertionError(f"the second ended with {done.returncode}: {done.stderr[-500:]}")
    return lines[0][:80]


def _disk_full(run: Run) -> str | None:
    filler = run.site.small / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    time.sleep(run.dice.uniform(5, 20))
    size = filler.stat().st_size
    filler.unlink()
    return f"{size >> 20} MB"


def _corrupted(run: Run) -> str | None:
    """Flip a byte in the answers of the record that an evaluation counted last: its task is hardly scored yet."""
    counted: list[tuple[Path, int, int]] = []

    def there() -> bool:
        counted.clear()
        for folder in run.site.evaluations(open_only=True):
            mine = [
                f for e in run.site.events(folder) if e["kind"] == "shards-dumped" for _, f in e["shards"]
            ]
            counted.extend((folder / "responses" / f["file"], f["offset"], f["length"]) for f in mine[-1:])
        return bool(counted)

    if not run.wait(there):
        return None
    file, offset, length = run.dice.choice(counted)
    flip(file, offset + length * 3 // 4)
    return f"{file.name} at {offset}"


def flip(file: Path, at: int) -> None:
    """Change one byte of a file in place."""
    with file.open("r+b", buffering=0) as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 0xFF]))


def _torn(run: Run) -> str | None:
    """A trial dies in mid-write: half of its last record stays."""
    found: tuple[Path, int] | None = None

    def there() -> bool:
        nonlocal found
        files = list({file: None for file, _, _ in run.site.frames()})
        run.dice.shuffle(files)
        living = ((f, pid) for f in files if (pid := run.site.process_of_trial(f.stem)) is not None)
        found = next(living, None)
        return found is not None

    if not run.wait(there) or found is None:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(found[1], signal.SIGKILL)
    rows = [row for row in run.site.frames() if row[0] == found[0]]
    if not rows:  # it was over by then
        return None
    file, offset, length = rows[-1]
    with file.open("rb") as source:
        source.seek(offset)
        half = source.read(length // 2)
    with file.open("ab") as target:
        target.write(half)
    return f"{file.name} + {len(half)} bytes"


def _clock_jumps(seconds: int, *, killed: bool = False) -> Callable[[Run], str | None]:
    """Set the clock and leave it so; `killed`: the coordinator dies too, and its successor starts with the new time."""

    def strike(run: Run) -> str | None:
        run.site.set_clock(seconds)
        said = f"{seconds:+d} s"
        return f"{said}, {_kill_eval(run)}" if killed else said

    return strike


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(number=1, name="coordinator-killed", breaks=("coordinator",), strike=_kill_eval),
        Fault(
            number=2, name="redis-killed-and-wiped", breaks=("redis",), strike=_wipe_redis, span=(0.1, 0.8)
        ),
        Fault(number=3, name="slurmctld-down", breaks=("controller",), strike=_controller_down),
        Fault(number=3, name="slurmctld-frozen", breaks=("controller",), strike=_controller_frozen),
        Fault(
            number=4,
            name="node-killed-in-trial",
            breaks=("node",),
            strike=_node_killed("trial"),
            span=(0.0, 0.7),
        ),
        Fault(
            number=4,
            name="node-killed-in-precursor",
            breaks=("node",),
            strike=_node_killed("stage"),
            span=(0.0, 0.3),
        ),
        Fault(number=4, name="slurmd-killed", breaks=("node",), strike=_slurmd_killed, span=(0.0, 0.7)),
        Fault(number=5, name="trial-killed", strike=_signal_of("trial", signal.SIGKILL), span=(0.0, 0.6)),
        Fault(number=5, name="trial-out-of-memory", strike=_out_of_memory, span=(0.0, 0.6)),
        Fault(number=5, name="trial-hung", strike=_hung, span=(0.0, 0.6)),
        Fault(number=6, name="worker-killed", strike=_signal_of("worker", signal.SIGKILL), span=(0.2, 0.8)),
        Fault(
            number=7,
            name="sbatch-times-out",
            breaks=("sbatch",),
            strike=_wrapped_sbatch(_TIMES_OUT, 1),
            span=(0.0, 0.4),
        ),
        Fault(
            number=7,
            name="sbatch-fails-3-times",
            breaks=("sbatch",),
            strike=_wrapped_sbatch(_FAILS_3, 3),
            span=(0.0, 0.3),
        ),
        Fault(
            number=8,
            name="squeue-garbage",
            breaks=("squeue",),
            strike=_wrapped_squeue("exec head -c 4096 /dev/urandom"),
        ),
        Fault(number=8, name="squeue-nothing", breaks=("squeue",), strike=_wrapped_squeue("exit 0")),
        Fault(
            number=8,
            name="squeue-unknown-state",
            breaks=("squeue",),
            strike=_wrapped_squeue('"$REAL" "$@" | sed \'s/RUNNING/HYPERDRIVE/g; s/COMPLETED/LIMBO/g\''),
        ),
        Fault(number=9, name="preempted", strike=_preempted, span=(0.0, 0.6), partition="spare"),
        Fault(number=11, name="two-at-once", breaks=("coordinator",), strike=_two_at_once, span=(0.0, 0.6)),
        Fault(number=12, name="disk-full", breaks=("disk",), strike=_disk_full, on_small=True),
        Fault(number=13, name="record-corrupted", strike=_corrupted, span=(0.2, 0.8)),
        Fault(number=13, name="record-torn", strike=_torn, span=(0.0, 0.7)),
        Fault(number=14, name="clock-forwards", breaks=("clock",), strike=_clock_jumps(3600), own_clock=True),
        Fault(
            number=14, name="clock-backwards", breaks=("clock",), strike=_clock_jumps(-3600), own_clock=True
        ),
        Fault(
            number=14,
            name="clock-backwards-and-killed",
            breaks=("clock", "coordinator"),
            strike=_clock_jumps(-3600, killed=True),
            own_clock=True,
        ),
    )
}


def deal(names: Sequence[str], seed: int, together: int) -> list[tuple[str, ...]]:
    """Each of these faults once, in runs of `together` at most; none of a run break the same part. Drawn from the seed."""
    dice = random.Random(f"deal/{seed}")
    runs: list[list[str]] = []
    for name in dice.sample(list(names), len(names)) if together > 1 else names:
        parts = {*FAULTS[name].breaks}
        fitting = (r for r in runs if len(r) < together and not any(parts & {*FAULTS[n].breaks} for n in r))
        run = next(fitting, None)
        if run is None:
            runs.append([name])
        else:
            run.append(name)
    return [tuple(sorted(run)) for run in runs]
