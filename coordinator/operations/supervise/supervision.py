"""Starts a training, follows it, and restarts it if that can help. Called by `evalspan supervise`.

Rule: one supervision per folder of checkpoints. The training's command gets the checkpoint to resume from as an environment
variable; nothing that it wrote is changed or removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from glob import has_magic
from itertools import takewhile
from pathlib import Path

from coordinator.base import clock
from coordinator.base.signals import SIGNAL_EXIT_BASE, Signals
from coordinator.errors import EvalspanError, OperatorError
from coordinator.intake.checkpoint import step_of
from coordinator.operations.monitor import notify
from coordinator.operations.node_check.checker import check_nodes
from coordinator.operations.supervise.attempts import Attempt, BatchJob, Child, sbatch_words, without_nodes
from coordinator.operations.supervise.checkpoints import newest_complete
from coordinator.operations.supervise.decisions import End, Losses, decide_restart, is_unknown, restart_pause
from coordinator.runtime import wiring
from coordinator.runtime.causes import accept_rules
from coordinator.site.cluster import ClusterError
from coordinator.site.cluster.allocation import Allocation
from coordinator.site.cluster.job_environment import client_environment
from coordinator.site.cluster.slurm_cli import SlurmCli
from coordinator.site.config.schema import Config
from coordinator.site.diagnosis.diagnose import Diagnosis
from evaljobs.contract.paths import WorkPaths, slug
from evaljobs.contract.storage import hold_lock, make_folder, try_lock

LOOK_SECONDS = 0.2
CHECK_SECONDS = 300.0  # for the job of a node's test to start and end
MOST_BEATS = 1 << 20  # bytes of heartbeats that one look reads
NEWS_SECONDS = 5.0  # most that the end waits for news to be sent
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PASSED_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)


class _Stopped(Exception):  # noqa: N818 (no error)
    """A signal has ended the supervision."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


@dataclass(slots=True)
class _Watch:
    """Kills an attempt that hangs. `cause`: why; `silent`: seconds without a sign of life."""

    attempt: Attempt
    hang_seconds: float
    cause: Diagnosis | None = None
    silent: float = 0.0
    _since: float = 0.0
    _pulse: object = None

    def look(self, beats: int, now: float) -> None:
        """`beats`: a number that grows with each heartbeat."""
        if (found := (self.attempt.pulse(), beats)) != self._pulse:
            self._pulse, self._since = found, now
        elif self.cause is None and 0 < self.hang_seconds <= now - self._since:
            why = self.attempt.cause(hung=True)
            self.attempt.end()
            self.cause, self.silent = why, now - self._since


@dataclass(slots=True, kw_only=True)
class Supervision:
    """`argv`: the training's command; `place`: its folder of checkpoints, or a glob; `most`: restarts; `hang_seconds`: 0 for
    never; `first_pause`: seconds before the first restart; `say`: takes a line for people.
    """

    config: Config
    argv: Sequence[str]
    place: str
    most: int
    hang_seconds: float
    first_pause: float
    say: Callable[[str], None]
    _excluded: list[str] = field(default_factory=list)  # nodes that a check found bad
    _newest: Path | None = None  # complete checkpoint that the attempt goes on from
    _highest: int = -1  # step of the newest complete checkpoint of all attempts
    _news: notify.Notifier = field(default_factory=notify.Notifier)
    _signals: Signals = field(default_factory=lambda: Signals(PASSED_SIGNALS))
    _seen: int = 0  # signals that were dealt with
    _stopping: int = 0  # the first signal that told the training to end
    _offset: int = 0  # bytes of heartbeats that were read
    _losses: Losses = field(default_factory=Losses)

    def run(self) -> int:
        """Run until the training has ended or is not restarted, and return its exit code. Raise OperatorError."""
        self._news = notify.notifier_of(self.config.notify)
        if self._batch:
            sbatch_words(self.argv, "", ())  # refuses
        if shutil.which(self.argv[0]) is None:
            raise OperatorError(f"{self.argv[0]}: command not found")
        accept_rules(WorkPaths(self.config.work_dir))
        with self._alone(), self._signals:
            try:
                return self._attempts()
            except _Stopped as stopped:
                return stopped.code
            finally:
                self._news.finish(NEWS_SECONDS)

    def _attempts(self) -> int:
        idle, unknown_before = 0, False
        for number in range(1, self.most + 2):
            attempt = self._start(number)
            end = self._follow(attempt)
            decision = decide_restart(end, self.most + 1 - number, unknown_before)
            if decision.check and attempt.nodes:
                self._check(attempt.nodes)
            again = f"restart {number} of {self.most}" if decision.restart else "not restarted"
            self._tell(f"{again}: {decision.why}" if end.failed else decision.why)
            if not decision.restart:
                return int(end.failed)
            idle, unknown_before = 0 if end.progress else idle + 1, is_unknown(end)
            self._wait(restart_pause(self.first_pause, idle))
        raise AssertionError("the last attempt is not restarted")

    # --- one attempt -----------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> Attempt:
        """Start it, or follow the job of an earlier supervision. Raise OperatorError."""
        self._newest, damaged = self._look()
        self._highest = max(self._highest, self._step)
        for line in damaged:
            self.say(f"incomplete, and not used: {line}")
        self._beats.unlink(missing_ok=True)
        self._offset = 0
        ours = {
            "EVALSPAN_RESUME_FROM": str(self._newest or ""),
            "EVALSPAN_HEARTBEATS": str(self._beats),
            # a line that waits in a buffer is no sign of life, and lost where the program is killed
            "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
        }
        origin = f"from {self._newest}" if self._newest else "from the beginning"
        without = f", without {','.join(self._excluded)}" if self._excluded else ""
        if not self._batch:
            self.say(f"attempt {number} {origin}{without}")
            return Child(without_nodes(self.argv, self._excluded), os.environ | ours)
        token = f"evalspan-supervise-{hashlib.sha256(str(self._training).encode()).hexdigest()[:12]}"
        env = client_environment(os.environ, ours)
        slurm = SlurmCli(replace(wiring.slurm_options(self.config), token=token))
        while True:
            try:
                if (running := BatchJob.running(slurm)) is not None:
                    self.say(f"follows job {running.job_id}, which was submitted before")
                    return running
                job = BatchJob.submitted(slurm, self.argv, env, self._excluded)
            except ClusterError as error:
                self._again("Slurm does not answer", error)
            else:
                self.say(f"attempt {number} {origin}{without}: job {job.job_id}")
                return job

    def _look(self) -> tuple[Path | None, list[str]]:
        """Return `newest_complete`, waiting while storage is unavailable."""
        while True:
            try:
                return newest_complete(self.place)
            except OSError as error:
                self._again(f"{self.place} cannot be read", error)

    def _again(self, what: str, error: Exception) -> None:
        self.say(f"{what}, retrying: {error}")
        self._wait(max(1.0, self.first_pause))

    def _follow(self, attempt: Attempt) -> End:
        """Follow an attempt until it has ended. Raise _Stopped if a signal ends it, or only the supervision."""
        watch, trouble = _Watch(attempt, self.hang_seconds), False
        while True:
            try:
                if (code := attempt.code()) is not None:
                    break
                self._pass_on(attempt)
                watch.look(self._beat(), clock.now())
                trouble = False
            except ClusterError as error:
                if not trouble:
                    self.say(f"no news of the training, retrying: {error}")
                trouble = True
            time.sleep(LOOK_SECONDS)
        if self._stopping:
            self.say(f"the training was ended by a signal, with exit code {code}, and is not restarted")
            raise _Stopped(SIGNAL_EXIT_BASE + self._stopping)
        cause = watch.cause or attempt.cause(hung=False)
        self._newest, hung = self._look()[0], watch.cause is not None
        progress = self._step > self._highest
        return End(code=code, cause=cause, progress=progress, hung=hung, silent=watch.silent)

    def _pass_on(self, attempt: Attempt) -> None:
        for number in self._new_signals():
            if (
                number in STOP_SIGNALS and self._stopping
            ):  # asked twice: its processes are killed within seconds
                attempt.end()
                continue
            self._stopping = self._stopping or (number if number in STOP_SIGNALS else 0)
            if not attempt.tell(number):
                self.say("ended; the training keeps running, and the same command follows it again")
                raise _Stopped(SIGNAL_EXIT_BASE + number)

    def _beat(self) -> int:
        """Return the bytes of heartbeats so far, after checking the losses of new ones."""
        with suppress(OSError), self._beats.open("rb") as file:
            file.seek(self._offset)
            text = file.read(MOST_BEATS)
            whole = text[: text.rfind(b"\n") + 1] or (text if len(text) == MOST_BEATS else b"")
            self._offset += len(whole)
            for line in whole.splitlines():
                self._learn(line)
        return self._offset

    def _learn(self, line: bytes) -> None:
        """Check the loss of a heartbeat. Other lines are ignored."""
        with suppress(ValueError, LookupError, TypeError, RecursionError, OverflowError):
            beat = json.loads(line)
            if beat["loss"] is not None and (unusual := self._losses.add(float(beat["loss"]))):
                self._tell(f"loss spike at step {beat['step']}: {unusual}; nothing was rolled back")

    # --- between two -----------------------------------------------------------------------------------------------------

    def _check(self, nodes: str) -> None:
        """Test these nodes, and exclude bad ones from now on. Nodes that cannot be tested are used again."""
        noting = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            inside = None if self._batch else Allocation(os.environ)
            made = check_nodes(self.config, [nodes], wait_seconds=CHECK_SECONDS, seed=0, cluster=inside)
        except EvalspanError as error:
            self.say(f"{nodes} could not be checked, and may be used again: {error}")
            return
        except KeyboardInterrupt:
            raise _Stopped(SIGNAL_EXIT_BASE + signal.SIGINT) from None
        finally:
            signal.signal(signal.SIGINT, noting)
        self._excluded += [node for node in made.exclude if node not in self._excluded]
        found = "; ".join(f"{n.node} is {n.verdict}{f': {n.why}' if n.why else ''}" for n in made.nodes)
        self.say(f"nodes: {found}")

    def _tell(self, line: str) -> None:
        """Report a line here and through `[notify]`."""
        self.say(line)
        step = self._step if self._newest else None
        made = notify.training_news(line, str(self._newest or self.place), step, time.time())
        self._news.tell(lambda: [made])

    def _wait(self, seconds: float) -> None:
        end = clock.now() + seconds
        while clock.now() < end:
            if stops := [number for number in self._new_signals() if number in STOP_SIGNALS]:
                raise _Stopped(SIGNAL_EXIT_BASE + stops[0])
            time.sleep(min(LOOK_SECONDS, seconds))

    def _new_signals(self) -> list[int]:
        new = self._signals.received[self._seen :]
        self._seen += len(new)
        return new

    @property
    def _batch(self) -> bool:
        return Path(self.argv[0]).name == "sbatch"

    @property
    def _step(self) -> int:
        return (step_of(self._newest.name) or 0) if self._newest else -1

    # --- its folder ------------------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        return WorkPaths(self.config.work_dir).supervised / slug(str(self._training))

    @property
    def _training(self) -> Path:
        """Return the real folder of its checkpoints, however spelt; for a glob, the folder before its first pattern."""
        parts = takewhile(lambda part: not has_magic(part), Path(self.place).parts)
        return Path(*parts).resolve()

    @property
    def _beats(self) -> Path:
        # File WORK_DIR/supervised/NAME/heartbeats.jsonl: steps and losses of a training | the hook | with the next attempt
        return self._folder / "heartbeats.jsonl"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise OperatorError if another supervision has this folder, whatever its work folder."""
        make_folder(self._folder)
        # File PARENT/.NAME.supervised: locked (flock) by the one supervision of the checkpoints in PARENT/NAME | `supervise` | stays
        training = self._training
        place = training.with_name(f".{training.name}.supervised")
        if not os.access(
            training.parent, os.W_OK
        ):  # not there yet, or not ours: this work folder's are known
            place = self._folder / "supervise.lock"
        with ExitStack() as stack:
            taken = stack.enter_context(hold_lock(place, wait=0.0))
            with suppress(OSError):  # another name of the same folder, as by a bind mount
                folder = os.open(training, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, folder)
                taken = taken and try_lock(folder, wait=0.0)
            if not taken:
                raise OperatorError(
                    f"{self.place} is supervised already: end that `evalspan supervise` first"
                )
            yield
