"""`evalspan eval | rescore | prepare`: evaluate one checkpoint, score its answers again, or build a suite's request sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from coordinator.errors import ExitCode, OperatorError
from coordinator.interface.cli import lm_eval_flags
from coordinator.interface.cli.app import (
    EVALUATION,
    REQUIRED,
    VERBOSE,
    Console,
    TableCommand,
    TerminalMessages,
    argument,
    command,
    flag,
    option,
    print_text,
    print_to_stderr,
    refuse_output,
    report_write_errors,
    show_json,
    stdout_console,
)
from coordinator.interface.cli.lm_eval_flags import LmEvalCommand
from coordinator.interface.cli.suite_options import LM_EVAL, SuiteCommand

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from coordinator.api import Results

SITE_PANEL = {"rich_help_panel": "Where it runs"}
CHECKPOINT = "Folder with config.json, safetensors and tokenizer, or a Hub id."
STEP = option("Training step, for reports and trackers; default: from the folder's name.", min=0)


@command("eval", cls=LmEvalCommand)
class Evaluate(SuiteCommand):
    """Evaluate one checkpoint on one suite and print the makespan and the scores.

    If it is killed, run the same command again to resume.

    Examples:

    evalspan eval ckpt/step-1000 --suite core --cluster slurm --partition gpu

    evalspan eval ckpt/step-1000 --tasks hellaswag,arc_easy --limit 10

    evalspan eval --model_args pretrained=ckpt/step-1000,dtype=float32 --tasks arc_easy --num_fewshot 5

    evalspan eval ckpt/step-1000 --suite core --check-fast 50
    """

    checkpoint: str | None = argument(CHECKPOINT, None)
    cluster: str | None = option("local or slurm.", **SITE_PANEL)
    partition: str | None = option("Slurm partition of the GPU jobs.", **SITE_PANEL)
    account: str | None = option("Slurm account.", **SITE_PANEL)
    qos: str | None = option("Slurm QOS.", **SITE_PANEL)
    slots: int | None = option("Maximum number of concurrent trials.", min=1, **SITE_PANEL)
    shards_per_task: int | None = option("Force this many shards per task.", min=1, **SITE_PANEL)
    step: int | None = STEP
    model: str | None = option("hf, vllm, sglang or local-completions.", **LM_EVAL)
    model_args: list[str] | None = option(
        "Model arguments; pretrained= names the checkpoint.", metavar="KEY=VALUE,…", **LM_EVAL
    )
    device: str | None = option("cuda or cpu.", **LM_EVAL)
    output_path: Path | None = option("Folder for lm_eval's own files of results and samples.", **LM_EVAL)
    check_fast: int | None = option(
        "Evaluate N documents of each task in both modes and print differences.", min=1, metavar="N"
    )
    fresh: bool = flag("Build, infer and score again, without reusing earlier evaluations.", "--fresh")
    verbose: bool = VERBOSE

    def run(self) -> None:
        if (out := self.output_path) is not None:
            refuse_output(out.parent if out.suffix == ".json" else out)
        if self.check_fast is not None:
            self._check_fast(self.check_fast)
        else:
            found = self._evaluated(self.chosen)
            if self.output_path is not None and found.scores:
                from coordinator.results.trackers import lm_eval_files

                with report_write_errors(self.output_path):
                    print_to_stderr(
                        f"wrote {lm_eval_files.write_lm_eval_files(found.folder, self.output_path)[-1]}"
                    )
            _show(self, found, verbose=self.verbose)

    def _evaluated(self, suite: Mapping[str, Any]) -> Results:
        from coordinator import api
        from coordinator.interface.cli.screen.live_screen import Screen

        pretrained, trial = lm_eval_flags.trial_settings(self.model, self.model_args, self.device)
        site = {f"cluster.{name}": getattr(self, name) for name in ("partition", "account", "qos")}
        return api.evaluate(
            lm_eval_flags.checkpoint_argument(self.checkpoint, pretrained),
            **suite,
            step=self.step,
            slots=self.slots,
            shards_per_task=self.shards_per_task,
            fresh=self.fresh,
            config=self.config,
            work_dir=self.work_dir,
            settings={"cluster.kind": self.cluster, **site, **trial},
            observer=Screen(Console(stderr=self.as_json)),
        )

    def _check_fast(self, documents: int) -> None:
        """Evaluate in fast mode, which may be refused, then in exact mode; exit code 1 if scores are missing."""
        from coordinator.results.report import mode_check

        chosen = self.chosen
        if chosen.keys() & {"mode", "limit"}:
            raise OperatorError("--check-fast N evaluates N documents in both modes: omit --mode and --limit")
        found: dict[str, Results] = {}
        for mode in ("fast", "exact"):
            budget = chosen.get("token_budget") if mode == "fast" else None
            more = {"mode": mode, "limit": documents, "token_budget": budget}
            found[mode] = self._evaluated(chosen | more)
            if not found[mode].complete:
                _show(self, found[mode], verbose=self.verbose)
        made = mode_check.check_modes(
            {mode: found[mode].folder for mode in ("exact", "fast")},
            {mode: found[mode].raw for mode in ("exact", "fast")},
        )
        if self.as_json:
            show_json(made.model_dump(mode="json"))
        else:
            mode_check.show_mode_check(stdout_console(), made)


def _show(typed: TableCommand, found: Results, *, verbose: bool) -> None:
    """Print results; exit code 130 if the evaluation was cancelled, 1 if scores are missing."""
    from coordinator.interface.cli.screen.training_standings import training_lines
    from coordinator.results.report.render import show_report
    from coordinator.results.report.tables import print_parts
    from coordinator.runtime.summary import failed_job
    from evaljobs.contract.paths import EvaluationPaths

    if found.note:
        typer.echo(found.note, err=typed.as_json)
    if typed.as_json:
        changed = {"changed": found.changed} if found.changed else {}
        show_json({**found.raw, "evalspan": {**found.raw.get("evalspan", {}), **changed}})
    else:
        ran = not found.note and found.makespan_seconds is not None
        job = failed_job(EvaluationPaths(found.folder), found)
        show_report(
            stdout_console(),
            found.report,
            found.raw,
            found.gpu_hour_price,
            ran=ran,
            verbose=verbose,
            failed_job=job,
        )
        print_parts(stdout_console(), *training_lines(typed.there(), found.evaluation_id))
        results = f"Results: {found.folder / 'results.json'}\n" if found.scores else ""
        print_text(f"\n{results}Samples, logs, responses: {found.folder}")
    if found.status == "cancelled":
        raise typer.Exit(ExitCode.INTERRUPTED)
    if not found.complete:
        raise typer.Exit(ExitCode.FAILED)


@command()
class Rescore(TableCommand):
    """Score the answers of an evaluation again, with other filters, metrics, gold answers or judge, without a GPU.

    This is a new evaluation. Refused if the suite makes different requests. If it is killed, run the same command again to resume.

    Examples:

    evalspan rescore step-1000-core-1a2b3c4d

    evalspan rescore step-1000-core-1a2b3c4d --suite my.toml
    """

    evaluation: str = argument(EVALUATION)
    suite: str | None = option(
        "A suite's name or file; default: the evaluation's own, from its current files.", "--suite", "-s"
    )
    tokenizer: str | None = option(
        "Folder with the checkpoint's config and tokenizer, if the checkpoint is gone."
    )

    def run(self) -> None:
        from coordinator import api
        from coordinator.interface.cli.screen.live_screen import Screen

        found = api.rescore(
            self.evaluation,
            self.suite,
            tokenizer=self.tokenizer,
            config=self.config,
            work_dir=self.work_dir,
            observer=Screen(Console(stderr=self.as_json)),
        )
        _show(self, found, verbose=False)


@command(cls=LmEvalCommand)
class Prepare(SuiteCommand):
    """Build a suite's request sets on this machine, with data sets and metric scripts from the internet.

    Jobs run offline: they read the work folder and the Hugging Face cache.

    Example:

    evalspan prepare --suite core --tokenizer ckpt/step-1000
    """

    checkpoint: str = option("The checkpoint's folder, or a Hub id.", "--tokenizer", default=REQUIRED)

    def run(self) -> None:
        from coordinator import api

        built = api.prepare(
            self.checkpoint,
            **self.chosen,
            config=self.config,
            work_dir=self.work_dir,
            messages=TerminalMessages(),
        )
        if self.as_json:
            show_json(built)
            return
        for entry, sets in built.items():
            print_text(f"{entry}: {len(sets)} request set{'s' if len(sets) != 1 else ''}")
