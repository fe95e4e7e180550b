"""`evalspan ls | validate | import-tasks`: suites, tasks and groups with their contents; checking a suite file, or making one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from coordinator.errors import EvalspanError, OperatorError
from coordinator.interface.cli.app import (
    Command,
    TableCommand,
    TerminalMessages,
    argument,
    command,
    flag,
    option,
    print_text,
    print_to_stderr,
    show_json,
    stdout_console,
)
from coordinator.interface.cli.lm_eval_flags import LmEvalCommand
from coordinator.interface.cli.suite_options import SuiteCommand

if TYPE_CHECKING:
    from coordinator.decide.evaluation.job_specs import Site
    from coordinator.intake.catalogue import Holding
    from coordinator.site.config.schema import Config
    from evaljobs.contract.specs import SuiteSpec
    from evaljobs.lmeval.catalogue import TaskDescription

KINDS = ("suites", "tasks", "groups")
OUTPUT_TYPE_WORDS = {
    "multiple_choice": "multiple choice",
    "generate_until": "generation",
    "loglikelihood": "likelihood",
    "loglikelihood_rolling": "rolling likelihood",
}
DATA_WORDS = {"function": "data made by code", "unknown": "data unknown"}


@command("ls")
class ListKnown(TableCommand):
    """List suites, lm-eval's tasks and its groups, with their contents. Lists are never truncated.

    The first call in a work folder takes longer, to read lm-eval's task files.

    Examples:

    evalspan ls

    evalspan ls tasks "arc_*"

    evalspan ls groups mmlu -v

    evalspan ls tasks --suite ./mine.toml --json
    """

    kind: str | None = argument("tasks, suites or groups; default: suites.", None)
    pattern: str | None = argument("A glob, or a part of a name.", None)
    suite: list[str] | None = option("Include this suite file and its tasks.", "--suite", "-s")
    include_path: list[Path] | None = option(
        "Include the tasks of this folder's YAML files.", exists=True, file_okay=False, resolve_path=True
    )
    verbose: bool = flag("Show members, data splits and files.", "--verbose", "-v")

    def run(self) -> None:
        from coordinator.intake import catalogue, from_settings

        kind, pattern = self.kind, self.pattern
        if kind is not None and kind not in KINDS:
            if pattern is not None:
                raise OperatorError(f"`evalspan ls` lists {', '.join(KINDS)}, not {kind!r}")
            kind, pattern = None, kind
        settings = self.settings()
        site = from_settings.site_of(settings)
        version = from_settings.lm_eval_version(settings, site, needs=("lm_eval",))()
        suites = _suites(settings, self.suite or [])
        folders = [folder for one in suites.values() for folder in one.include_path]
        folders += map(str, self.include_path or [])
        own = _own_tasks(site, version)
        known = catalogue.with_folders(own, dict.fromkeys(folders))
        groups = {name for name, one in known.items() if one.kind in catalogue.GROUPS}
        names = {"suites": list(suites), "tasks": sorted(known.keys() - groups), "groups": sorted(groups)}
        asked = (kind,) if kind else KINDS if pattern else ("suites",)
        found = {one: catalogue.matching_names(pattern or "*", names[one]) for one in asked}
        if not any(found.values()):
            near = catalogue.nearest_names(pattern or "", [name for one in asked for name in names[one]])
            raise OperatorError(f"none of the {', '.join(asked)} matches {pattern!r}{near}")
        held = {name: catalogue.suite_holdings(suites[name], own) for name in found.pop("suites", ())}
        if self.as_json:
            shown: dict[str, Any] = {
                one: [{"name": name, **asdict(known[name])} for name in found[one]] for one in found
            }
            if "suites" in asked:
                shown["suites"] = [{"name": n, "tasks": [asdict(h) for h in held[n]]} for n in held]
            show_json({"schema_version": 1, "lm_eval": version, "pattern": pattern, **shown})
            return
        for name, holdings in held.items():
            _show_suite(suites[name], holdings)
        for listed in found.values():
            _show_rows(_cells(name, known, verbose=self.verbose) for name in listed)
        if any(one.missing for holdings in held.values() for one in holdings):
            print_to_stderr(
                "to fetch data: evalspan prepare --suite NAME --tokenizer CHECKPOINT, where there is internet"
            )
        counted = {"suites": held, **found} if "suites" in asked else found
        counts = [f"{len(counted[one]):,} of {len(names[one]):,} {one}" for one in counted]
        print_to_stderr(f"{', '.join(counts)} (lm-eval {version})")
        if asked == ("suites",):
            more = [f"{len(names[one]):,} {one}: evalspan ls {one} PATTERN" for one in KINDS[1:]]
            print_to_stderr("; ".join(more))


def _own_tasks(site: Site, version: str) -> dict[str, TaskDescription]:
    from coordinator.intake.catalogue import own_tasks

    with TerminalMessages().busy(f"reading the task files of lm-eval {version}"):
        return own_tasks(site, version)


def _suites(settings: Config, files: Sequence[str]) -> dict[str, SuiteSpec]:
    """Return shipped suites, those of [watch], and `files`. A suite of the settings that does not load is skipped."""
    from coordinator.intake import suites
    from coordinator.site.config import toml

    watch = settings.watch
    watched = [*([watch.suite] if watch.suite else []), *map(str, watch.suites)]
    found = {name: suites.load_suite(name) for name in suites.suite_names()}
    for file in dict.fromkeys((*watched, *files)):
        try:
            loaded = suites.load_suite(file)
        except EvalspanError as error:
            if file in files:
                raise
            print_text(f"[watch] {error}", "yellow", err=True)
            continue
        name = file if loaded.name in found and toml.is_file_name(file) else loaded.name
        found[name] = loaded
    return found


def _cells(name: str, known: Mapping[str, TaskDescription], *, verbose: bool) -> tuple[str, ...]:
    from coordinator.intake.catalogue import GROUPS, leaf_tasks

    one = known[name]
    if one.kind in GROUPS:
        tasks = len(leaf_tasks(name, known))
        if not verbose and len(one.members) > 6:
            return name, one.kind, f"{tasks} tasks, {len(one.members)} members (-v names them)"
        return name, one.kind, f"{tasks} task{'s' * (tasks != 1)}: {', '.join(one.members)}"
    held = [", ".join(one.metrics), " ".join(filter(None, [one.dataset, one.subset]))]
    if verbose:
        held += [f"split {one.split}" * bool(one.split), f"{one.num_fewshot}-shot", *one.files, one.yaml]
    return name, OUTPUT_TYPE_WORDS.get(one.kind, one.kind), "; ".join(filter(None, held))


def _show_suite(suite: SuiteSpec, held: Sequence[Holding]) -> None:
    tasks = sum(one.tasks for one in held)
    missing = sum(one.data == "missing" for one in held)
    count = f"{len(held)} task{'s' * (len(held) != 1)}"
    leaf = f" ({tasks} with the members of groups)" if tasks != len(held) else ""
    print_text(f"{suite.name}: {count}{leaf}{f'; data of {missing} to fetch' if missing else ''}")
    for group, ones in groupby(zip(suite.tasks, held, strict=True), key=lambda pair: pair[0].group):
        if group:
            print_text(f"  {group}")
        _show_rows(_holding_cells(one) for _, one in ones)


def _holding_cells(one: Holding) -> tuple[str, ...]:
    count = "?" if one.documents is None else f"{'≤ ' * one.at_most}{one.documents:,}"
    shots = "?" if one.num_fewshot is None else str(one.num_fewshot)
    data = (
        DATA_WORDS.get(one.data, f"{one.data} data")
        if not one.missing
        else f"to fetch: {', '.join(one.missing)}"
    )
    kinds = ", ".join(OUTPUT_TYPE_WORDS.get(kind, kind) for kind in one.kinds)
    held = "; ".join(filter(None, [kinds, ", ".join(one.metrics), data]))
    return one.task, f"{shots}-shot", f"{count} documents", held


def _show_rows(rows: Iterable[tuple[str, ...]]) -> None:
    """Print aligned columns without truncation; the last column has as many lines as it needs."""
    from coordinator.results.report.tables import Parts, Sheet

    made = list(rows)
    sheet = Sheet("", *[""] * max(map(len, made), default=0))
    for name, *cells, held in made:
        sheet.add(f"  {name}", *cells, Parts(held))
    stdout_console().print(sheet)


@command(cls=LmEvalCommand)
class Validate(SuiteCommand):
    """Check a suite as `eval` does before it contacts the cluster, and list its contents.

    Exit code 0: valid; 2: invalid, with a line that says what to change. Builds and submits nothing.

    Examples:

    evalspan validate --suite ./mine.toml

    evalspan validate --suite core --tokenizer ckpt/step-1000

    evalspan validate --tasks mine --include-path mytasks
    """

    checkpoint: str | None = option("Check this checkpoint as well: a folder, or a Hub id.", "--tokenizer")

    def run(self) -> None:
        from coordinator.intake import suites

        settings, checkpoint = self.settings(), self.checkpoint
        suite = suites.suite_of(self.chosen, settings.watch.suite)  # refuse it before importing more

        from coordinator import api
        from coordinator.intake import catalogue, from_settings, hub, request_sets
        from coordinator.intake.checkpoint import inspect_checkpoint

        loaded = from_settings.chosen_suite(settings, suite)
        site = from_settings.site_of(settings)
        version = from_settings.lm_eval_version(settings, site)
        allow_bin = settings.checkpoint.allow_bin
        from_settings.judge_for(settings, loaded)
        folder, spec, raw = checkpoint, None, settings.checkpoint.convert
        if checkpoint is not None:
            folder = hub.local_folder(checkpoint, print_to_stderr, allow_bin=allow_bin, weights=False)
            if folder == checkpoint:
                spec = inspect_checkpoint(folder, allow_bin=allow_bin, convert=raw)
            else:  # from the Hub: `eval` fetches and checks the weights
                spec = inspect_checkpoint(folder, weights=False)
        prepare = api.prepare_options(self.chosen, settings, self.config, self.work_dir)
        source, convert = spec.source if spec else None, raw if spec and spec.is_raw else None
        api.check_suite(loaded, settings, TerminalMessages(), prepare, source, convert=convert)
        held = catalogue.suite_holdings(loaded, _own_tasks(site, version()))
        built: dict[str, dict[str, str]] = {}
        if spec is not None and convert is None:  # a raw checkpoint has no tokenizer yet
            model = from_settings.model_options(settings)
            inputs = from_settings.inputs_for(site, version)(loaded, model)
            built = request_sets.sets_at_hand(loaded, spec, model, inputs, site)
        if self.as_json:
            rows = [{**asdict(one), "request_sets": sorted(built.get(one.task, ()))} for one in held]
            show_json({"schema_version": 1, "suite": loaded.name, "tasks": rows})
            return
        _show_suite(loaded, held)
        if spec is not None and convert is None:
            of = f"{len(built)} of {len(held)} tasks are built"
            print_text(f"request sets: {of}; `evalspan prepare` builds the others")
        unchecked = "whether the cluster accepts its jobs"
        unchecked += "" if folder == checkpoint else f", the weights of {checkpoint}"
        unchecked += "" if spec else ", the checkpoint (--tokenizer)"
        print_text(f"{loaded.name} is valid; not checked: {unchecked}", "green")


@command("import-tasks")
class ImportTasks(Command):
    """Print a suite of lm-eval's tasks for a task list of lighteval or inspect_evals.

    The data sets are the same; prompts and metrics are lm-eval's, so scores are not those of the other tool.

    Examples:

    evalspan import-tasks open_llm_leaderboard_tasks.txt

    evalspan import-tasks list.txt --skip-unknown
    """

    file: Path = argument("Lines such as leaderboard|arc:challenge|25, gsm8k|5, inspect_evals/gsm8k.")
    skip_unknown: bool = flag("Omit tasks without an equal in lm-eval, naming them on standard error.")

    def run(self) -> None:
        from coordinator.intake.foreign_tasks import read_task_list, suite_text
        from coordinator.site.config.toml import read_text
        from evaljobs.contract.paths import slug

        found = read_task_list(read_text(self.file))
        missing = f"lm-eval has no equal of {', '.join(found.unknown)}" if found.unknown else ""
        if not found.tasks:
            raise OperatorError(f"{self.file}: {missing or 'it names no task'}")
        if missing and not self.skip_unknown:
            raise OperatorError(f"{self.file}: {missing}: remove them, or say --skip-unknown")
        if missing:
            print_to_stderr(missing)
        typer.echo(suite_text(slug(self.file.stem), found.tasks), nl=False)
