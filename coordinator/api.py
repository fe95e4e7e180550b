"""evalspan from Python: evaluate, submit, wait, results, series. The command line uses the same functions.

Rule: a call prints nothing unless asked to, changes no signal handler beyond its duration, and works in any thread. Bad input
is an OperatorError in one line, raised before anything is submitted; every error of evalspan is an EvalspanError. Times are
in seconds, `at` in unix seconds. `import evalspan` exports these names.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from coordinator.base.words import options_of, typed_command
from coordinator.decide.evaluation.state import State
from coordinator.errors import EvalspanError, OperatorError
from coordinator.intake import from_settings, hub, inbox, places, request_sets, resubmit, suites, work_folder
from coordinator.intake.suites import PathLike, SuiteSettings
from coordinator.intake.work_folder import refuse_guest
from coordinator.operations.keeping.archive import archive_all
from coordinator.results.report import load_series
from coordinator.results.report.learning_curves import make_series
from coordinator.runtime import control
from coordinator.runtime.finalize import Results, results_in_files, results_of, rows_of
from coordinator.runtime.journal import Journal, OtherFormatError
from coordinator.runtime.known_evaluations import find_folder
from coordinator.runtime.observers import CallbackObserver, Messages, Progress, RunObserver
from coordinator.runtime.present_inputs import changed_since, record_as_of_now, without_reuse
from coordinator.runtime.replay import find_evaluation
from coordinator.runtime.submission import (
    Submission,
    find_submission,
    has_ended,
    send_submission,
    why_waiting,
)
from coordinator.runtime.summary import read_ended_summary
from coordinator.runtime.work_lock import WorkLock, is_daemon
from coordinator.site.config import toml
from coordinator.site.config.schema import Config
from evaljobs.contract.engine_traits import ENDPOINT
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import SuiteSpec

if TYPE_CHECKING:
    from coordinator.decide.evaluation.records import EvaluationRecord
    from coordinator.runtime.loop import Coordinator

__all__ = [
    "EvalspanError",
    "OperatorError",
    "Progress",
    "Results",
    "RunObserver",
    "Submission",
    "dataframe",
    "evaluate",
    "evaluate_async",
    "pause",
    "prepare",
    "prioritize",
    "rescore",
    "results",
    "resume",
    "series",
    "submit",
    "wait",
    "wait_async",
]

TRACKER_SECONDS = 60.0  # longest wait for tracker exports before `evaluate` returns
# settings, or sections of them, that do not affect a daemon's evaluations
OF_CALL = frozenset({"work_dir", "watch", "trackers", "gpu_hour_price"})
log = logging.getLogger(__name__)
POLL_SECONDS = 1.0  # between two polls of `wait`
_ONE_RUN = threading.Lock()  # held by the `evaluate_async` that runs


# --- evaluate --------------------------------------------------------------------------------------------------------


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
        _folder(checkpoint, known, observer),
        spec,
        from_settings.inputs_for(site, coordinator.performer.lm_eval_version),
        options=from_settings.run_options(known).model_copy(
            update={"shards_per_task": shards_per_task, "max_trials": slots}
        ),
        step=step,
    )
    record = without_reuse(record, site) if fresh else record_as_of_now(record, site)

    def checked(new: EvaluationRecord) -> EvaluationRecord:
        return _checked(new, known, coordinator, observer, prepare_options(chosen, known, config, work_dir))

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

    return await _in_thread(run, stop)


async def _in_thread(run: Callable[[], Results], stop: threading.Event) -> Results:
    """Await `run` in a thread of its own. A cancelled task sets `stop`, and goes on once `run` is over."""
    running = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([running])
        running.exception()  # otherwise asyncio reports that it was never retrieved
        raise


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
        new = _checked(new, known, coordinator, observer, words)
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
    before: State | None = None
    if Journal.begun(site.paths.evaluation(record.evaluation_id).journal):
        before, _, _ = find_evaluation(known, record.evaluation_id)
    else:
        record = checked(record)
    coordinator.evaluations.close()
    observer.say(f"the daemon of {known.work_dir} scores {record.evaluation_id}")
    notice = inbox.Notice(command="rescore", evaluation_id=record.evaluation_id, record=record)
    sent = send_submission(
        site.paths, notice, resubmit.resubmission_of(before, 0), typed_command("daemon", config, work_dir)
    )
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
        resumed = _resumed(known, paths)
        if not resumed and WorkLock(site.paths.lock).held() and (shown := _shown(known, paths)):
            coordinator.evaluations.close()
            return shown
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
    price = known.gpu_hour_price
    return results_of(state, paths).model_copy(
        update={"note": note, "changed": said, "gpu_hour_price": price}
    )


def _shown(settings: Config, paths: EvaluationPaths) -> Results | None:
    """Return results of an ended evaluation, which needs no lock on the work folder; otherwise None."""
    state, _, _ = find_evaluation(settings, paths.root.name)
    if state.ended_at is None or state.ending.cancelled:
        return None
    more = {"note": resubmit.nothing_run(state), "gpu_hour_price": settings.gpu_hour_price}
    return results_of(state, paths).model_copy(update=more)


def _resumed(settings: Config, paths: EvaluationPaths) -> str:
    """Return a message about an evaluation that was begun before; "" if it had ended. Raise OtherFormatError."""
    try:
        state, _, _ = find_evaluation(settings, paths.root.name)
    except OtherFormatError:
        raise
    except OperatorError:  # an unreadable journal: the run reports it
        return ""
    return resubmit.resumed_message(state)


def _checked(
    record: EvaluationRecord,
    settings: Config,
    coordinator: Coordinator,
    observer: RunObserver,
    prepare: list[str],
) -> EvaluationRecord:
    """Return a new evaluation's record as the site has it run.

    Raise OperatorError if its jobs could not run, RetryError if the cluster cannot be reached.
    """
    from coordinator.intake.validate import check_cluster, no_answer_message
    from coordinator.runtime import wiring
    from coordinator.site.cluster import ClusterError

    source, asks = record.checkpoint.source, not record.rescores
    check_suite(record.suite, settings, observer, prepare, source, convert=record.convert, asks=asks)
    try:
        record = wiring.cluster_with_site(
            record, wiring.site_hosting(settings, coordinator.cluster), settings
        )
    except ClusterError as error:
        raise no_answer_message(error) from error
    if record.rescores:
        return record  # needs no node with GPUs
    if said := check_cluster(coordinator.cluster, record):
        observer.say(said)
    return record


def check_suite(
    suite: SuiteSpec,
    settings: Config,
    messages: Messages,
    prepare: list[str],
    checkpoint: str | None,
    *,
    convert: str | None,
    asks: bool = True,
) -> None:
    """Refuse a suite whose tasks or data jobs would not find. The first time lm-eval reads thousands of files.

    `prepare`: options of `evalspan prepare`; `checkpoint`: its folder, if one is named; `asks`: whether a model is to answer.
    """
    from coordinator.intake.endpoint import NO_LIKELIHOODS, gives_likelihoods
    from coordinator.intake.validate import check_tasks, settings_passed_over
    from coordinator.operations.doctor.shared_storage import check_shared

    without = ""
    if settings.trial.engine == ENDPOINT and asks:
        from_settings.check_endpoint(settings)
        without = "" if gives_likelihoods(settings.trial.model_args) else NO_LIKELIHOODS

    # a raw checkpoint has no tokenizer for transformers
    tokenizer = checkpoint or "CHECKPOINT" if convert is None else "CONVERTED_CHECKPOINT"
    fetch = shlex.join(["evalspan", "prepare", *prepare, "--tokenizer", tokenizer])
    with messages.busy("asking lm-eval for the suite's tasks"):
        files = check_tasks(suite, from_settings.site_of(settings), fetch, without)
    if said := settings_passed_over(suite):
        messages.say(said)
    if settings.cluster.kind == "slurm":
        named = [checkpoint] if checkpoint else []
        check_shared([str(settings.work_dir), *named, *suite.include_path, *files])


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
        _folder(tokenizer, known, messages, weights=False),
        busy=messages.busy,
        site=site,
        model=from_settings.model_options(known),
        inputs=from_settings.inputs_for(site, from_settings.lm_eval_version(known, site)),
    )


# --- submit and wait -------------------------------------------------------------------------------------------------


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
    folder = _folder(checkpoint, known, messages)
    record = record_as_of_now(
        from_settings.evaluation_record(known, folder, spec, inputs, priority=priority, step=step), site
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


def _check_counts(**counts: object) -> None:
    """Refuse an argument that is not an integer of at least 1."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise OperatorError(f"{name} must be an integer of at least 1, not {count!r}")


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
    return str(Path(named).expanduser().resolve()) if toml.is_file_name(named) else named


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
    known, daemon = (
        work_folder.load_settings(config, work_dir, settings, makes=False),
        typed_command("daemon", config, work_dir),
    )
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
    known, daemon = (
        work_folder.load_settings(config, work_dir, settings, makes=False),
        typed_command("daemon", config, work_dir),
    )
    return await _in_thread(lambda: _waited(known, evaluation, stop, timeout, daemon), stop)


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
    return _found(known, name)


# --- control ---------------------------------------------------------------------------------------------------------


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
    known = work_folder.load_settings(config, work_dir, settings, makes=False)
    daemon = typed_command("daemon", config, work_dir)
    return control.send_command(known, evaluation, inbox.Notice(**notice), daemon)


# --- results and series ----------------------------------------------------------------------------------------------


def results(
    evaluation: str,
    *,
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
) -> Results:
    """Return the results of an evaluation so far. `evaluation`: its id, the beginning of its id, or its digest.

    Raises OperatorError if the name matches none in the work folder, or several.
    """
    return _found(work_folder.load_settings(config, work_dir, settings, makes=False), evaluation)


def series(
    folder: PathLike,
    suite: str | None = None,
    *,
    mixed: bool = False,
    dense: bool = False,
    config: PathLike | None = None,
    work_dir: PathLike | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[dict[str, Any]]:
    """Return scores of all checkpoints of a training, as flat rows for `pandas.DataFrame`, in training order.

    `folder`: the folder with the checkpoints, or a glob of them. `suite`: only this suite. A row has evaluation_id, suite,
    step, checkpoint, status, task, filter, metric, value, stderr, documents, n_shot, version, higher_is_better,
    makespan_seconds, paused_seconds, gpu_seconds, mode. An evaluation without a score has one row whose score is None.
    `mixed`: exact and fast evaluations together; `dense`: include rows of dense signals, with filter "dense". Raises
    OperatorError if there is no evaluation, or there are both modes.
    """
    known = work_folder.load_settings(config, work_dir, settings, makes=False)
    found = load_series.find_series(known.work_dir, str(folder), suite, mixed=mixed)
    points = make_series(found).shown(dense=dense).points
    return [row for point in points for row in rows_of(point)]


def dataframe(
    found: Results | Sequence[Mapping[str, Any]], library: Literal["pandas", "polars"] | None = None
) -> Any:
    """Return a dataframe with a row per score of `found`: results, or rows of `series`.

    `library`: by default pandas if it is installed, otherwise polars. ImportError says what to install.
    """
    rows = found.rows() if isinstance(found, Results) else list(found)
    for name in (library,) if library else ("pandas", "polars"):
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name).DataFrame(rows)
    raise ImportError(f"dataframes need {library or 'pandas or polars'}: pip install {library or 'pandas'}")


def _found(settings: Config, evaluation: str) -> Results:
    paths = find_folder(settings, evaluation)
    if read_ended_summary(paths) is not None and (found := results_in_files(paths)) is not None:
        return found
    state, paths, events = find_evaluation(settings, paths.root.name)
    return results_of(state, paths, events)


# --- arguments -------------------------------------------------------------------------------------------------------


def prepare_options(
    chosen: Mapping[str, Any], settings: Config, config: PathLike | None, work_dir: PathLike | None
) -> list[str]:
    """Return the options of `evalspan prepare` for this suite."""
    words = suites.option_words(chosen)
    if not chosen.keys() & {"suite", "tasks"}:
        words += ["--suite", str(settings.watch.suite)]
    return words + options_of(config, work_dir)


def _folder(checkpoint: PathLike, settings: Config, messages: Messages, *, weights: bool = True) -> str:
    """Return the checkpoint's folder; for an id of the Hub, its snapshot, with weights on request."""
    allow_bin = settings.checkpoint.allow_bin
    return hub.local_folder(str(checkpoint), messages.say, allow_bin=allow_bin, weights=weights)


def _written_at(file: Path) -> int | None:
    """Return the mtime in ns; None if the file is missing."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None
