"""`evalspan eval | prepare`: evaluate one checkpoint, or build a suite's request sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

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
    verbose: VERBOSE = False,
    as_json: JSON = False,
) -> None:
    """Evaluate one checkpoint on one suite and print the makespan and the scores.

    Killed and run again, it goes on where it stood. Examples:

    evalspan eval ckpt/step-1000 --suite core --cluster slurm --partition gpu

    evalspan eval ckpt/step-1000 --tasks hellaswag,arc_easy --limit 10

    evalspan eval --model_args pretrained=ckpt/step-1000,dtype=float32 --tasks arc_easy --num_fewshot 5
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
    # before the evaluation: its scores are shown whatever becomes of evalspan.toml meanwhile
    price = settings_of(config, work_dir, settings).gpu_hour_price
    found = api.evaluate(
        lm_eval_flags.the_checkpoint(checkpoint, pretrained),
        chosen,
        step=step,
        slots=slots,
        shards_per_task=shards_per_task,
        config=config,
        work_dir=work_dir,
        settings={**settings, **trial},
        follow=Screen(Console(stderr=as_json)),
    )
    _show(found, as_json=as_json, verbose=verbose, gpu_hour_price=price)


def _show(found: Results, *, as_json: bool, verbose: bool, gpu_hour_price: float | None) -> None:
    """Print results; exit code 130 where the evaluation was cancelled, 1 where scores are missing."""
    from coordinator.report.render import show

    if found.note:
        typer.echo(found.note, err=as_json)
    if as_json:
        show_json(found.raw)
    else:
        ran = not found.note and found.makespan_seconds is not None
        show(stdout(), found.report, found.raw, gpu_hour_price, ran=ran, verbose=verbose)
        results = f"Results: {found.folder / 'results.json'}\n" if found.scores else ""
        say(f"\n{results}Samples, logs, responses: {found.folder}")
    if found.status == "cancelled":
        raise typer.Exit(130)
    if not found.complete:
        raise typer.Exit(1)


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
