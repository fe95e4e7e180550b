"""`evalspan eval | prepare`: evaluate one checkpoint, or build a suite's request sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli import lm_eval_flags
from coordinator.cli.app import (
    CONFIG,
    JSON,
    VERBOSE,
    WORK_DIR,
    AtTerminal,
    app,
    say,
    settings_of,
    show_json,
    stdout,
)
from coordinator.cli.lm_eval_flags import LmEvalCommand
from coordinator.cli.suite_options import LM_EVAL, takes_suite
from coordinator.cli.terminal import Console
from coordinator.errors import ExitCode, OperatorError

if TYPE_CHECKING:
    from coordinator.api import Results
    from coordinator.intake.one_off import SuiteOptions

SITE = "Where it runs"

CHECKPOINT_HELP = "Folder with config.json, safetensors and tokenizer, or a Hub id."
CHECKPOINT = Annotated[str, typer.Argument(help=CHECKPOINT_HELP)]
STEP = Annotated[
    int | None,
    typer.Option(min=0, help="Training step, for reports and trackers; default: by the folder's name."),
]


@app.command("eval", cls=LmEvalCommand)
@takes_suite
def evaluate(
    chosen: SuiteOptions,
    checkpoint: Annotated[str | None, typer.Argument(help=CHECKPOINT_HELP)] = None,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    cluster: Annotated[str | None, typer.Option(help="local or slurm.", rich_help_panel=SITE)] = None,
    partition: Annotated[
        str | None, typer.Option(help="Slurm partition of the GPU jobs.", rich_help_panel=SITE)
    ] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account.", rich_help_panel=SITE)] = None,
    qos: Annotated[str | None, typer.Option(help="Slurm QOS.", rich_help_panel=SITE)] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="At most this many trials at once.", rich_help_panel=SITE)
    ] = None,
    shards_per_task: Annotated[
        int | None, typer.Option(min=1, help="Force this many shards a task.", rich_help_panel=SITE)
    ] = None,
    step: STEP = None,
    model: Annotated[str | None, typer.Option(help="hf, vllm or sglang.", rich_help_panel=LM_EVAL)] = None,
    model_args: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,…",
            help="Model arguments; pretrained= names the checkpoint.",
            rich_help_panel=LM_EVAL,
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", rich_help_panel=LM_EVAL)] = None,
    check_fast: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Evaluate N documents of each task in both modes and print differences."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Build, ask and score again, whatever earlier evaluations have.")
    ] = False,
    verbose: VERBOSE = False,
    as_json: JSON = False,
) -> None:
    """Evaluate one checkpoint on one suite and print the makespan and the scores.

    Killed and run again, it goes on where it stood. Examples:

    evalspan eval ckpt/step-1000 --suite core --cluster slurm --partition gpu

    evalspan eval ckpt/step-1000 --tasks hellaswag,arc_easy --limit 10

    evalspan eval --model_args pretrained=ckpt/step-1000,dtype=float32 --tasks arc_easy --num_fewshot 5

    evalspan eval ckpt/step-1000 --suite core --check-fast 50
    """
    from coordinator import api
    from coordinator.cli.interrupt import Screen

    settings: dict[str, Any] = {
        "cluster.kind": cluster,
        "cluster.partition": partition,
        "cluster.account": account,
        "cluster.qos": qos,
    }
    pretrained, trial = lm_eval_flags.trial_settings(model, model_args, device)
    # read now: evalspan.toml may have changed when the scores are shown
    price = settings_of(config, work_dir, settings).gpu_hour_price

    def evaluated(suite: SuiteOptions) -> Results:
        return api.evaluate(
            lm_eval_flags.the_checkpoint(checkpoint, pretrained),
            suite,
            step=step,
            slots=slots,
            shards_per_task=shards_per_task,
            fresh=fresh,
            config=config,
            work_dir=work_dir,
            settings={**settings, **trial},
            follow=Screen(Console(stderr=as_json)),
        )

    if check_fast is not None:
        _check_fast(evaluated, chosen, check_fast, as_json=as_json)
        return
    found = evaluated(chosen)
    _show(found, as_json=as_json, verbose=verbose, gpu_hour_price=price)


def _check_fast(
    evaluated: Callable[[SuiteOptions], Results], chosen: SuiteOptions, documents: int, *, as_json: bool
) -> None:
    """Evaluate in fast mode, which may be refused, then in exact mode; exit code 1 where scores are missing."""
    from coordinator.report import mode_check

    if chosen.mode is not None or chosen.limit is not None:
        raise OperatorError(
            "--check-fast N evaluates N documents in both modes: leave --mode and --limit away"
        )
    found: dict[str, Results] = {}
    for mode in ("fast", "exact"):
        budget = chosen.token_budget if mode == "fast" else None
        more = {"mode": mode, "limit": documents, "token_budget": budget}
        found[mode] = evaluated(chosen.model_copy(update=more))
        if not found[mode].complete:
            _show(found[mode], as_json=as_json, verbose=False, gpu_hour_price=None)
    made = mode_check.check(
        {mode: found[mode].folder for mode in ("exact", "fast")},
        {mode: found[mode].raw for mode in ("exact", "fast")},
    )
    if as_json:
        show_json(made.model_dump(mode="json"))
    else:
        mode_check.show(stdout(), made)


def _show(found: Results, *, as_json: bool, verbose: bool, gpu_hour_price: float | None) -> None:
    """Print results; exit code 130 where the evaluation was cancelled, 1 where scores are missing."""
    from coordinator.report.render import show

    if found.note:
        typer.echo(found.note, err=as_json)
    if as_json:
        changed = {"changed": found.changed} if found.changed else {}
        show_json({**found.raw, "evalspan": {**found.raw.get("evalspan", {}), **changed}})
    else:
        ran = not found.note and found.makespan_seconds is not None
        show(stdout(), found.report, found.raw, gpu_hour_price, ran=ran, verbose=verbose)
        results = f"Results: {found.folder / 'results.json'}\n" if found.scores else ""
        say(f"\n{results}Samples, logs, responses: {found.folder}")
    if found.status == "cancelled":
        raise typer.Exit(ExitCode.INTERRUPTED)
    if not found.complete:
        raise typer.Exit(ExitCode.FAILED)


@app.command(cls=LmEvalCommand)
@takes_suite
def prepare(
    chosen: SuiteOptions,
    checkpoint: Annotated[str, typer.Option("--tokenizer", help="The checkpoint's folder, or a Hub id.")],
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    as_json: JSON = False,
) -> None:
    """Build a suite's request sets on this machine, with data sets and metric scripts from the internet.

    Jobs run offline: they read the work folder and the Hugging Face cache. Example:

    evalspan prepare --suite core --tokenizer ckpt/step-1000
    """
    from coordinator import api

    built = api.prepare(
        checkpoint,
        chosen,
        config=config,
        work_dir=work_dir,
        aside=AtTerminal(),
    )
    if as_json:
        show_json(built)
    else:
        for entry, sets in built.items():
            say(f"{entry}: {len(sets)} request set{'s' if len(sets) != 1 else ''}")
