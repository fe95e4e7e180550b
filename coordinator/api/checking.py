"""Checks of what `evaluate` and `submit` are given, before anything is submitted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coordinator.base.words import options_of
from coordinator.intake import from_settings, hub, suites
from coordinator.intake.suites import PathLike
from coordinator.runtime.observers import Messages, RunObserver
from coordinator.site.config.schema import Config
from evaljobs.contract.engine_traits import ENDPOINT
from evaljobs.contract.specs import SuiteSpec

if TYPE_CHECKING:
    from coordinator.decide.evaluation.records import EvaluationRecord
    from coordinator.runtime.loop import Coordinator


def checked_record(
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


def prepare_options(
    chosen: Mapping[str, Any], settings: Config, config: PathLike | None, work_dir: PathLike | None
) -> list[str]:
    """Return the options of `evalspan prepare` for this suite."""
    words = suites.option_words(chosen)
    if not chosen.keys() & {"suite", "tasks"}:
        words += ["--suite", str(settings.watch.suite)]
    return words + options_of(config, work_dir)


def checkpoint_folder(
    checkpoint: PathLike, settings: Config, messages: Messages, *, weights: bool = True
) -> str:
    """Return the checkpoint's folder; for an id of the Hub, its snapshot, with weights on request."""
    allow_bin = settings.checkpoint.allow_bin
    return hub.local_folder(str(checkpoint), messages.say, allow_bin=allow_bin, weights=weights)
