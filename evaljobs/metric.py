"""Responses → verdicts and scores: CPU work on dumped files.

Rule: a score is lm-eval's own run with a model that replays (`replay`), so filters, metrics, aggregation and bootstrap are
lm-eval's code. Programs are run by the sandbox, all of a task's at once, and a judge is asked by `judges`; verdicts and
judgements are kept by content, so an `execute` job for some documents and the later `score` share them, and nothing
is run or asked twice.

It does not know: RQ, queues, which GPU answered. Imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaljobs import bootstrap, harness, replay, seam
from evaljobs.contract import (
    Executed,
    ExecuteSpec,
    Failed,
    FrameRef,
    RequestSetManifest,
    Scored,
    ScoreSpec,
)
from evaljobs.errors import JobError, OperatorError, one_line
from evaljobs.files import read_record, write_atomic, write_outcome
from evaljobs.instances import instances_digest
from evaljobs.judges.asking import Judges, judges_of
from evaljobs.judges.records import Ask, Reply
from evaljobs.paths import EvaluationPaths, request_set_manifest, slug
from evaljobs.requests import read_head
from evaljobs.results import BY_NAME
from evaljobs.sandbox import Program, SandboxUnavailableError, Verdict, run_programs
from evaljobs.sandbox.code_eval import CodeEval, with_prompt

log = logging.getLogger(__name__)

# Kept in a score file: lm-eval's results, less its samples and its account of the machine.
PARTS = (*BY_NAME, "config")


def warm(*, default_tasks: bool = False) -> None:
    """Import what every job needs, so that a worker's forks share it; with `default_tasks` lm-eval's index too (7 s)."""
    harness.quiet_environment(offline=True)
    seam.install()
    import datasets  # noqa: F401, PLC0415
    import lm_eval.evaluator  # noqa: PLC0415
    import lm_eval.models.utils  # noqa: F401, PLC0415

    if default_tasks:
        harness.task_manager((), None)


def perform(spec: ExecuteSpec | ScoreSpec) -> Executed | Scored | Failed:
    """Run a metric job and leave its outcome; an error becomes a `Failed` that says who must act."""
    paths = EvaluationPaths(spec.evaluation_dir)
    outcome: Executed | Scored | Failed
    try:
        outcome = execute(spec) if isinstance(spec, ExecuteSpec) else score(spec)
    except Exception as error:
        log.exception("%s failed", spec.name)
        outcome = Failed(
            name=spec.name,
            job=spec.kind,
            blame=error.blame if isinstance(error, JobError) else "bug",
            error=one_line(error),
            detail=traceback.format_exc()[-4000:],
            entry=spec.entry,
        )
    write_outcome(paths, outcome)
    return outcome


# --- execute -----------------------------------------------------------------------------------------------------


def execute(spec: ExecuteSpec) -> Executed:
    """Run the programs of some whole documents, or ask the judge of them, and keep what is found. Raises JobError, or
    what a task raises.
    """
    started = time.monotonic()
    paths = EvaluationPaths(spec.evaluation_dir)
    tasks = _built_tasks(spec)
    leaf = _answers(paths, spec.request_set, spec.frames)
    recorded = record_programs(tasks.loaded["tasks"][spec.task], leaf, spec.documents)
    book = Verdicts(
        paths, [spec.task], spec.name, item_seconds=spec.item_seconds, allow_unsafe=spec.allow_unsafe
    )
    ran = book.run_missing(recorded.programs.values())
    asked = 0
    if recorded.asks:
        judges = judges_of(spec.judge, spec.evaluation_dir, spec.name)
        asked = judges.ask_missing(ask for asks in recorded.asks.values() for ask in asks)
        recorded.failed |= _unjudged(judges, recorded.asks)
    return Executed(
        name=spec.name,
        task=spec.task,
        documents=len(spec.documents),
        programs=ran,
        seconds=time.monotonic() - started,
        failed=recorded.failed,
        asked=asked,
    )


def _unjudged(judges: Judges, asks: Mapping[str, Sequence[Ask]]) -> dict[str, str]:
    """Documents that lack a judgement, with the reason."""
    replies = {document: judges.replies(asked) for document, asked in asks.items()}
    return {
        document: reply.error for document, some in replies.items() for reply in some if reply.value is None
    }


@dataclass(slots=True)
class Recorded:
    """Programs that a task's metric asks for, by key; what it asks the judge, by document; documents whose metric
    raised, with the reason.
    """

    programs: dict[str, Program] = field(default_factory=dict)
    asks: dict[str, list[Ask]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    prompt: str | None = (
        None  # of the document whose metric runs: its helpers are no completion's to redefine
    )
    document: str = ""  # in hand

    def note(self, programs: list[Program]) -> list[Verdict]:
        self.programs |= {program.id: with_prompt(program, self.prompt) for program in programs}
        return [Verdict(id=p.id, verdict="fail", seconds=0.0, isolation="none") for p in programs]

    def note_asks(self, asks: Sequence[Ask]) -> list[Reply]:
        self.asks.setdefault(self.document, []).extend(asks)
        return [Reply(value=None, error="not asked yet") for _ in asks]


def record_programs(task: Any, leaf: replay.Answers, documents: Sequence[int] | None) -> Recorded:
    """Let a task's filters and metric run on its answers with seams that only write programs and asks down.

    Filters see the given documents alone. One that looks across documents may then ask for other programs than the
    score will; those are run by the score.
    """
    if instances_digest(task.instances) != leaf.head.digests:
        raise replay.ReplayError(
            f"task {leaf.head.task}: the rebuilt task asks other prompts than those answered: evaluate again"
        )
    recorded = Recorded()
    by_document = _answered(task, leaf, documents)
    chosen = [instance for instances in by_document.values() for instance in instances]
    if not chosen:
        return recorded
    with (
        seam.SEAM.computing(CodeEval(recorded.note).compute),
        seam.JUDGES.answering(recorded.note_asks),
    ):
        for ensemble in task._filters:  # noqa: SLF001 (evaluate() does the same on the whole list)
            ensemble.apply(chosen)
        for document, instances in by_document.items():
            recorded.document = str(document)
            instances.sort(key=lambda instance: instance.idx)
            prompt = instances[0].doc.get("prompt") if isinstance(instances[0].doc, dict) else None
            recorded.prompt = prompt if isinstance(prompt, str) else None
            for name in instances[0].filtered_resps:
                try:
                    task.process_results(instances[0].doc, [i.filtered_resps[name] for i in instances])
                except Exception as error:  # noqa: BLE001 (the score will raise it again, with the real verdicts)
                    recorded.failed[str(document)] = one_line(error)
    return recorded


def _answered(task: Any, leaf: replay.Answers, documents: Sequence[int] | None) -> dict[int, list[Any]]:
    """The instances of the given documents (all, if None) with their responses set, by document in build order."""
    wanted = None if documents is None else set(documents)
    chosen: dict[int, list[Any]] = {}
    index = 0
    for instance in task.instances:
        places = range(index, index + int(instance.repeats or 1))
        index = places.stop
        if wanted is not None and instance.doc_id not in wanted:
            continue
        if not all(replay.has_answer(leaf.answers, place) for place in places):
            raise replay.ReplayError(f"document {instance.doc_id} of {leaf.head.task} lacks responses")
        instance.resps = [leaf.answers[place] for place in places]
        chosen.setdefault(instance.doc_id, []).append(instance)
    return chosen


class Verdicts:
    """Verdicts of some leaf tasks by program key, read from every job's file and added to in one of this job's own."""

    def __init__(
        self,
        paths: EvaluationPaths,
        tasks: Sequence[str],
        job: str,
        *,
        item_seconds: float,
        allow_unsafe: bool,
        workers: int | None = None,
    ) -> None:
        self._folder = paths.verdicts
        self._prefixes = [f"{slug(task)}@" for task in tasks]
        self._own = self._folder / f"{self._prefixes[0]}{slug(job)}.jsonl"
        self._item_seconds = item_seconds
        self._allow_unsafe = allow_unsafe
        self._workers = workers
        self._known: dict[str, Verdict] = {}
        self._ours: dict[str, Verdict] = {}
        self._read()

    def _read(self) -> None:
        for file in sorted(self._folder.glob("*.jsonl")):
            if not file.name.startswith(tuple(self._prefixes)):
                continue
            for line in file.read_text().splitlines():
                verdict = Verdict(**json.loads(line))
                self._known[verdict.id] = verdict
                if file == self._own:
                    self._ours[verdict.id] = verdict

    def run_missing(self, programs: Iterable[Program]) -> int:
        """Run the programs that have no verdict yet, in parallel; returns how many."""
        missing = [program for program in programs if program.id not in self._known]
        if not missing:
            return 0
        limited = [_within(program, self._item_seconds) for program in missing]
        try:
            found = list(run_programs(limited, workers=self._workers, allow_unsafe=self._allow_unsafe))
        except SandboxUnavailableError as error:
            raise OperatorError(one_line(error)) from error
        self._known |= {verdict.id: verdict for verdict in found}
        self._ours |= {verdict.id: verdict for verdict in found}
        lines = [verdict.line() for verdict in self._ours.values()]
        write_atomic(self._own, ("\n".join(lines) + "\n").encode())
        return len(missing)

    def of(self, programs: list[Program]) -> list[Verdict]:
        """Verdicts of these programs; any that is not known is run now."""
        self.run_missing(programs)
        return [self._known[program.id] for program in programs]


def _within(program: Program, seconds: float) -> Program:
    if program.timeout_seconds <= seconds:
        return program
    from dataclasses import replace  # noqa: PLC0415

    return replace(program, timeout_seconds=seconds)


# --- score -------------------------------------------------------------------------------------------------------


def score(spec: ScoreSpec) -> Scored:
    """Score one suite entry, all of whose responses are there, and write its results and samples.

    Raises ReplayError where a response is missing or prompts changed: nothing is written then.
    """
    started = time.monotonic()
    paths = EvaluationPaths(spec.evaluation_dir)
    entry = spec.suite.tasks[spec.entry]
    harness.quiet_environment(offline=True)
    leaves = {
        task: _answers(paths, folder, spec.frames.get(task, ())) for task, folder in spec.request_sets.items()
    }
    for leaf in leaves.values():
        replay.check_whole(leaf.head, leaf.answers)
    executed = _executed(spec, paths, leaves)
    tasks = harness.entry_tasks(spec.suite, entry, model=spec.model, model_dir=spec.model_dir)

    def compute_when_loaded(**arguments: Any) -> Any:
        return executed.compute(**arguments) if tasks.loaded else seam.unrun(**arguments)

    with (
        seam.SEAM.computing(compute_when_loaded),
        seam.JUDGES.answering(executed.replies),
        bootstrap.in_lm_eval(),  # lm-eval's own takes every CPU of the node, of which a job has a few
    ):
        results = harness.run_entry(
            _replay(spec, leaves),
            spec.suite,
            entry,
            model=spec.model,
            model_dir=spec.model_dir,
            tasks=tasks,
            bootstrap_iters=spec.bootstrap_iters,
            seed_torch=False,
        )
    unasked = set(leaves) - set(results["configs"])
    if unasked:
        raise replay.ReplayError(f"lm-eval no longer asks for {', '.join(sorted(unasked))}: evaluate again")
    return Scored(
        name=spec.name,
        entry=spec.entry,
        result_file=str(_write(paths, spec, results)),
        seconds=time.monotonic() - started,
        programs_run=executed.ran,
        asked=executed.asked,
    )


def _no_judge(_asks: Sequence[Ask]) -> list[Reply]:
    raise OperatorError("the task asks a judge only while it is scored: evaluate again")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Executed:
    """What answers the seams from verdicts and judgements; programs run and asks sent for it now."""

    compute: Callable[..., Any]
    replies: Callable[[Sequence[Ask]], list[Reply]] = _no_judge
    ran: int = 0
    asked: int = 0


def _executed(spec: ScoreSpec, paths: EvaluationPaths, leaves: Mapping[str, replay.Answers]) -> _Executed:
    """Verdicts and judgements of an entry, those missing having been run and asked for in parallel first."""
    executing = [
        task
        for task, folder in spec.request_sets.items()
        if read_record(request_set_manifest(folder), RequestSetManifest).executes
    ]
    book = Verdicts(
        paths,
        executing or [spec.suite.tasks[spec.entry].name],
        spec.name,
        item_seconds=spec.item_seconds,
        allow_unsafe=spec.allow_unsafe,
    )
    if not executing:
        return _Executed(compute=CodeEval(book.of).compute)
    tasks = _built_tasks(spec).loaded["tasks"]
    wanted = [record_programs(tasks[task], leaves[task], None) for task in executing]
    ran = book.run_missing({key: p for some in wanted for key, p in some.programs.items()}.values())
    asks = [ask for some in wanted for asked in some.asks.values() for ask in asked]
    if not asks:
        return _Executed(compute=CodeEval(book.of).compute, ran=ran)
    judges = judges_of(spec.judge, spec.evaluation_dir, spec.name)
    asked = judges.ask_missing(asks)
    return _Executed(compute=CodeEval(book.of).compute, replies=judges.replies, ran=ran, asked=asked)


def _write(paths: EvaluationPaths, spec: ScoreSpec, results: Mapping[str, Any]) -> Path:
    """Samples first, the score file last: it tells that both are whole."""
    from lm_eval.utils import handle_non_serializable  # noqa: PLC0415

    for task, samples in results["samples"].items():
        lines = [_sample_line(sample) for sample in samples]
        write_atomic(paths.samples / f"samples_{slug(task)}_{spec.entry:03d}.jsonl", "".join(lines).encode())
    kept = {part: results[part] for part in PARTS if part in results}
    kept["config"] = {
        **results["config"],
        "model": spec.model.engine,
        "model_args": {"pretrained": spec.model_dir, **spec.model.model_args},
    }
    for package in ("lm_eval", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            kept[f"{package}_version"] = importlib.metadata.version(package)
    kept["entry"] = spec.suite.tasks[spec.entry].model_dump(mode="json")
    place = paths.scores / f"{spec.entry:03d}-{slug(spec.suite.tasks[spec.entry].name)}.json"
    text = json.dumps(kept, indent=2, default=handle_non_serializable, ensure_ascii=False)
    write_atomic(place, text.encode())
    return place


def _sample_line(sample: Mapping[str, Any]) -> str:
    """A line of samples_*.jsonl as lm-eval's EvaluationTracker.save_results_samples writes it."""
    from lm_eval.utils import handle_non_serializable, sanitize_list  # noqa: PLC0415

    line = dict(sample)
    line["resps"] = sanitize_list(sample["resps"])
    line["filtered_resps"] = sanitize_list(sample["filtered_resps"])
    line["arguments"] = {
        f"gen_args_{i}": {f"arg_{j}": value for j, value in enumerate(arguments)}
        for i, arguments in enumerate(sample["arguments"])
    }
    line["target"] = str(sample["target"])
    return json.dumps(line, default=handle_non_serializable, ensure_ascii=False) + "\n"


# --- both --------------------------------------------------------------------------------------------------------


def _answers(paths: EvaluationPaths, folder: str, frames: Sequence[FrameRef]) -> replay.Answers:
    manifest = read_record(request_set_manifest(folder), RequestSetManifest)
    head = read_head(Path(folder))
    answers = replay.collect_answers(head, manifest.key, paths.responses, frames)
    return replay.Answers(head=head, answers=answers)


def _replay(spec: ExecuteSpec | ScoreSpec, leaves: Mapping[str, replay.Answers]) -> Any:
    chat = bool(spec.suite.apply_chat_template)
    return replay.replay_model(leaves, chat=chat, model_dir=spec.model_dir, options=spec.model)


def _built_tasks(spec: ExecuteSpec | ScoreSpec) -> harness.Tasks:
    """The entry's tasks with their instances, built as for the request set; nothing is answered or scored."""
    harness.quiet_environment(offline=True)
    entry = spec.suite.tasks[spec.entry]
    tasks = harness.entry_tasks(spec.suite, entry, model=spec.model, model_dir=spec.model_dir)
    chat = bool(spec.suite.apply_chat_template)
    model = replay.replay_model(None, chat=chat, model_dir=spec.model_dir, options=spec.model)
    with contextlib.suppress(harness.RequestsBuiltError):
        harness.run_entry(
            model,
            spec.suite,
            entry,
            model=spec.model,
            model_dir=spec.model_dir,
            tasks=tasks,
            bootstrap_iters=0,
            seed_torch=False,
        )
    return tasks
