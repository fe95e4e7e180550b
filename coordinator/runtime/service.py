"""What makes the loop a daemon: checkpoints come in by notices, people by commands, and nobody watches.

Rule: a notice is acknowledged only once its evaluation is journalled or refused for good, so a killed daemon hears it
again; a checkpoint that is seen while it is being written is looked at again until it is whole and has stopped changing.
What an announced checkpoint raises is its own refusal; what storage or the site raises is waited for. A notice that names
what the settings do not allow is refused at once (`admission`).
It does not know: how evaluations run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from coordinator.allocation.backlog import Seen, stale
from coordinator.base import clock
from coordinator.base.isolate import Contained
from coordinator.cluster import ClusterError
from coordinator.cluster.slurm_rules import Hosting
from coordinator.config.schema import Config
from coordinator.errors import EvalspanError
from coordinator.evaluation.records import EvaluationRecord, Inputs
from coordinator.evaluation.state import State
from coordinator.hook import PIN_PREFIX
from coordinator.intake import admission, pending, sources, validate
from coordinator.intake.admission import NotAdmittedError
from coordinator.intake.pending import Gate, may_pass
from coordinator.runtime import wiring
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.operator_commands import obey_commands
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import ModelOptions, SuiteSpec

log = logging.getLogger(__name__)

# A checkpoint that nobody announced, or that was caught half-written, is taken for written when it is whole and its
# files have not changed for so long.
STABLE_SECONDS = 2.0
# A checkpoint that has not become whole by then is refused; one that waits for storage or the site is not, but holds up
# no `--until-idle` any longer.
WAIT_SECONDS = 3600.0
LOOK_SECONDS = 1.0


class Service:
    """The daemon's ears. `tick` is called between two ticks of the coordinator."""

    def __init__(self, coordinator: Coordinator, config: Config) -> None:
        self.coordinator = coordinator
        self.config = config
        self.paths = coordinator.performer.site.paths
        self._gates: dict[tuple[str, str], Gate] = {}
        self._book = pending.Book(self.paths.gate)
        self._looked_at = 0.0
        self._suite_files = admission.suite_files(config.watch)
        watched = [(str(f), config.watch.suite or "default") for f in config.watch.folders]
        self._watch = sources.FolderWatch(
            self.paths.watched, watched, any_format=config.checkpoint.convert is not None
        )
        # pins of an earlier daemon: the first look takes away those that nothing needs any more
        taken = list(_records(self.paths))
        self._pinned: set[str] = {str(pin) for pin in map(_pin, taken) if _is_there(pin)}
        self._series = {record.evaluation_id: _seen(record, "over") for record in taken}
        self._hosting: Hosting | None = None
        self._made_of: dict[str, Inputs] = {}
        self._contained = Contained(log)

    @property
    def waiting(self) -> bool:
        """Is a checkpoint announced and not dealt with yet? One that waits for long keeps nobody up for its sake."""
        return any(clock.now() - each.since < WAIT_SECONDS for each in self._gates.values())

    def tick(self) -> None:
        now = clock.now()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        self._made_of.clear()
        self._contained("what is announced", self._hear, now)
        for key, each in list(self._gates.items()):
            if self._dealt_with(each, now):
                del self._gates[key]
        self._contained("commands", obey_commands, self.coordinator)
        self._contained("stale checkpoints", self._drop_stale)
        self._contained("pins", self._pins)
        self._contained(str(self.paths.gate), self._book.write, self._gates.values(), now)

    def _hear(self, now: float) -> None:
        for delivery in self._deliveries():
            each = Gate(delivery.notice, since=now)
            if delivery.wrong:
                each.add(delivery)
                self._refuse(each, delivery.wrong, now)
                continue
            key = (delivery.notice.checkpoint, delivery.notice.suite)
            self._gates.setdefault(key, each).add(delivery)

    def _deliveries(self) -> Iterator[sources.Delivery]:
        yield from sources.from_submissions(self.paths)
        yield from sources.from_spool(self.paths)
        yield from sources.from_stream(self.paths)
        yield from self._watch.look()

    # --- the gate ----------------------------------------------------------------------------------------------------

    def _dealt_with(self, each: Gate, now: float) -> bool:
        """True once the notice is dealt with: accepted, or refused for good. Whatever one checkpoint raises is its own."""
        try:
            return not self._lacks_lm_eval(each) and self._pass(each, now)
        except Exception as error:
            log.exception("%s", each.notice.checkpoint)
            return self._refuse(each, f"a fault of ours, in the daemon's log: {error!r}", now)

    def _lacks_lm_eval(self, each: Gate) -> bool:
        """Without it nothing could be begun: the checkpoint waits."""
        try:
            self.coordinator.performer.lm_eval_version()
        except EvalspanError as error:
            each.wait(str(error))
            return True
        return False

    def _pass(self, each: Gate, now: float) -> bool:
        try:
            record = self._record(each)
        except (EvalspanError, OSError, ValueError) as error:
            each.signature = ""
            why = " ".join(str(error).split())
            young = now - each.since < WAIT_SECONDS  # not whole yet, perhaps, or somebody mends the suite
            passing = may_pass(error) or (young and _may_be_there(each.notice.checkpoint))
            if passing and not isinstance(error, NotAdmittedError):
                each.wait(why)
                return False
            return self._refuse(each, why, now)
        if each.announced and not each.why:
            return self._accept(record, each)  # said to be saved, and whole at the first look
        if record.checkpoint.digest != each.signature:
            each.signature, each.stable_since = record.checkpoint.digest, now
            return False
        if now - each.stable_since < STABLE_SECONDS:
            return False
        return self._accept(record, each)

    def _record(self, each: Gate) -> EvaluationRecord:
        notice, watch = each.notice, self.config.watch
        suite = notice.suite
        if not each.own or suite == "default":
            suite = admission.admitted_suite(suite, watch, self._suite_files)
        if not each.own:
            admission.check_place(notice.checkpoint, watch)
        return validate.make_record(
            notice.checkpoint,
            suite,
            model=wiring.model_options(self.config),
            options=wiring.run_options(self.config),
            inputs=self._inputs,
            judge=partial(wiring.judge_options, self.config),
            priority=notice.priority,
            step=notice.step,
            allow_bin=self.config.checkpoint.allow_bin,
            convert=self.config.checkpoint.convert,
        )

    def _inputs(self, suite: SuiteSpec, model: ModelOptions) -> Inputs:
        """What a suite is made of, looked at once a tick."""
        key = suite.model_dump_json()
        if key not in self._made_of:
            performer = self.coordinator.performer
            look = wiring.inputs_for(performer.site, performer.lm_eval_version)
            self._made_of[key] = look(suite, model)
        return self._made_of[key]

    def _accept(self, record: EvaluationRecord, each: Gate) -> bool:
        """Nothing is wrong with the checkpoint: what keeps it back now is the site, and is waited for."""
        try:
            if self._hosting is None:  # the site's rules are asked for once
                self._hosting = wiring.hosting(self.config, self.coordinator.cluster)
            self.coordinator.accept_or_wait(wiring.at_site(record, self._hosting, self.config))
            running = self.coordinator.running.get(record.evaluation_id)
            if (
                running is not None and record.priority > running.state.record.priority
            ):  # a notice that comes again lowers none
                self.coordinator.prioritize(record.evaluation_id, record.priority)
        except (OSError, ClusterError, EvalspanError) as error:
            each.wait(str(error))
            return False
        self._book.forgive(each.notice)
        each.done()
        return True

    def _refuse(self, each: Gate, why: str, now: float) -> bool:
        log.warning("%s is not evaluated: %s", each.notice.checkpoint, why)
        self._book.refuse(each.notice, why, now)
        each.done()
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
        there = {record.evaluation_id for record in self.coordinator.records()}
        for evaluation_id in self._series.keys() - there:  # ended, given up, or removed
            self._series[evaluation_id] = replace(self._series[evaluation_id], phase="over")
        for evaluation_id, why in stale(self._series.values(), keep_every).items():
            # a full disk, or a journal that it refused before: dropped at a later look
            with contextlib.suppress(OSError, KeyError):
                self.coordinator.cancel(evaluation_id, why)

    def _pins(self) -> None:
        """A marker in each checkpoint that is still needed; the trainer's hook honours it (`hook.pinned`)."""
        wanted = {str(_pin(record)) for record in self.coordinator.records()}
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


def _is_there(place: Path) -> bool:
    """Not where we may not look, either, which `Path.exists` raises for."""
    return os.path.exists(place)  # noqa: PTH110


def _records(paths: WorkPaths) -> Iterator[EvaluationRecord]:
    """Of every evaluation that this work folder has ever taken, as far as this version can read them."""
    for file in paths.root.glob("*/evaluation.json"):
        with contextlib.suppress(OSError, ValidationError):
            yield EvaluationRecord.model_validate_json(file.read_bytes())


def _pin(record: EvaluationRecord) -> Path:
    return Path(record.checkpoint.announced) / f"{PIN_PREFIX}{record.evaluation_id}"


def _phase(state: State) -> Literal["waiting", "started", "over"]:
    if state.ended_at is not None or state.ending.cancelled:
        return "over"
    # staged ahead is not started; what a person took up again is not dropped once more
    started = state.ending.retried or any(n.lanes for n in state.nodes.by_name.values())
    return "started" if started else "waiting"


def _seen(record: EvaluationRecord, phase: Literal["waiting", "started", "over"]) -> Seen:
    step = record.checkpoint.step
    return Seen(
        evaluation_id=record.evaluation_id,
        series=json.dumps([str(Path(record.checkpoint.announced).parent), record.suite.name]),
        order=(record.accepted_at if step is None else float(step), record.accepted_at),
        phase=phase,
    )
