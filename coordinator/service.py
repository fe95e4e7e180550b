"""What makes the loop a daemon: checkpoints come in by notices, people by commands, and nobody watches.

Rule: a notice is acknowledged only once its evaluation is journalled or refused for good, so a killed daemon hears it
again; a checkpoint that is seen while it is being written is looked at again until it is whole and has stopped changing.
It does not know: how evaluations run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from coordinator import clock, intake, setup, triggers
from coordinator.backlog import Seen, stale
from coordinator.cluster import ClusterError
from coordinator.config import Config
from coordinator.daemon import Coordinator
from coordinator.errors import EvalspanError, OperatorError
from coordinator.hook import PIN_PREFIX
from coordinator.records import EvaluationRecord
from coordinator.site_rules import Hosting
from coordinator.state import State
from evaljobs.contract import Record
from evaljobs.files import write_atomic
from evaljobs.paths import WorkPaths

log = logging.getLogger(__name__)

# A checkpoint that nobody announced, or that was caught half-written, is taken for written when it is whole and its
# files have not changed for so long.
STABLE_SECONDS = 2.0
WAIT_SECONDS = 3600.0  # a checkpoint that has not become whole by then is refused
LOOK_SECONDS = 1.0


class Command(Record):
    """What a person asks of a running daemon, left in its spool folder."""

    command: Literal["cancel", "retry", "release"]
    evaluation_id: str = ""
    nodes: tuple[str, ...] = ()
    seconds: float = 0.0  # that nodes given back are not taken again; 0: take them again
    reason: str = "asked"


def leave_command(paths: WorkPaths, command: Command) -> None:
    """Ask the daemon of this work folder."""
    folder = paths.spool / "commands"
    write_atomic(folder / f"{time.time_ns()}.json", command.model_dump_json().encode())


def obey_commands(coordinator: Coordinator) -> None:
    """Do what `evalspan cancel | retry | release` left in the spool folder for whoever is in charge."""
    folder = coordinator.performer.site.paths.spool / "commands"
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            command = Command.model_validate_json(path.read_bytes())
            _obey(coordinator, command)
        except OSError as error:
            log.warning("the command in %s cannot be obeyed yet: %s", path, error)
            continue
        except (ValidationError, KeyError, ValueError) as error:
            log.warning("the command in %s is passed over: %s", path, error)
        with contextlib.suppress(OSError):
            path.unlink()


def _obey(coordinator: Coordinator, command: Command) -> None:
    if command.command == "cancel":
        coordinator.cancel(command.evaluation_id, command.reason)
    elif command.command == "retry":
        coordinator.revive(command.evaluation_id)
        coordinator.retry(command.evaluation_id)
    else:
        coordinator.release(command.nodes, clock.now() + command.seconds)


@dataclass(slots=True)
class _Gate:
    """A checkpoint that is announced and not yet whole."""

    notice: triggers.Notice
    since: float
    # of each delivery that told of it
    acknowledge: dict[str, Callable[[], None]] = field(default_factory=dict)
    signature: str = ""
    stable_since: float = 0.0
    told: str = ""
    announced: bool = False  # by whoever saved it, and not merely seen in a watched folder

    def add(self, delivery: triggers.Delivery) -> None:
        self.announced |= delivery.announced
        self.acknowledge[delivery.key] = delivery.acknowledge
        if delivery.notice.priority > self.notice.priority:
            self.notice = delivery.notice

    def done(self) -> None:
        """Every delivery of it is dealt with; one that cannot be told so now comes again, to no effect."""
        for acknowledge in self.acknowledge.values():
            with contextlib.suppress(OSError):
                acknowledge()


class Service:
    """The daemon's ears. `tick` is called between two ticks of the coordinator."""

    def __init__(self, coordinator: Coordinator, config: Config) -> None:
        self.coordinator = coordinator
        self.config = config
        self.paths = coordinator.performer.site.paths
        self._gates: dict[tuple[str, str], _Gate] = {}
        self._looked_at = 0.0
        watched = [(str(f), config.watch.suite or "default") for f in config.watch.folders]
        self._watch = triggers.FolderWatch(
            self.paths.root / "watched.json", watched, any_format=config.checkpoint.convert is not None
        )
        # pins of an earlier daemon: the first look takes away those that nothing needs any more
        taken = list(_records(self.paths))
        self._pinned: set[str] = {str(pin) for pin in map(_pin, taken) if pin.exists()}
        self._series = {record.evaluation_id: _seen(record, "over") for record in taken}
        self._hosting: Hosting | None = None

    @property
    def waiting(self) -> bool:
        """Is a checkpoint announced and not dealt with yet?"""
        return bool(self._gates)

    def tick(self) -> None:
        now = clock.now()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        for delivery in self._deliveries():
            key = (delivery.notice.checkpoint, delivery.notice.suite)
            self._gates.setdefault(key, _Gate(delivery.notice, since=now)).add(delivery)
        for key, gate in list(self._gates.items()):
            if self._pass(gate, now):
                del self._gates[key]
        obey_commands(self.coordinator)
        self._drop_stale()
        self._pins()

    def _deliveries(self) -> Iterator[triggers.Delivery]:
        yield from triggers.from_spool(self.paths)
        yield from triggers.from_stream(self.paths)
        yield from self._watch.look()

    # --- the gate ----------------------------------------------------------------------------------------------------

    def _pass(self, gate: _Gate, now: float) -> bool:
        """True once the notice is dealt with: accepted, or refused for good."""
        notice = gate.notice
        suite = self.config.watch.suite if notice.suite == "default" else notice.suite
        try:
            if suite is None:
                raise OperatorError("no suite was named and [watch] suite is not set")
            record = intake.make_record(
                notice.checkpoint,
                suite,
                model=setup.model_options(self.config),
                options=setup.run_options(self.config),
                judge=partial(setup.judge_options, self.config),
                priority=notice.priority,
                step=notice.step
                if notice.step is not None
                else triggers.step_of(Path(notice.checkpoint).name),
                allow_bin=self.config.checkpoint.allow_bin,
                convert=self.config.checkpoint.convert,
            )
        except (EvalspanError, OSError, ValueError) as error:
            if now - gate.since < WAIT_SECONDS and _may_be_there(notice.checkpoint):
                gate.signature = ""
                if gate.told != str(error):
                    gate.told = str(error)
                    log.info("%s is not taken yet: %s", notice.checkpoint, error)
                return False  # not whole yet
            log.warning("%s is not evaluated: %s", notice.checkpoint, error)
            gate.done()
            return True
        if gate.announced and not gate.told:
            return self._accept(record, gate)  # said to be saved, and whole at the first look
        if record.checkpoint.digest != gate.signature:
            gate.signature, gate.stable_since = record.checkpoint.digest, now
            return False
        if now - gate.stable_since < STABLE_SECONDS:
            return False
        return self._accept(record, gate)

    def _accept(self, record: EvaluationRecord, gate: _Gate) -> bool:
        try:
            if self._hosting is None:  # the site's rules are asked for once
                self._hosting = setup.hosting(self.config, self.coordinator.cluster)
            self.coordinator.accept(setup.at_site(record, self._hosting, self.config))
        except (OSError, ClusterError) as error:
            log.warning("%s cannot be accepted yet: %s", record.evaluation_id, error)
            return False
        gate.done()
        return True

    # --- housekeeping -----------------------------------------------------------------------------------

    def _drop_stale(self) -> None:
        policy = self.config.backlog
        if policy == "all":
            return
        self._series |= {
            i: _seen(r.state.record, _phase(r.state)) for i, r in self.coordinator.running.items()
        }
        keep_every = None if policy == "latest" else policy.keep_every
        for evaluation_id, why in stale(self._series.values(), keep_every).items():
            with contextlib.suppress(OSError):  # a full disk: dropped at a later look
                self.coordinator.cancel(evaluation_id, why)

    def _pins(self) -> None:
        """A marker in each checkpoint that is still needed; the trainer's hook honours it (`hook.pinned`)."""
        wanted = {
            str(_pin(r.state.record)) for r in self.coordinator.running.values() if r.state.ended_at is None
        }
        for pin in wanted - self._pinned:
            with contextlib.suppress(OSError):  # a read-only checkpoint cannot be pinned
                Path(pin).touch()
        for pin in self._pinned - wanted:
            with contextlib.suppress(OSError):
                Path(pin).unlink()
        self._pinned = wanted


def _may_be_there(place: str) -> bool:
    """False where it is known that there is no such place; storage that errs, or that is not for us, says nothing."""
    try:
        Path(place).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def _records(paths: WorkPaths) -> Iterator[EvaluationRecord]:
    """Of every evaluation that this work folder has ever taken, as far as this version can read them."""
    for file in paths.root.glob("*/evaluation.json"):
        with contextlib.suppress(OSError, ValidationError):
            yield EvaluationRecord.model_validate_json(file.read_bytes())


def _pin(record: EvaluationRecord) -> Path:
    return Path(record.checkpoint.announced) / f"{PIN_PREFIX}{record.evaluation_id}"


def _phase(state: State) -> Literal["waiting", "started", "over"]:
    if state.ended_at is not None or state.cancelled:
        return "over"
    return (
        "started" if any(n.lanes for n in state.nodes.values()) else "waiting"
    )  # staged ahead is not started


def _seen(record: EvaluationRecord, phase: Literal["waiting", "started", "over"]) -> Seen:
    step = record.checkpoint.step
    return Seen(
        evaluation_id=record.evaluation_id,
        series=json.dumps([str(Path(record.checkpoint.announced).parent), record.suite.name]),
        order=float(step) if step is not None else record.accepted_at,
        phase=phase,
    )
