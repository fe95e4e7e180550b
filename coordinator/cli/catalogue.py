"""`evalspan ls | validate`: suites, tasks and groups with what each holds; a check of a suite file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.app import (
    CONFIG,
    JSON,
    WORK_DIR,
    AtTerminal,
    app,
    say,
    say_aside,
    settings_of,
    show_json,
    stdout,
)
from coordinator.cli.lm_eval_flags import LmEvalCommand
from coordinator.cli.suite_options import takes_suite
from coordinator.errors import EvalspanError, OperatorError

if TYPE_CHECKING:
    from coordinator.config.schema import Config
    from coordinator.evaluation.job_specs import Site
    from coordinator.intake.catalogue import Holding
    from coordinator.intake.one_off import SuiteOptions
    from evaljobs.contract.specs import SuiteSpec
    from evaljobs.lmeval.catalogue import Described

KINDS = ("suites", "tasks", "groups")
WORDS = {
    "multiple_choice": "multiple choice",
    "generate_until": "generation",
    "loglikelihood": "likelihood",
    "loglikelihood_rolling": "rolling likelihood",
}
DATA = {"function": "data made by code", "unknown": "data unknown"}


@app.command("ls")
def list_known(
    kind: Annotated[str | None, typer.Argument(help="tasks, suites or groups; default: suites.")] = None,
    pattern: Annotated[str | None, typer.Argument(help="A glob, or a part of a name.")] = None,
    suite: Annotated[
        list[str] | None, typer.Option("--suite", "-s", help="Also this suite file and its tasks.")
    ] = None,
    include_path: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, file_okay=False, resolve_path=True, help="Also the tasks of this folder's YAMLs."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also members, data splits and files.")
    ] = False,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    as_json: JSON = False,
) -> None:
    """List suites, lm-eval's tasks and its groups, with what each holds. Lists are never cut.

    The first call in a work folder reads lm-eval's task files, in about half a minute. Examples:

    evalspan ls

    evalspan ls tasks "arc_*"

    evalspan ls groups mmlu -v

    evalspan ls tasks --suite ./mine.toml --json
    """
    from coordinator.intake import catalogue, from_settings

    if kind is not None and kind not in KINDS:
        if pattern is not None:
            raise OperatorError(f"`evalspan ls` lists {', '.join(KINDS)}, not {kind!r}")
        kind, pattern = None, kind
    settings = settings_of(config, work_dir)
    site = from_settings.site_of(settings)
    version = from_settings.lm_eval_version(settings, site, needs=("lm_eval",))()
    suites = _suites(settings, suite or [])
    folders = [folder for one in suites.values() for folder in one.include_path]
    folders += [str(folder) for folder in include_path or []]
    own = _own_tasks(site, version)
    known = catalogue.with_folders(own, dict.fromkeys(folders))
    groups = {name for name, one in known.items() if one.kind in catalogue.GROUPS}
    names = {"suites": list(suites), "tasks": sorted(known.keys() - groups), "groups": sorted(groups)}
    asked = (kind,) if kind else KINDS if pattern else ("suites",)
    found = {one: catalogue.matching(pattern or "*", names[one]) for one in asked}
    if not any(found.values()):
        near = catalogue.nearest(pattern or "", [name for one in asked for name in names[one]])
        raise OperatorError(f"none of the {', '.join(asked)} matches {pattern!r}{near}")
    held = {name: catalogue.holdings(suites[name], own) for name in found.get("suites", ())}
    if as_json:
        shown: dict[str, Any] = {
            one: [_row(name, known) for name in found[one]] for one in found if one != "suites"
        }
        if "suites" in found:
            shown["suites"] = [{"name": n, "tasks": [asdict(h) for h in held[n]]} for n in held]
        show_json({"schema_version": 1, "lm_eval": version, "pattern": pattern, **shown})
        return
    _show(found, suites, held, known, verbose=verbose)
    counts = [f"{len(found[one]):,} of {len(names[one]):,} {one}" for one in found]
    say_aside(f"{', '.join(counts)} (lm-eval {version})")
    if asked == ("suites",):
        more = [f"{len(names[one]):,} {one}: evalspan ls {one} PATTERN" for one in KINDS[1:]]
        say_aside("; ".join(more))


def _show(
    found: Mapping[str, Sequence[str]],
    suites: Mapping[str, SuiteSpec],
    held: Mapping[str, Sequence[Holding]],
    known: Mapping[str, Described],
    *,
    verbose: bool,
) -> None:
    for name, holdings in held.items():
        _show_suite(suites[name], holdings)
    for one in KINDS[1:]:
        for line in table([_cells(name, known, verbose=verbose) for name in found.get(one, ())], _width()):
            say(line)
    if any(one.missing for holdings in held.values() for one in holdings):
        say_aside(
            "to fetch data: evalspan prepare --suite NAME --tokenizer CHECKPOINT, where there is internet"
        )


def _own_tasks(site: Site, version: str) -> dict[str, Described]:
    from coordinator.intake.catalogue import own_tasks

    with AtTerminal().busy(f"reading the task files of lm-eval {version}"):
        return own_tasks(site, version)


def _suites(settings: Config, files: Sequence[str]) -> dict[str, SuiteSpec]:
    """Shipped suites, those of [watch], and `files`; a suite of the settings that does not load is left out, with its reason."""
    from coordinator.config import toml
    from coordinator.intake import suites

    watch = settings.watch
    watched = [*([watch.suite] if watch.suite else []), *map(str, watch.suites)]
    found = {name: suites.load_suite(name) for name in suites.names()}
    for file in dict.fromkeys((*watched, *files)):
        try:
            loaded = suites.load_suite(file)
        except EvalspanError as error:
            if file in files:
                raise
            say(f"[watch] {error}", "yellow", err=True)
            continue
        name = file if loaded.name in found and toml.is_file_name(file) else loaded.name
        found[name] = loaded
    return found


def _row(name: str, known: Mapping[str, Described]) -> dict[str, Any]:
    return {"name": name, **asdict(known[name])}


def _cells(name: str, known: Mapping[str, Described], *, verbose: bool) -> tuple[str, ...]:
    """Name, kind, and what it holds."""
    from coordinator.intake.catalogue import GROUPS, leaves

    one = known[name]
    if one.kind in GROUPS:
        tasks = len(leaves(name, known))
        held = f"{tasks} task{'s' * (tasks != 1)}: {', '.join(one.members)}"
        if not verbose and len(one.members) > 6:
            held = f"{tasks} tasks, {len(one.members)} members (-v names them)"
        return name, one.kind, held
    held = "; ".join(
        filter(None, [", ".join(one.metrics), " ".join(filter(None, [one.dataset, one.subset]))])
    )
    if verbose:
        more = [f"split {one.split}" * bool(one.split), f"{one.num_fewshot}-shot", *one.files, one.yaml]
        held = "; ".join(filter(None, [held, *more]))
    return name, WORDS.get(one.kind, one.kind), held


def _show_suite(suite: SuiteSpec, held: Sequence[Holding]) -> None:
    say(_heading(suite, held))
    for line in table([_holding_cells(one) for one in held], _width(), indent=4):
        say(line)


def _heading(suite: SuiteSpec, held: Sequence[Holding]) -> str:
    tasks = sum(one.tasks for one in held)
    missing = sum(one.data == "missing" for one in held)
    count = f"{len(held)} task{'s' * (len(held) != 1)}"
    leaf = f" ({tasks} with the members of groups)" if tasks != len(held) else ""
    return f"{suite.name}: {count}{leaf}{f'; data of {missing} to fetch' if missing else ''}"


def _holding_cells(one: Holding) -> tuple[str, ...]:
    count = "?" if one.documents is None else f"{'≤ ' * one.at_most}{one.documents:,}"
    shots = "?" if one.num_fewshot is None else str(one.num_fewshot)
    data = (
        DATA.get(one.data, f"{one.data} data") if not one.missing else f"to fetch: {', '.join(one.missing)}"
    )
    kinds = ", ".join(WORDS.get(kind, kind) for kind in one.kinds)
    held = "; ".join(filter(None, [kinds, ", ".join(one.metrics), data]))
    return one.task, f"{shots}-shot", f"{count} documents", held


def _width() -> int:
    return stdout().width


def table(rows: Sequence[tuple[str, ...]], width: int, indent: int = 2) -> Iterator[str]:
    """Lines of aligned columns; nothing is cut.

    The last column is wrapped into the rest of the width. A cell that is wider than its column has
    the next ones on a line of their own.
    """
    count = max((len(row) for row in rows), default=0)
    most = [max(len(row[i]) for row in rows) for i in range(count - 1)]
    columns = [min(longest, max(12, width // 3)) for longest in most]
    for row in rows:
        line = " " * indent
        start = indent
        for cell, column in zip(row, columns, strict=False):
            if line.strip() and len(line) + 2 > start:
                yield line.rstrip()
                line = " " * start
            line = line.ljust(start) + cell
            start += column + 2
        # where little is left of the width, the last column begins on a line of its own
        margin = start if start <= 0.6 * width else indent + 4
        if len(line) + 2 > margin:
            yield line.rstrip()
            line = ""
        rest = textwrap.wrap(row[-1], max(width - margin, 20), break_long_words=False, break_on_hyphens=False)
        for text in rest or [""]:
            yield (line.ljust(margin) + text).rstrip()
            line = ""


@app.command(cls=LmEvalCommand)
@takes_suite
def validate(
    chosen: SuiteOptions,
    checkpoint: Annotated[
        str | None, typer.Option("--tokenizer", help="Also check this checkpoint: a folder, or a Hub id.")
    ] = None,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    as_json: JSON = False,
) -> None:
    """Check a suite as `eval` does before it asks the cluster, and list what it holds.

    Exit code 0: valid; 2: one line says what to change. Builds and submits nothing. Examples:

    evalspan validate --suite ./mine.toml

    evalspan validate --suite core --tokenizer ckpt/step-1000

    evalspan validate --tasks mine --include-path mytasks
    """
    from coordinator import api
    from coordinator.intake import catalogue, from_settings, hub, one_off, request_sets
    from coordinator.intake.checkpoint import inspect
    from coordinator.intake.validate import inspected, judge_for

    settings = settings_of(config, work_dir)
    site = from_settings.site_of(settings)
    version = from_settings.lm_eval_version(settings, site)
    allow_bin = settings.checkpoint.allow_bin
    loaded = from_settings.settled(settings, one_off.suite_of(chosen, settings.watch.suite))
    judge_for(loaded, partial(from_settings.judge_options, settings))
    folder, spec, convert = checkpoint, None, None
    if checkpoint is not None:
        folder = hub.local_folder(checkpoint, say_aside, allow_bin=allow_bin, weights=False)
        if folder == checkpoint:
            spec, convert = inspected(folder, allow_bin=allow_bin, convert=settings.checkpoint.convert)
        else:  # the Hub's: `eval` fetches and checks the weights
            spec = inspect(folder, weights=False)
    prepare = api.prepare_options(chosen, settings, config, work_dir)
    api.check_suite(loaded, settings, AtTerminal(), prepare, spec.source if spec else None, convert=convert)
    own = _own_tasks(site, version())
    held = catalogue.holdings(loaded, own)
    built: dict[str, dict[str, str]] = {}
    if spec is not None and convert is None:  # a raw checkpoint has no tokenizer yet
        model = from_settings.model_options(settings)
        inputs = from_settings.inputs_for(site, version)(loaded, model)
        built = request_sets.at_hand(loaded, spec, model, inputs, site)
    if as_json:
        rows = [{**asdict(one), "request_sets": sorted(built.get(one.task, ()))} for one in held]
        show_json({"schema_version": 1, "suite": loaded.name, "tasks": rows})
        return
    _show_suite(loaded, held)
    if spec is not None and convert is None:
        say(
            f"request sets: {len(built)} of {len(held)} tasks are built; `evalspan prepare` builds the others"
        )
    unchecked = "whether the cluster takes its jobs"
    unchecked += "" if folder == checkpoint else f", the weights of {checkpoint}"
    unchecked += "" if spec else ", the checkpoint (--tokenizer)"
    say(f"{loaded.name} is valid; not checked: {unchecked}", "green")
