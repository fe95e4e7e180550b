"""Evaluations in this process: a checkpoint's, or an ended one's answers scored again; and request sets built ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from coordinator.api.checking import checked_record, checkpoint_folder, prepare_options
from coordinator.api.submitting import POLL_SECONDS, run_in_thread, submit_rescoring, wait
from coordinator.base.words import typed_command
from coordinator.decide.evaluation.state import State
from coordinator.errors import EvalspanError, OperatorError
from coordinator.intake import from_settings, request_sets, resubmit, suites, work_folder
from coordinator.intake.suites import PathLike, SuiteSettings
from coordinator.intake.work_folder import refuse_guest
from coordinator.operations.keeping.archive import archive_all
from coordinator.results.report.signals import auto_cadences
from coordinator.runtime.finalize import Results, results_of
from coordinator.runtime.journal import Journal, OtherFormatError
from coordinator.runtime.known_evaluations import find_folder
from coordinator.runtime.observers import CallbackObserver, Messages, Progress, RunObserver
from coordinator.runtime.present_inputs import changed_since, record_as_of_now, without_reuse
from coordinator.runtime.replay import find_evaluation
from coordinator.runtime.work_lock import WorkLock, is_daemon
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths

if TYPE_CHECKING:
    from coordinator.decide.evaluation.records import EvaluationRecord
    from coordinator.runtime.loop import Coordinator


TRACKER_SECONDS = 60.0  # longest wait for tracker exports before `evaluate` returns
_ONE_RUN = threading.Lock()  # held by the `evaluate_async` that runs


def evaluate(
    checkpoint: PathLike,
    suite: PathLike | None = None,
    *,
    tasks: Sequence[str] | str = (),
    step: int | None = None,
    slots: int | None = None,
    shards_per_task: int | None = None,
    fresh: bool = False,
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
    progress: bool | Callable[[Progress], object] = False,
    observer: RunObserver | None = None,
    **more: Unpack[SuiteSettings],
) -> Results:
    """Evaluate a checkpoint here, wait for its scores, and return them.

    `checkpoint`: a Hugging Face folder, or a Hub id. `suite`: an included suite's name or a suite file; `tasks`: lm-eval
    tasks instead, a list or "a,b"; by default `[watch] suite`. `more` (`SuiteSettings`, such as `limit=100`) overrides the
    suite. `step`: training step, by default the number in the folder's name. `slots`: maximum number of concurrent trials.
    `fresh`: reuse nothing. `progress`: True prints progress to standard error; a function is called with a `Progress`.
    `observer`: replaces it, for a screen.

    Repeating the call resumes an interrupted evaluation, and returns the scores of an ended one. Failed tasks do not raise:
    see `status` and `failed`. Ctrl-C cancels the evaluation, then raises KeyboardInterrupt. Raises OperatorError for bad
    input or a work folder in use, EvalspanError if a service failed or Slurm does not answer.
    """
    from coordinator.runtime import wiring

    _check_counts(slots=slots, shards_per_task=shards_per_task)
    chosen = suites.suite_choice(suite, tasks, more)
    observer = observer or CallbackObserver(progress)
    known = work_folder.load_settings(
        config, work_dir, {**(settings or {}), **({"cluster.slots": slots} if slots else {})}
    )
    from_settings.check_device(known)
    coordinator = wiring.coordinator_of(known)
    site = coordinator.performer.site
    spec = suites.suite_of(chosen, known.watch.suite)  # refused before a model is fetched
    record = from_settings.evaluation_record(
        known,
        checkpoint_folder(checkpoint, known, observer),
        spec,
        from_settings.inputs_for(site, coordinator.performer.lm_eval_version),
        options=from_settings.run_options(known).model_copy(
            update={"shards_per_task": shards_per_task, "max_trials": slots}
        ),
        step=step,
        cadences=auto_cadences,
    )
    record = without_reuse(record, site) if fresh else record_as_of_now(record, site)

    def checked(new: EvaluationRecord) -> EvaluationRecord:
        return checked_record(
            new, known, coordinator, observer, prepare_options(chosen, known, config, work_dir)
        )

    return _evaluated(record, known, coordinator, observer, checked)


async def evaluate_async(checkpoint: PathLike, suite: PathLike | None = None, **arguments: Any) -> Results:
    """Do what `evaluate` does, with its arguments, in asyncio code.

    Calls of one process run one after the other, since one process holds a work folder. Cancelling the task cancels the
    evaluation; asyncio.CancelledError follows once its jobs have ended. `progress` is called in another thread.
    """
    stop = threading.Event()
    if "observer" not in arguments:
        arguments["observer"] = CallbackObserver(arguments.pop("progress", False), stop)

    def run() -> Results:
        while not _ONE_RUN.acquire(timeout=POLL_SECONDS):
            _raise_if_set(stop)
        try:
            _raise_if_set(stop)
            return evaluate(checkpoint, suite, **arguments)
        finally:
            _ONE_RUN.release()

    return await run_in_thread(run, stop)


def _raise_if_set(stop: threading.Event) -> None:
    if stop.is_set():
        raise EvalspanError("cancelled before it began")


def rescore(
    evaluation: str,
    suite: str | Path | None = None,
    *,
    tokenizer: PathLike | None = None,
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
    progress: bool | Callable[[Progress], object] = False,
    observer: RunObserver | None = None,
) -> Results:
    """Score the answers of an ended evaluation again, without a GPU, as a new evaluation, and return the scores.

    `suite`: with other filters, metrics or gold answers; by default the evaluation's own, from its current files.
    `tokenizer`: a folder with the checkpoint's config and tokenizer, if the checkpoint is gone. A running daemon does the
    work. Raises OperatorError, before anything is submitted, if the suite makes different requests or answers are missing.
    """
    from coordinator.runtime import rescoring, reuse, wiring

    observer = observer or CallbackObserver(progress)
    known = work_folder.load_settings(config, work_dir, settings)
    refuse_guest(known.work_dir)
    paths = find_folder(known, evaluation)
    if (parent := reuse.earlier_of(paths)) is None:
        raise OperatorError(f"{paths.root.name} has not ended, or {paths.results} cannot be read")
    coordinator = wiring.coordinator_of(known)
    site = coordinator.performer.site
    spec = None if suite is None else suites.load_suite(suite)
    inputs = from_settings.inputs_for(site, coordinator.performer.lm_eval_version)
    record = record_as_of_now(
        rescoring.rescoring_record(
            known, parent, spec, inputs, None if tokenizer is None else str(tokenizer)
        ),
        site,
    )

    def checked(new: EvaluationRecord) -> EvaluationRecord:
        words = ["--suite", str(suite or new.suite.name)]
        new = checked_record(new, known, coordinator, observer, words)
        made_of, folder = new.inputs, new.checkpoint.source
        sets = request_sets.prepare_request_sets(
            new.suite,
            folder,
            site=site,
            model=new.model,
            inputs=lambda *_: made_of,
            busy=observer.busy,
            offline=True,
        )
        rescoring.check_answers(new.suite, parent, sets)
        return new

    if not is_daemon(WorkLock(site.paths.lock).holder()):
        return _evaluated(record, known, coordinator, observer, checked)
    coordinator.evaluations.close()
    observer.say(f"the daemon of {known.work_dir} scores {record.evaluation_id}")
    sent = submit_rescoring(record, known, checked, typed_command("daemon", config, work_dir))
    return wait(sent, config=config, work_dir=work_dir, settings=settings)


def _evaluated(
    record: EvaluationRecord,
    known: Config,
    coordinator: Coordinator,
    observer: RunObserver,
    checked: Callable[[EvaluationRecord], EvaluationRecord],
) -> Results:
    """Begin or resume an evaluation, and wait for its scores. `checked`: a new one's record as the site has it run."""
    from coordinator.results.trackers.live import Exporter

    site = coordinator.performer.site
    paths = site.paths.evaluation(record.evaluation_id)
    resumed = said = ""
    if Journal.begun(paths.journal):
        earlier = _state_before(known, paths)
        resumed = "" if earlier is None else resubmit.resumed_message(earlier)
        if earlier is not None and not resumed and WorkLock(site.paths.lock).held():
            coordinator.evaluations.close()  # it has ended: its results need no lock
            return _noted(earlier, paths, known, note=resubmit.nothing_run(earlier))
    else:
        if said := "" if record.rescores else changed_since(record, site):
            observer.say(said)
        record = checked(record)
    before = _written_at(paths.results)
    with (
        closing(coordinator.evaluations),
        observer.run(coordinator) as watch,
        coordinator.in_charge("evalspan eval"),
    ):
        if resumed:  # only certain now that we hold the work folder
            observer.say(resumed)
        state = coordinator.run_one(record, watch)
    archive_all(site.paths.root, [record.evaluation_id])
    Exporter(known).finish(TRACKER_SECONDS)
    ran = before is None or _written_at(paths.results) != before
    note = "" if ran else resubmit.nothing_run(state)
    return _noted(state, paths, known, note=note, changed=said)


def _state_before(settings: Config, paths: EvaluationPaths) -> State | None:
    """Return an evaluation that was begun before; None if its journal cannot be read. Raise OtherFormatError."""
    try:
        return find_evaluation(settings, paths.root.name)[0]
    except OtherFormatError:
        raise
    except OperatorError:  # the run reports it
        return None


def _noted(state: State, paths: EvaluationPaths, settings: Config, **texts: str) -> Results:
    more = {**texts, "gpu_hour_price": settings.gpu_hour_price}
    return results_of(state, paths).model_copy(update=more)


def prepare(
    tokenizer: PathLike,
    suite: PathLike | None = None,
    *,
    tasks: Sequence[str] | str = (),
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
    messages: Messages | None = None,
    **more: Unpack[SuiteSettings],
) -> dict[str, dict[str, str]]:
    """Build a suite's request sets here, with data sets from the internet: task of the suite -> {leaf task: folder}.

    `tokenizer`: a folder with config.json and the tokenizer, or a Hub id. Other arguments as in `evaluate`. Raises
    OperatorError with the last line of a failed build.
    """
    chosen = suites.suite_choice(suite, tasks, more)
    known = work_folder.load_settings(config, work_dir, settings)
    site = from_settings.site_of(known)
    spec = from_settings.chosen_suite(known, suites.suite_of(chosen, known.watch.suite))
    messages = messages or CallbackObserver(progress=False)
    return request_sets.prepare_request_sets(
        spec,
        checkpoint_folder(tokenizer, known, messages, weights=False),
        busy=messages.busy,
        site=site,
        model=from_settings.model_options(known),
        inputs=from_settings.inputs_for(site, from_settings.lm_eval_version(known, site)),
    )


def _check_counts(**counts: object) -> None:
    """Refuse an argument that is not an integer of at least 1."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise OperatorError(f"{name} must be an integer of at least 1, not {count!r}")


def _written_at(file: Path) -> int | None:
    """Return the mtime in ns; None if the file is missing."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None
