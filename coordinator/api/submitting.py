"""Submissions to a daemon, the wait for their scores, and commands for an evaluation."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from coordinator.api.checking import check_suite, checkpoint_folder, prepare_options
from coordinator.api.reading import results_now
from coordinator.base.words import typed_command
from coordinator.decide.evaluation.state import State
from coordinator.errors import EvalspanError, OperatorError
from coordinator.intake import from_settings, inbox, places, resubmit, suites, work_folder
from coordinator.intake.suites import PathLike, SuiteSettings
from coordinator.intake.work_folder import refuse_guest
from coordinator.results.report.signals import auto_cadences
from coordinator.runtime import control
from coordinator.runtime.finalize import Results
from coordinator.runtime.journal import Journal
from coordinator.runtime.observers import CallbackObserver, Messages
from coordinator.runtime.present_inputs import changed_since, record_as_of_now
from coordinator.runtime.replay import find_evaluation
from coordinator.runtime.submission import (
    Submission,
    find_submission,
    has_ended,
    send_submission,
    why_waiting,
)
from coordinator.site.config import toml
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import WorkPaths, expand_home

if TYPE_CHECKING:
    from coordinator.decide.evaluation.records import EvaluationRecord


# settings, or sections of them, that do not affect a daemon's evaluations
OF_CALL = frozenset({"work_dir", "watch", "trackers", "gpu_hour_price"})
log = logging.getLogger(__name__)
POLL_SECONDS = 1.0  # between two polls of `wait`


def submit(
    checkpoint: PathLike,
    suite: PathLike | None = None,
    *,
    tasks: Sequence[str] | str = (),
    priority: int = 0,
    step: int | None = None,
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
    messages: Messages | None = None,
    **more: Unpack[SuiteSettings],
) -> Submission:
    """Hand a checkpoint to the daemon of the work folder and return at once; `wait` waits for its scores.

    Arguments as in `evaluate`, except `settings` that affect the evaluation, which are the daemon's. `priority`: higher goes
    first. Submitting twice creates one evaluation: the second submission may raise the priority, and it resumes a cancelled
    evaluation. Raises OperatorError for bad input.
    """
    chosen = suites.suite_choice(suite, tasks, more)
    _check_own(settings or {})
    known = work_folder.load_settings(config, work_dir, settings)
    own = chosen.keys() - {"suite"}  # otherwise its name or file denotes the suite
    if own:  # a member of a group names one of the daemon's suites
        refuse_guest(known.work_dir, " to list your suite in [watch] suites")
    from_settings.check_device(known)
    site = from_settings.site_of(known)
    inputs = from_settings.inputs_for(site, from_settings.lm_eval_version(known, site))
    spec = suites.suite_of(chosen, known.watch.suite)
    messages = messages or CallbackObserver(progress=False)
    folder = checkpoint_folder(checkpoint, known, messages)
    record = record_as_of_now(
        from_settings.evaluation_record(
            known, folder, spec, inputs, priority=priority, step=step, cadences=auto_cadences
        ),
        site,
    )
    before: State | None = None
    if Journal.begun(site.paths.evaluation(record.evaluation_id).journal):
        before, paths, _ = find_evaluation(known, record.evaluation_id)
        places.record_place(paths, before.record.checkpoint.announced, record.checkpoint.announced)
    else:
        fetch = prepare_options(chosen, known, config, work_dir)
        check_suite(record.suite, known, messages, fetch, record.checkpoint.source, convert=record.convert)
    answer = resubmit.resubmission_of(before, priority)
    if before is None:
        answer = replace(answer, said=changed_since(record, site))
    notice = inbox.Notice(
        checkpoint=record.checkpoint.source,
        step=record.checkpoint.step,
        suite=spec.name if own else _named(chosen, known),
        spec=spec if own else None,
        priority=priority,
        noticed_at=time.time(),
        evaluation_id=record.evaluation_id,
    )
    daemon = typed_command("daemon", config, work_dir)
    return send_submission(site.paths, notice, answer, daemon)


def submit_rescoring(
    record: EvaluationRecord,
    known: Config,
    checked: Callable[[EvaluationRecord], EvaluationRecord],
    daemon: str,
) -> Submission:
    """Have the running daemon score answers again. `checked`: as for a new evaluation; `daemon`: the command of one."""
    paths = WorkPaths(known.work_dir)
    before: State | None = None
    if Journal.begun(paths.evaluation(record.evaluation_id).journal):
        before, _, _ = find_evaluation(known, record.evaluation_id)
    else:
        record = checked(record)
    notice = inbox.Notice(command="rescore", evaluation_id=record.evaluation_id, record=record)
    return send_submission(paths, notice, resubmit.resubmission_of(before, 0), daemon)


def _check_own(settings: Mapping[str, object]) -> None:
    """Refuse settings of a submission that the daemon would not see: a notice only names a checkpoint and a suite."""
    lost = [key for key, value in settings.items() if value is not None and key.split(".")[0] not in OF_CALL]
    if lost:
        raise OperatorError(
            f"a submission cannot change {', '.join(lost)}, since the daemon has its own settings: put it into the daemon's "
            "evalspan.toml and restart the daemon, or call `evaluate`"
        )


def _named(chosen: Mapping[str, Any], settings: Config) -> str:
    """Return the suite for a notice: a name, or the full path of its file."""
    named = str(chosen.get("suite", settings.watch.suite))
    return str(expand_home(named).resolve()) if toml.is_file_name(named) else named


def wait(
    evaluation: str | Submission,
    *,
    timeout: float | None = None,
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
) -> Results:
    """Wait until an evaluation has ended, and return its results.

    `evaluation`: the return value of `submit`, or an id. `timeout`: seconds until TimeoutError. Raises OperatorError if the
    submission was refused, became another evaluation, was given up, or does not exist. Without a daemon, it logs a warning
    and waits for one.
    """
    known, daemon = _present(config, work_dir, settings)
    return _waited(known, evaluation, threading.Event(), timeout, daemon)


async def wait_async(
    evaluation: str | Submission,
    *,
    timeout: float | None = None,  # noqa: ASYNC109 (as of `wait`)
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
) -> Results:
    """Do what `wait` does, in asyncio code. A cancelled task ends the wait, not the evaluation."""
    stop = threading.Event()
    known, daemon = _present(config, work_dir, settings)
    return await run_in_thread(lambda: _waited(known, evaluation, stop, timeout, daemon), stop)


def _waited(
    known: Config, evaluation: str | Submission, stop: threading.Event, timeout: float | None, daemon: str
) -> Results:
    submission = evaluation if isinstance(evaluation, Submission) else find_submission(known, str(evaluation))
    name = submission.evaluation_id
    deadline = None if timeout is None else time.monotonic() + timeout
    said = ""
    while not has_ended(known, submission):
        why = why_waiting(known, submission, daemon)
        left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"{name} has not ended after {timeout:g} s: {why or '`evalspan status` says why'}"
            )
        if why != said and (said := why):
            log.warning("%s waits: %s", name, why)
        if stop.wait(min(POLL_SECONDS, left)):
            raise EvalspanError(f"the wait for {name} is cancelled")
    return results_now(known, name)


async def run_in_thread(run: Callable[[], Results], stop: threading.Event) -> Results:
    """Await `run` in a thread of its own. A cancelled task sets `stop`, and goes on once `run` is over."""
    running = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([running])
        running.exception()  # otherwise asyncio reports that it was never retrieved
        raise


def pause(
    evaluation: str,
    *,
    reason: str = "on request",
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
) -> str:
    """Free an evaluation's nodes until `resume`; its answers are kept. Return what happens, in words.

    `evaluation`: its id, the id's beginning, or its digest. A daemon obeys within seconds. Raises OperatorError if the
    evaluation has ended or does not exist.
    """
    return _command(evaluation, config, work_dir, settings, command="pause", reason=reason)


def resume(
    evaluation: str,
    *,
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
) -> str:
    """Let a paused evaluation use nodes again. Without a daemon, the next one resumes it."""
    return _command(evaluation, config, work_dir, settings, command="resume")


def prioritize(
    evaluation: str,
    priority: int,
    *,
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
) -> str:
    """Change an evaluation's priority: the next free nodes go to the highest."""
    return _command(evaluation, config, work_dir, settings, command="priority", priority=priority)


def _command(
    evaluation: str,
    config: PathLike | None,
    work_dir: PathLike | None,
    settings: Mapping[str, object] | None,
    **notice: Any,
) -> str:
    known, daemon = _present(config, work_dir, settings)
    return control.send_command(known, evaluation, inbox.Notice(**notice), daemon)


def _present(
    config: PathLike | None, work_dir: PathLike | None, settings: Mapping[str, object] | None
) -> tuple[Config, str]:
    """Return the settings of a work folder, which is not created, and the command that starts its daemon."""
    known = work_folder.load_settings(config, work_dir, settings, makes=False)
    return known, typed_command("daemon", config, work_dir)
