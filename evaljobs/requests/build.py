"""The `build` job: builds all prompts of a suite entry once, tokenised and cut into fixed batches.

Rule: prompts, tokens and windows come from lm-eval's own code. `simple_evaluate` runs the entry with the model class itself,
without weights; the first call of the model ends the run with all requests. Called from `python -m evaljobs build` and, for
its parts, from `scoring.score`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from evaljobs.contract.names import Cut
from evaljobs.contract.outcomes import Built, Failed
from evaljobs.contract.paths import (
    EvaluationPaths,
    WorkPaths,
    batch_file,
    batch_index_file,
    entry_manifest,
    request_set_manifest,
    shown_file,
    slug,
)
from evaljobs.contract.specs import Blocks, BuildSpec, EntryManifest, RequestSetManifest
from evaljobs.contract.storage import hold_lock, read_record, write_atomic, write_outcome, write_record
from evaljobs.errors import JobError, OperatorError, error_details, one_line
from evaljobs.lmeval import (
    conversations,
    hooks,
    quiet_environment,
    result_keys,
    run,
    shown_inputs,
    source_files,
    stub_model,
    task_paths,
)
from evaljobs.lmeval.batches import (
    Chunk,
    Kind,
    Piece,
    RequestsHead,
    decode_head,
    decode_pieces,
    encode_batches,
    encode_requests,
)
from evaljobs.lmeval.shown_inputs import FAILED_BUILD_FILE
from evaljobs.lmeval.source_files import Digests
from evaljobs.requests.units import cut_requests

log = logging.getLogger(__name__)

SAME_BUILD_SECONDS = 600.0  # how long a build waits for another job's build of the same entry


def build_request_sets(spec: BuildSpec) -> Built:
    """Build the missing request sets of an entry. Raise JobError if the operator must act.

    Sets on disk are kept if nothing that their build used has changed. Of several processes that build the same entry the
    first does the work. Where the others do not see its lock, or wait in vain, they write the same bytes: a set's folder is
    named by its content, and an evaluation that began with other sets keeps those.
    """
    started = time.monotonic()
    quiet_environment(offline=spec.offline)
    if not spec.offline:
        run.look_for_hub()
    folder = Path(spec.out_dir)
    # File WORK_DIR/request_sets/ENTRY/build.lock: locked (flock) by the one build of an entry | a build | `prune`
    with hold_lock(folder / "build.lock", wait=SAME_BUILD_SECONDS):
        places = _places(spec, folder)
    return Built(
        name=spec.name,
        entry=spec.entry,
        batch_size=spec.batch_size,
        cut=spec.cut,
        sets=places,
        seconds=time.monotonic() - started,
    )


def _places(spec: BuildSpec, folder: Path) -> dict[str, str]:
    """Return leaf task -> folder of its request set, with what is missing built."""
    sets = _sets_on_disk(folder)
    if sets is None:
        sets, shown = _build_entry(spec, WorkPaths(folder.parents[1]))
        made = EntryManifest(entry=spec.suite.tasks[spec.entry].name, sets=sets, shown=shown)
        write_record(entry_manifest(folder), made)
    places = {task: str(folder / relative) for task, relative in sets.items()}
    cut = spec.cut or ("" if spec.batch_size == "auto" else str(spec.batch_size))
    for place in places.values() if cut else ():
        add_batches(Path(place), cut, spec.blocks)
    return places


def main(spec: BuildSpec) -> int:
    """Run `python -m evaljobs build`: build, write the outcome, and return the exit status."""
    outcome: Built | Failed
    try:
        outcome = build_request_sets(spec)
    except Exception as error:
        log.exception("%s failed", spec.name)
        outcome = Failed(
            name=spec.name,
            job="build",
            blame=error.blame if isinstance(error, JobError) else "bug",
            error=one_line(error),
            detail=error_details(),
            entry=spec.entry,
        )
        sys.stdout.write(json.dumps({"failed": outcome.error}) + "\n")
    if spec.evaluation_dir is not None:
        write_outcome(EvaluationPaths(spec.evaluation_dir), outcome)
    return int(isinstance(outcome, Failed))


# --- existing sets --------------------------------------------------------------------------------------------------


def read_requests(folder: Path) -> tuple[RequestsHead, list[Piece]]:
    """Return the head and pieces of a request set."""
    with (folder / "requests").open("rb") as lines:
        head = decode_head(lines.readline())
        return head, list(decode_pieces(lines))


def read_head(folder: Path) -> RequestsHead:
    with (folder / "requests").open("rb") as lines:
        return decode_head(lines.readline())


def add_batches(folder: Path, cut: str | int, blocks: Mapping[str, Blocks] = MappingProxyType({})) -> None:
    """Write the batches of a request set in one cut (`names.Cut`), unless they exist. `blocks`: as of `BuildSpec`."""
    if batch_index_file(folder, cut).exists():
        return
    wanted = Cut.parse(str(cut))
    manifest = read_record(request_set_manifest(folder), RequestSetManifest)
    head, pieces = read_requests(folder)
    made: list[Chunk] = []
    ends = []
    for some in _by_block(manifest.task, pieces, blocks[manifest.task]) if wanted.order else ():
        made += cut_requests(head, some, wanted)
        ends.append(len(made))
    if not wanted.order:
        made = list(cut_requests(head, pieces, wanted))
    data, index = encode_batches(head, manifest.key, made, wanted.batch_size)
    index = index.model_copy(update={"ends": tuple(ends)})
    write_atomic(batch_file(folder, cut), data)
    write_record(batch_index_file(folder, cut), index)


def _by_block(task: str, pieces: Sequence[Piece], blocks: Blocks) -> list[list[Piece]]:
    """The requests of each block's documents. OperatorError where these are not the documents of the request set."""
    block_of = {document: number for number, block in enumerate(blocks) for document in block}
    found: list[list[Piece]] = [[] for _ in blocks]
    if block_of.keys() != {piece.document for piece in pieces}:
        raise OperatorError(
            f"task {task}: its documents are not those of the reference evaluation: evaluate one checkpoint of this training "
            "in full, and name it as [screen] reference"
        )
    for piece in pieces:
        found[block_of[piece.document]].append(piece)
    return found


def _sets_on_disk(folder: Path) -> dict[str, str] | None:
    """Return leaf task -> folder name, or None if a set is missing or its inputs have changed. `folder`'s name is a digest."""
    try:
        entry = read_record(entry_manifest(folder), EntryManifest)
        for name in entry.sets.values():
            read_record(request_set_manifest(folder / name), RequestSetManifest)
        rows = shown_inputs.rows_of_set(folder, entry.shown)
    except (FileNotFoundError, ValueError):
        return None
    return None if rows is None or shown_inputs.changed_paths(rows) else entry.sets


def drop_request_sets(folder: str | Path) -> None:
    """Drop an entry's request sets, which turned out to be wrong; the next evaluation rebuilds them."""
    entry_manifest(folder).unlink(missing_ok=True)


# --- one entry ---------------------------------------------------------------------------------------------------


def _build_entry(spec: BuildSpec, work: WorkPaths) -> tuple[dict[str, str], str]:
    """Return leaf task -> folder name, and the name of the file with the rows that the build used."""
    entry = spec.suite.tasks[spec.entry]
    named = source_files.files_named_by(spec.suite.include_path, entry.name, Digests(work.digests))
    if spec.source and named.key() != spec.source:
        raise OperatorError(
            f"the files of task {entry.name} changed after its evaluation was submitted: submit it again (`evalspan eval` "
            "or `evalspan submit`); answers to unchanged prompts are reused"
        )
    rows: dict[str, str] = {}
    try:
        tasks, lm = _run_entry(spec, work, rows)
    except Exception:
        failed = shown_inputs.merge_rows([rows, named.found])
        write_atomic(
            shown_file(spec.out_dir, FAILED_BUILD_FILE), json.dumps(failed, sort_keys=True, indent=0).encode()
        )
        raise
    rows = shown_inputs.merge_rows([rows, named.found])
    modules = source_files.task_modules(rows)
    shown = _write_shown(spec, tasks.loaded["tasks"].values(), rows)
    sets: dict[str, str] = {}
    for name, task in tasks.loaded["tasks"].items():
        score_key = result_keys.score_key(task, tasks.loaded.get("groups", {}), modules)
        sets[name] = _write_set(spec, lm, name, task, score_key=score_key, shown=shown)
    return sets, shown


def _run_entry(spec: BuildSpec, work: WorkPaths, rows: dict[str, str]) -> tuple[run.Tasks, Any]:
    """Return an entry's tasks, with instances, and the model that requested them. `rows`: filled with the inputs used."""
    entry = spec.suite.tasks[spec.entry]
    places = (work.root, spec.model_dir)
    with shown_inputs.record_inputs(rows, leave_out=places):
        tasks = run.entry_tasks(
            spec.suite, entry, model=spec.model, model_dir=spec.model_dir, cache=work.cache
        )
    rows.clear()  # lm-eval's index opens each YAML of include_path, which only matters if that fails
    lm = stub_model.make_stub_model(spec.model_dir, spec.model)

    def on_load(name: str, task: Any) -> None:
        if conversations.check_task(name, task, lm, chat=bool(spec.suite.apply_chat_template)):
            stub_model.keep_histories(lm)

    tasks.on_load = on_load
    try:
        if spec.suite.apply_chat_template:
            # raises ValueError for a name that the tokenizer lacks
            lm.chat_template(spec.suite.apply_chat_template)
        with shown_inputs.record_inputs(rows, leave_out=places):
            run.run_entry(lm, spec.suite, entry, tasks, seed_torch=True)
    except run.RequestsBuiltError:
        pass
    except JobError:
        raise
    except ValueError as error:  # lm-eval refuses mutually exclusive settings
        raise OperatorError(f"task {entry.name}: {one_line(error)}") from error
    return tasks, lm


def _write_shown(spec: BuildSpec, tasks: Iterable[Any], rows: dict[str, str]) -> str:
    """Write what the build used, with packages and revisions of data sets and models, and return the file's name."""
    hub = {task_paths.data_source({**vars(t.config), "dataset_path": t.DATASET_PATH}).hub for t in tasks} - {
        ""
    }
    rows |= shown_inputs.package_rows((*shown_inputs.ENGINES, spec.model.engine))
    rows |= shown_inputs.revision_rows(hub, "datasets")
    rows |= shown_inputs.revision_rows(source_files.hub_models(spec.model).values(), "models")
    data = json.dumps(rows, sort_keys=True, indent=0).encode()
    name = f"shown-{hashlib.sha256(data).hexdigest()[:12]}.json"
    write_atomic(shown_file(spec.out_dir, name), data)
    return name


def _write_set(spec: BuildSpec, lm: Any, name: str, task: Any, *, score_key: str, shown: str) -> str:
    instances = list(task.instances)
    judged = asks_judge(task)
    if judged and not spec.suite.tasks[spec.entry].judge:
        raise OperatorError(
            f"task {name} asks a judge: set `judge = true` in its [[task]] of suite {spec.suite.name}"
        )
    head, pieces = describe_requests(lm, name, instances, conversations.follow_up_of(task))
    for why in _unanswerable(lm, task, head, pieces) if lm.backend == "causal" and not head.text else ():
        raise OperatorError(f"task {name}: {why}")
    body = encode_requests(head, pieces)
    sampled = any(_sampled(s) for s in head.settings)
    key, asks = result_keys.request_digests(lm, spec.suite, spec.model, body, sampled=sampled, head=head)
    relative = f"{slug(name)}-{key[:12]}"
    place = Path(spec.out_dir) / relative
    caps = [head.max_gen_tokens[p.settings] if p.settings >= 0 else 0 for p in pieces]
    turns = [(cap, p.lengths(cap)) for p, cap in zip(pieces, caps, strict=True)]
    manifest = RequestSetManifest(
        task=name,
        key=key,
        asks=asks,
        score_key=score_key,
        shown=shown,
        executes=runs_programs(task) or judged,
        documents=len({i.doc_id for i in instances}),
        requests=head.requests,
        repeats=max(int(i.repeats or 1) for i in instances),
        sampled=sampled,
        prompt_tokens=sum(length for _, lengths in turns for length in lengths),
    )
    there = request_set_manifest(place)
    with contextlib.suppress(FileNotFoundError, ValueError):
        if read_record(there, RequestSetManifest) == manifest:
            return relative
    write_atomic(place / "requests", body)
    write_record(there, manifest)
    return relative


def _unanswerable(lm: Any, task: Any, head: RequestsHead, pieces: Sequence[Piece]) -> Iterator[str]:
    """Yield why lm-eval's hf class would always refuse these requests."""
    from lm_eval.models.utils import normalize_gen_kwargs  # noqa: PLC0415

    most = head.max_length
    if head.settings and lm.eot_token_id is None:
        yield "the tokenizer has no eos_token (tokenizer_config.json), which ends an answer"
    for known, cap in zip(map(normalize_gen_kwargs, head.settings), head.max_gen_tokens, strict=True):
        if cap >= most:
            yield f"max_gen_toks {cap} (lm-eval's default: 256) leaves no room for a prompt in the model's {most} tokens"
        if known["do_sample"] and known.get("temperature", 0.0) <= 0:
            yield "its generation_kwargs have do_sample: true and no temperature above 0"
    odd = [p for p in pieces if p.kind == "loglikelihood" and not 0 < len(p.continuation) <= most]
    # of a group with one context, lm-eval only runs the first
    key = (lambda p: (*p.context, *p.continuation[:-1])) if head.grouped else (lambda p: p.index)
    first = {key(p): p for p in reversed(pieces)} if odd else {}
    field = "doc_to_choice" if task.OUTPUT_TYPE == "multiple_choice" else "doc_to_target"
    for p in (p for p in odd if first[key(p)] is p):
        yield f"{field} of document {p.document} has {len(p.continuation)} tokens: 1 to {most} can be scored"


def describe_requests(
    lm: Any, name: str, instances: Sequence[Any], follow_up: str = ""
) -> tuple[RequestsHead, list[Piece]]:
    """Return a leaf task's instances as pieces, cloned for repeats like in lm-eval. `follow_up`: as in the head."""
    from lm_eval.models.utils import normalize_gen_kwargs  # noqa: PLC0415

    settings: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    pieces: list[Piece] = []
    order: dict[str, list[int]] = {}
    likelihoods = iter(
        stub_model.tokens_asked(lm, "loglikelihood", chosen)
        if (chosen := [i for i in instances if i.request_type == "loglikelihood"])
        else ()
    )
    index = 0  # in build order, with clones
    for instance in instances:
        forms = list(_forms(lm, instance, likelihoods, settings, numbers))
        conversation = conversations.conversation_of(lm, name, instance, follow_up) if follow_up else None
        for _ in range(int(instance.repeats or 1)):
            order.setdefault(instance.request_type, []).append(index)
            pieces += [replace(form, index=index, conversation=conversation) for form in forms]
            index += 1
    head = RequestsHead(
        task=name,
        requests=index,
        digests=result_keys.instances_digest(instances, follow_up),
        order=order if len(order) > 1 else {},
        settings=settings,
        max_gen_tokens=[int(normalize_gen_kwargs(s, lm.max_gen_toks)["max_gen_toks"]) for s in settings],
        text=bool(lm.is_text),
        grouped=lm.backend == "causal" and bool(lm.logits_cache),
        max_length=int(lm.max_length),
        follow_up=follow_up,
        unasked=sorted(set(range(index)) - {piece.index for piece in pieces}),
    )
    return head, pieces


def _forms(
    lm: Any,
    instance: Any,
    likelihoods: Iterator[Any],
    settings: list[dict[str, Any]],
    numbers: dict[str, int],
) -> Iterator[Piece]:
    """Yield the pieces of one instance; the caller sets their index."""
    kind: Kind = instance.request_type
    document = int(instance.doc_id)
    make = functools.partial(Piece, kind=kind, index=0, document=document)
    if kind == "loglikelihood":
        strings, context, continuation = next(likelihoods)
        length = len(context) + len(continuation)
        if lm.is_text:
            context, continuation = strings
        yield make(context=context, continuation=continuation, length=length)
    elif kind == "loglikelihood_rolling":
        windows = stub_model.tokens_asked(lm, "loglikelihood_rolling", [instance])
        if lm.is_text:
            length = sum(len(c) + len(t) for _, c, t in windows)
            yield make(context=instance.args[0], length=length)
            return
        for number, (_, context, continuation) in enumerate(windows):
            length = len(context) + len(continuation)
            yield make(context=context, continuation=continuation, window=number, length=length)
    elif kind == "generate_until":
        context, how = instance.args
        text = json.dumps(how, sort_keys=False)
        if text not in numbers:
            numbers[text] = len(settings)
            settings.append(dict(how))
        yield make(context=context, length=len(lm.tok_encode(context)), settings=numbers[text])
    else:
        raise OperatorError(f"requests of type {kind!r} are not supported")


def runs_programs(task: Any) -> bool:
    """Return whether a task's metric uses the code seam, or lm-eval marks the task as running code."""
    return bool(getattr(task, "UNSAFE_CODE", False)) or any(hooks.uses_seam(f) for f in _scoring(task))


def asks_judge(task: Any) -> bool:
    """Return whether a task's metric uses the judge seam."""
    return any(hooks.uses_seam(f, hooks.JUDGES) for f in _scoring(task))


def _scoring(task: Any) -> list[Any]:
    holders = (task.config, type(task))
    metrics = getattr(task, "_metric_fn_list", {}).values()
    return [*metrics, *(getattr(holder, "process_results", None) for holder in holders)]


def _sampled(settings: dict[str, Any]) -> bool:
    from lm_eval.models.utils import normalize_gen_kwargs  # noqa: PLC0415

    return bool(normalize_gen_kwargs(settings).get("do_sample"))
