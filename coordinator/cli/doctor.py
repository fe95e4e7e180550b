"""`evalspan doctor`: prints what this site allows, and what to change before the first evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.app import CONFIG, JSON, WORK_DIR, app, settings_of, stdout
from coordinator.errors import ExitCode

if TYPE_CHECKING:
    from coordinator.doctor.facts import Checkup

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@app.command()
def doctor(
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    cluster: Annotated[str | None, typer.Option(help="local or slurm.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition of the GPU jobs.")] = None,
    nodes: Annotated[int, typer.Option(min=0, help="Probe so many nodes of each partition; 0: all.")] = 8,
    wait: Annotated[
        float, typer.Option(min=1, help="Seconds that a node's jobs may take to start and end.")
    ] = 60.0,
    sample_mb: Annotated[
        int, typer.Option(min=1, help="MB written to node memory to measure its rate.")
    ] = 256,
    as_json: JSON = False,
) -> None:
    """Check this machine, Redis, Slurm's rules and its nodes (by small jobs), and print what to change.

    Exit code 1 where an evaluation would be stopped. Example:

    evalspan doctor --cluster slurm --partition gpu
    """
    from coordinator.doctor import collect

    settings = settings_of(config, work_dir, {"cluster.kind": cluster, "cluster.partition": partition})
    made = collect.check_up(settings, most_nodes=nodes, wait_seconds=wait, sample_mb=sample_mb)
    if as_json:
        stdout().print_json(made.model_dump_json())
    else:
        show(made, settings.work_dir)
    if made.failed:
        raise typer.Exit(ExitCode.FAILED)


def show(made: Checkup, work_dir: Path) -> None:
    """Print the findings, then a summary."""
    from coordinator.report.tables import Parts, Sheet

    sheet = Sheet("", "what", "", "found, and what to do")
    for one in made.findings:
        style = "" if one.status == "ok" else STYLES[one.status]
        sheet.add(
            one.what, one.status, Parts(one.found, one.todo and f"-> {one.todo}", apart=True), style=style
        )
    stdout().print(sheet)
    stdout().print()
    _show_end(made, work_dir)


def _show_end(made: Checkup, work_dir: Path) -> None:
    bad = sum(1 for f in made.findings if f.status == "fail")
    if bad:
        stdout().print(f"{bad} of these would stop an evaluation in {work_dir}.", style=STYLES["fail"])
    else:
        stdout().print("Nothing here stops an evaluation.", style=STYLES["ok"])
