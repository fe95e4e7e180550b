"""`evalspan doctor`: prints what this site allows, and what to change before the first evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from coordinator.cli.app import Printed, command, option, stdout
from coordinator.errors import ExitCode

if TYPE_CHECKING:
    from coordinator.doctor.facts import Checkup

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@command()
class Doctor(Printed):
    """Check this machine, Redis, Slurm's rules and its nodes (by small jobs), and print what to change.

    Exit code 1 where an evaluation would be stopped. Example:

    evalspan doctor --cluster slurm --partition gpu
    """

    cluster: str | None = option("local or slurm.")
    partition: str | None = option("Slurm partition of the GPU jobs.")
    nodes: int = option("Probe so many nodes of each partition; 0: all.", min=0, default=8)
    wait: float = option("Seconds that a node's jobs may take to start and end.", min=1, default=60.0)
    sample_mb: int = option("MB written to node memory to measure its rate.", min=1, default=256)

    def run(self) -> None:
        from coordinator.doctor import collect

        settings = self.settings({"cluster.kind": self.cluster, "cluster.partition": self.partition})
        made = collect.check_up(
            settings, most_nodes=self.nodes, wait_seconds=self.wait, sample_mb=self.sample_mb
        )
        if self.as_json:
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
    if bad := sum(one.status == "fail" for one in made.findings):
        stdout().print(f"{bad} of these would stop an evaluation in {work_dir}.", style=STYLES["fail"])
    else:
        stdout().print("Nothing here stops an evaluation.", style=STYLES["ok"])
