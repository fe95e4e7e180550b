"""The metric jobs `execute` and `score`: verdicts, judgements and scores from dumped responses.

Rule: a score is lm-eval's own run with a replaying model, so filters, metrics, aggregation and bootstrap are lm-eval's code.
`execute` jobs have the sandbox run programs, and `judges` send asks, while GPUs keep working; the `score` job reads verdicts
and judgements from disk, where they are stored by content, inside lm-eval's run. A job builds its task once. An item whose
metric hangs or kills its process has no score (`item_deadlines`). Imports no torch. Called from `worker` and `python -m
evaljobs`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evaljobs.contract.archived_files import files_in, read_bytes
from evaljobs.contract.columns import chance_of, columns_of, pack_columns, signal_means
from evaljobs.contract.outcomes import Executed, Failed, Scored
from evaljobs.contract.paths import EvaluationPaths, WorkPaths, request_set_manifest, slug
from evaljobs.contract.specs import ExecuteSpec, FrameRef, RequestSetManifest, ScoreSpec
from evaljobs.contract.storage import read_record, write_atomic, write_outcome
from evaljobs.errors import JobError, OperatorError, error_details, one_line
from evaljobs.judges.asking import Judges
from evaljobs.judges.judgement import Ask, Reply
from evaljobs.lmeval import hooks, quiet_environment, replay_model, run, shown_inputs, source_files
from evaljobs.lmeval.results import BY_NAME
from evaljobs.requests.build import drop_request_sets, read_head, read_requests
from evaljobs.sandbox.code_eval import CodeEval
from evaljobs.sandbox.records import Program, SandboxUnavailableError, Verdict
from evaljobs.sandbox.run import run_programs
from evaljobs.scoring import bootstrap
from evaljobs.scoring.collect_programs import record_programs
from evaljobs.scoring.item_deadlines import Items
from evaljobs.secret_values import hide_secrets

log = logging.getLogger(__name__)

# Parts of lm-eval's results in a score file, without samples and the description of the machine.
PARTS = (*BY_NAME, "config")


def import_for_jobs() -> None:
    """Import what every job needs."""
    quiet_environment(offline=True)
    hooks.install_seam()
    import datasets  # noqa: F401, PLC0415
    import lm_eval.evaluator  # noqa: PLC0415
    import lm_eval.models.utils  # noqa: F401, PLC0415


def main(spec: ExecuteSpec | ScoreSpec) -> int:
    """Run `python -m evaljobs execute` and `score`, and return the exit status."""
    return int(isinstance(perform_metric_job(spec), Failed))


def perform_metric_job(spec: ExecuteSpec | ScoreSpec) -> Executed | Scored | Failed:
    """Run a metric job and write its outcome; an error becomes a `Failed` that says who must act."""
    paths = EvaluationPaths(spec.evaluation_dir)
    outcome: Executed | Scored | Failed
    try:
        outcome = execute_documents(spec) if isinstance(spec, ExecuteSpec) else score_entry(spec)
    except Exception as error:
        log.exception("%s failed", spec.name)
        if isinstance(error, replay_model.OtherPromptsError):
            sets = spec.request_sets.values() if isinstance(spec, ScoreSpec) else [spec.request_set]
            for folder in sets:
                drop_request_sets(Path(folder).parent)
        outcome = Failed(
            name=spec.name,
            job=spec.kind,
            blame=error.blame if isinstance(error, JobError) else "bug",
            error=one_line(error),
            detail=error_details(),
            entry=spec.entry,
        )
    write_outcome(paths, outcome)
    return outcome


# --- execute -----------------------------------------------------------------------------------------------------


def execute_documents(spec: ExecuteSpec) -> Executed:
    """Run the programs of whole documents, or ask the judge about them, and store the results.

    Raises JobError, or whatever the task raises.
    """
    with Items(spec) as items:
        started = time.monotonic()
        paths = EvaluationPaths(spec.evaluation_dir)
        task = _built_task(spec)
        leaf = _answers(paths, spec.request_set, spec.frames)
        recorded = record_programs(task, leaf, spec.documents, items)
        ran = Verdicts([spec.task], spec).run_missing(recorded.programs.values())
        asked = 0
        if recorded.asks:
            judges = Judges(spec.judge, spec.evaluation_dir, spec.name)
            asked = judges.ask_missing(ask for asks in recorded.asks.values() for ask in asks)
            replies = [(d, reply) for d, asks in recorded.asks.items() for reply in judges.replies(asks)]
            recorded.failed |= {document: reply.error for document, reply in replies if reply.value is None}
        return Executed(
            name=spec.name,
            task=spec.task,
            documents=len(spec.documents),
            programs=ran,
            seconds=time.monotonic() - started,
            failed=recorded.failed,
            asked=asked,
        )


# --- score -------------------------------------------------------------------------------------------------------


def score_entry(spec: ScoreSpec) -> Scored:
    """Score one suite entry from its responses, and write its results and samples.

    Raises ReplayError if a response is missing or prompts changed; then nothing is written.
    """
    started = time.monotonic()
    paths = EvaluationPaths(spec.evaluation_dir)
    work = WorkPaths(paths.root.parent)
    entry = spec.suite.tasks[spec.entry]
    rows: dict[str, str] = {}
    with Items(spec) as items:
        built = _check_shown(spec)
        quiet_environment(offline=True)
        leaves = {
            task: _answers(paths, folder, spec.frames.get(task, ()))
            for task, folder in spec.request_sets.items()
        }
        for task, leaf in leaves.items():
            if spec.documents is None:
                replay_model.check_whole(leaf.head, leaf.answers)
            else:
                _, pieces = read_requests(Path(spec.request_sets[task]))
                leaves[task] = replay_model.restrict_answers(leaf, pieces, spec.documents[task])
        # before recording, since lm-eval's index opens each YAML of include_path
        tasks = run.entry_tasks(
            spec.suite, entry, model=spec.model, model_dir=spec.model_dir, cache=work.cache
        )
        found = _Found(spec, items)
        with shown_inputs.record_inputs(rows, leave_out=(work.root, spec.model_dir)):
            results = _results(spec, leaves, tasks, found, items)
        _check_shown(spec)
    named = source_files.files_named_by(
        spec.suite.include_path, entry.name, source_files.Digests(work.digests)
    )
    # the score key covers these, and tells a comment from code
    counted = {os.path.realpath(p) for p in (*source_files.task_modules(built), *named.yamls, *named.data)}
    rows = {path: digest for path, digest in rows.items() if os.path.realpath(path) not in counted}
    return Scored(
        name=spec.name,
        entry=spec.entry,
        result_file=str(_write(paths, spec, results, rows)),
        seconds=time.monotonic() - started,
        programs_run=found.ran,
        asked=found.asked,
        unscored={**found.unjudged, **items.reasons()},
    )


class _Found:
    """Verdicts and judgements on disk for the metrics of an entry; missing ones are run and requested now."""

    def __init__(self, spec: ScoreSpec, items: Items) -> None:
        self._spec = spec
        self._items = items
        self._book = Verdicts(list(spec.request_sets), spec)
        self._judges: Judges | None = None
        self.ran = self.asked = 0
        self.unjudged: dict[str, str] = {}  # "task document" -> reason

    def verdicts(self, programs: list[Program]) -> list[Verdict]:
        with self._items.apart():
            self.ran += self._book.run_missing(programs)
        return [self._book.known[program.id] for program in programs]

    def replies(self, asks: Sequence[Ask]) -> list[Reply]:
        self._judges = judges = self._judges or Judges(
            self._spec.judge, self._spec.evaluation_dir, self._spec.name
        )
        with self._items.apart():
            self.asked += judges.ask_missing(asks)
        replies = judges.replies(asks)
        task, document = self._items.current
        self.unjudged |= {f"{task} {document}": r.error for r in replies if r.value is None}
        return replies


def _results(
    spec: ScoreSpec,
    leaves: Mapping[str, replay_model.Answers],
    tasks: run.Tasks,
    found: _Found,
    items: Items,
) -> dict[str, Any]:
    """Return lm-eval's own results of the entry from these answers. Raise OtherPromptsError if it requests other tasks."""
    tasks.on_load = items.guard
    compute = CodeEval(found.verdicts).compute

    def compute_when_loaded(**arguments: Any) -> Any:
        return compute(**arguments) if tasks.loaded else hooks.placeholder_scores(**arguments)

    with (
        hooks.SEAM.answering(compute_when_loaded),
        hooks.JUDGES.answering(found.replies),
        bootstrap.in_lm_eval(),  # lm-eval's own uses every CPU of the node, not only the job's
    ):
        results = run.run_entry(
            _replay(spec, leaves),
            spec.suite,
            spec.suite.tasks[spec.entry],
            tasks,
            bootstrap_iters=spec.bootstrap_iters if spec.documents is None else 0,
            seed_torch=False,
        )
    if unasked := set(leaves) - set(results["configs"]):
        raise replay_model.OtherPromptsError(", ".join(sorted(unasked)), "lm-eval no longer asks for it")
    return results


def _check_shown(spec: ScoreSpec) -> set[str]:
    """Return paths that the build used. Raise OperatorError if one of its files has changed.

    Packages do not count, since this job records its own, nor files missing here: the build may have read them in its node's
    temporary folder.
    """
    built = set[str]()
    sets = {Path(folder).parent: folder for folder in spec.request_sets.values()}  # leaf tasks of one build
    for parent, folder in sets.items():
        shown = read_record(request_set_manifest(folder), RequestSetManifest).shown
        rows = shown_inputs.rows_of_set(parent, shown) or {}
        built |= rows.keys()
        files = {p: digest for p, digest in rows.items() if Path(p).exists()}
        if differing := shown_inputs.changed_paths(files):
            raise OperatorError(
                f"{shown_inputs.rows_in_words(differing[0])} changed since the requests of {spec.suite.tasks[spec.entry].name} "
                "were built: run the same command again; answers to unchanged requests are reused"
            )
    return built


def _write(
    paths: EvaluationPaths, spec: ScoreSpec, results: Mapping[str, Any], rows: Mapping[str, str]
) -> Path:
    """Write samples and columns, then the score file, which marks all as complete. `rows`: inputs of the scoring."""
    from lm_eval.utils import handle_non_serializable  # noqa: PLC0415

    cluster = spec.suite.tasks[spec.entry].cluster
    signals, parts = {}, {}
    for task, found in results["samples"].items():
        samples = [_sample(one) for one in found]
        lines = [json.dumps(s, default=handle_non_serializable, ensure_ascii=False) + "\n" for s in samples]
        write_atomic(paths.samples / f"samples_{slug(task)}_{spec.entry:03d}.jsonl", "".join(lines).encode())
        parts[spec.entry, task] = columns = columns_of(samples, cluster)
        signals[task] = signal_means(columns) | {"chance": chance_of(samples)}
    write_atomic(paths.columns(spec.entry), pack_columns(parts))
    kept = {part: results[part] for part in PARTS if part in results}
    if spec.documents is not None:  # lm-eval's scores are of these alone
        kept |= {"results": {}, "groups": {}, "n-samples": {}}
        signals = {}
    # a task's YAML may contain the token of its data set
    kept["configs"] = reproducible_configs(hide_secrets(results["configs"]))
    kept["config"] = {
        **results["config"],
        "model": spec.model.engine,
        "model_args": {"pretrained": spec.model_dir, **hide_secrets(spec.model.model_args)},
    }
    for package in ("lm_eval", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            kept[f"{package}_version"] = importlib.metadata.version(package)
    kept["entry"] = spec.suite.tasks[spec.entry].model_dump(mode="json")
    kept["shown"] = dict(rows)
    kept["signals"] = signals
    place = paths.scores / f"{spec.entry:03d}-{slug(spec.suite.tasks[spec.entry].name)}.json"
    text = json.dumps(kept, indent=2, default=handle_non_serializable, ensure_ascii=False)
    write_atomic(place, text.encode())
    return place


def reproducible_configs(configs: Any) -> Any:
    """Return tasks' configs as JSON values, functions without source by name, since their address differs from run to run."""
    from lm_eval.utils import handle_non_serializable  # noqa: PLC0415

    text = json.dumps(configs, default=handle_non_serializable, ensure_ascii=False)
    return json.loads(re.sub(r" at 0x[0-9a-f]+(?=[>,])", "", text))


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of samples_*.jsonl like lm-eval's EvaluationTracker.save_results_samples."""
    from lm_eval.utils import sanitize_list  # noqa: PLC0415

    line = dict(sample)
    line["resps"] = sanitize_list(sample["resps"])
    line["filtered_resps"] = sanitize_list(sample["filtered_resps"])
    line["arguments"] = {
        f"gen_args_{i}": {f"arg_{j}": value for j, value in enumerate(arguments)}
        for i, arguments in enumerate(sample["arguments"])
    }
    line["target"] = str(sample["target"])
    return line


class Verdicts:
    """Verdicts of some leaf tasks by program key: each program runs once, whichever job needs it.

    A job writes its verdicts, one per line, to its own file before it uses them; it reads the files of all jobs.
    """

    def __init__(self, tasks: Sequence[str], spec: ExecuteSpec | ScoreSpec) -> None:
        self._spec = spec
        folder = EvaluationPaths(spec.evaluation_dir).verdicts
        prefixes = tuple(f"{slug(task)}@" for task in tasks)
        self._own = folder / f"{prefixes[0]}{slug(spec.name)}.jsonl"
        self.known: dict[str, Verdict] = {}
        self._written: dict[str, Verdict] = {}
        for file in files_in(folder, "*.jsonl"):
            if file.name.startswith(prefixes):
                found = [Verdict(**json.loads(line)) for line in read_bytes(file).splitlines()]
                self.known |= {verdict.id: verdict for verdict in found}
                if file == self._own:
                    self._written = {verdict.id: verdict for verdict in found}

    def run_missing(self, programs: Iterable[Program]) -> int:
        """Run the programs that have no verdict yet, in parallel, and return how many."""
        most = self._spec.item_seconds
        missing = [
            replace(program, timeout_seconds=min(program.timeout_seconds, most))
            for program in programs
            if program.id not in self.known
        ]
        if not missing:
            return 0
        try:
            found = {v.id: v for v in run_programs(missing, allow_unsafe=self._spec.allow_unsafe)}
        except SandboxUnavailableError as error:
            raise OperatorError(one_line(error)) from error
        self.known |= found
        self._written |= found
        lines = [verdict.line() for verdict in self._written.values()]
        write_atomic(self._own, ("\n".join(lines) + "\n").encode())
        return len(missing)


# --- both --------------------------------------------------------------------------------------------------------


def _answers(paths: EvaluationPaths, folder: str, frames: Sequence[FrameRef]) -> replay_model.Answers:
    manifest = read_record(request_set_manifest(folder), RequestSetManifest)
    head = read_head(Path(folder))
    answers = replay_model.collect_answers(head, manifest.key, paths.responses, frames)
    return replay_model.Answers(head=head, answers=answers)


def _replay(spec: ExecuteSpec | ScoreSpec, leaves: Mapping[str, replay_model.Answers] | None) -> Any:
    chat = bool(spec.suite.apply_chat_template)
    return replay_model.replay_model(leaves, chat=chat, model_dir=spec.model_dir, options=spec.model)


def _built_task(spec: ExecuteSpec) -> Any:
    """Return the leaf task with its instances, built as for the request set, without answers or scores."""
    quiet_environment(offline=True)
    entry = spec.suite.tasks[spec.entry]
    cache = WorkPaths(EvaluationPaths(spec.evaluation_dir).root.parent).cache
    tasks = run.entry_tasks(spec.suite, entry, model=spec.model, model_dir=spec.model_dir, cache=cache)
    with contextlib.suppress(run.RequestsBuiltError):
        run.run_entry(_replay(spec, None), spec.suite, entry, tasks, seed_torch=False)
    return tasks.loaded["tasks"][spec.task]
