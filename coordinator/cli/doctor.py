"""`evalspan doctor`: what this site allows, and what to change before the first evaluation. `check-nodes`: bad nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from coordinator.cli.app import Printed, command, option, say, stdout
from coordinator.errors import ExitCode

if TYPE_CHECKING:
    from coordinator.doctor.facts import Checkup
    from coordinator.node_check.run import Checked

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
    from coordinator.report.tables import Parts, Sheet, print_parts

    sheet = Sheet("", "what", "", "found, and what to do")
    for one in made.findings:
        style = "" if one.status == "ok" else STYLES[one.status]
        sheet.add(
            one.what, one.status, Parts(one.found, one.todo and f"-> {one.todo}", apart=True), style=style
        )
    bad = sum(one.status == "fail" for one in made.findings)
    said = f"{bad} of these would stop" if bad else "Nothing here stops"
    style = STYLES["fail" if bad else "ok"]
    print_parts(stdout(), sheet, "", Parts(f"{said} an evaluation in {work_dir}.", style=style))


@command("check-nodes")
class CheckNodes(Printed):
    """Test nodes in pairs by small jobs on their GPUs, and print those that training should leave out.

    Each job checks matrix products, memory and copies of both nodes, and an all-gather between them; a second round pairs
    suspects with good nodes. Exit code 1 where a node is bad or a suspect, 4 where no test passed. Examples:

    evalspan check-nodes --cluster slurm --partition gpu

    evalspan check-nodes --nodes gpu[01-16]
    """

    cluster: str | None = option("local or slurm.")
    partition: str | None = option("Slurm partition of the GPU jobs.")
    nodes: list[str] = option(
        "Only these, as a Slurm hostlist; they may be busy. Default: all nodes without a job on their GPUs.",
        default=[],
    )
    wait: float = option("Seconds that a test's job may take to start and end.", min=1, default=300.0)
    seed: int = option("Draws who is tested with whom.", default=0)

    def run(self) -> None:
        from coordinator.node_check.run import check

        settings = self.settings({"cluster.kind": self.cluster, "cluster.partition": self.partition})
        made = check(settings, self.nodes, wait_seconds=self.wait, seed=self.seed)
        if self.as_json:
            stdout().print_json(made.model_dump_json())
        else:
            show_nodes(made)
        if made.undetermined:
            raise typer.Exit(ExitCode.UNDECIDED)
        if any(n.verdict in ("bad", "suspect") for n in made.nodes):
            raise typer.Exit(ExitCode.FAILED)


RATES = {"matmul": ("TFLOP/s", 1e12), "memory": ("memory GB/s", 1e9), "copy": ("host to GPU GB/s", 1e9)}


def show_nodes(made: Checked) -> None:
    """Print a row a node, and the option that leaves the bad ones out."""
    from coordinator.report.tables import Sheet

    sheet = Sheet("", "node", "", *(unit for unit, _ in RATES.values()), "why")
    styles = {"bad": STYLES["fail"], "suspect": STYLES["warn"], "not checked": STYLES["warn"]}
    for one in made.nodes:
        rates = [
            f"{one.rates[name] / by:.3g}" if name in one.rates else "" for name, (_, by) in RATES.items()
        ]
        sheet.add(one.node, one.verdict, *rates, one.why, style=styles.get(one.verdict, ""))
    stdout().print(sheet)
    stdout().print()
    if made.undetermined:
        stdout().print("No test passed: nothing is decided.", style=STYLES["fail"])
    elif made.exclude:
        say(f"--exclude={','.join(made.exclude)}")
    else:
        stdout().print("No bad node was found.", style=STYLES["ok"])
