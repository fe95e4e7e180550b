"""`evalspan init | doctor | check-nodes`: settings and rules of a site, what to change before the first evaluation, bad
nodes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from coordinator.errors import ExitCode, OperatorError
from coordinator.interface.cli.app import (
    Command,
    TableCommand,
    argument,
    command,
    flag,
    option,
    print_text,
    report_write_errors,
    stdout_console,
)

if TYPE_CHECKING:
    from coordinator.operations.doctor.facts import Checkup
    from coordinator.operations.node_check.checker import CheckReport
    from coordinator.site.config.template import SitePreset

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@command()
class Doctor(TableCommand):
    """Check this machine, Redis, Slurm's rules and its nodes (by small jobs), and print what to change.

    Exit code 1 if a finding would stop an evaluation.

    Example:

    evalspan doctor --cluster slurm --partition gpu
    """

    cluster: str | None = option("local or slurm.")
    partition: str | None = option("Slurm partition of the GPU jobs.")
    nodes: int = option("Number of nodes to probe per partition; 0: all.", min=0, default=8)
    wait: float = option("Seconds to wait for a node's jobs to start and end.", min=1, default=60.0)
    sample_mb: int = option("MB written to node memory to measure its rate.", min=1, default=256)

    def run(self) -> None:
        from coordinator.operations.doctor import collect

        settings = self.settings({"cluster.kind": self.cluster, "cluster.partition": self.partition})
        made = collect.check_up(
            settings, most_nodes=self.nodes, wait_seconds=self.wait, sample_mb=self.sample_mb
        )
        if self.as_json:
            stdout_console().print_json(made.model_dump_json())
        else:
            show_findings(made, settings.work_dir)
        if made.failed:
            raise typer.Exit(ExitCode.FAILED)


def show_findings(made: Checkup, work_dir: Path) -> None:
    from coordinator.results.report.tables import Parts, Sheet, print_parts

    sheet = Sheet("", "what", "", "found, and what to do")
    for one in made.findings:
        style = "" if one.status == "ok" else STYLES[one.status]
        sheet.add(
            one.what, one.status, Parts(one.found, one.todo and f"-> {one.todo}", apart=True), style=style
        )
    bad = sum(one.status == "fail" for one in made.findings)
    said = f"{bad} of these would stop" if bad else "Nothing here stops"
    style = STYLES["fail" if bad else "ok"]
    print_parts(stdout_console(), sheet, "", Parts(f"{said} an evaluation in {work_dir}.", style=style))


@command("check-nodes")
class CheckNodes(TableCommand):
    """Test nodes in pairs by small jobs on their GPUs, and print those that training should avoid.

    Each job checks matrix products, memory and copies of both nodes, and an all-gather between them; a second round pairs
    suspects with good nodes. Exit code 1 if a node is bad or a suspect, 4 if no test passed.

    Examples:

    evalspan check-nodes --cluster slurm --partition gpu

    evalspan check-nodes --nodes gpu[01-16]
    """

    cluster: str | None = option("local or slurm.")
    partition: str | None = option("Slurm partition of the GPU jobs.")
    nodes: list[str] = option(
        "Nodes to test, as a Slurm hostlist; they may be busy. Default: all nodes without a job on their GPUs.",
        default=[],
    )
    wait: float = option("Seconds to wait for a test's job to start and end.", min=1, default=300.0)
    seed: int = option("Seed for the choice of pairs.", default=0)

    def run(self) -> None:
        from coordinator.operations.node_check.checker import check_nodes

        settings = self.settings({"cluster.kind": self.cluster, "cluster.partition": self.partition})
        made = check_nodes(settings, self.nodes, wait_seconds=self.wait, seed=self.seed)
        if self.as_json:
            stdout_console().print_json(made.model_dump_json())
        else:
            show_nodes(made)
        if made.undetermined:
            raise typer.Exit(ExitCode.UNDECIDED)
        if any(n.verdict in ("bad", "suspect") for n in made.nodes):
            raise typer.Exit(ExitCode.FAILED)


RATES = {"matmul": ("TFLOP/s", 1e12), "memory": ("memory GB/s", 1e9), "copy": ("host to GPU GB/s", 1e9)}


def show_nodes(made: CheckReport) -> None:
    """Print a row per node, and the option that excludes the bad ones."""
    from coordinator.results.report.tables import Sheet

    sheet = Sheet("", "node", "", *(unit for unit, _ in RATES.values()), "why")
    styles = {"bad": STYLES["fail"], "suspect": STYLES["warn"], "not checked": STYLES["warn"]}
    for one in made.nodes:
        rates = [
            f"{one.rates[name] / by:.3g}" if name in one.rates else "" for name, (_, by) in RATES.items()
        ]
        sheet.add(one.node, one.verdict, *rates, one.why, style=styles.get(one.verdict, ""))
    stdout_console().print(sheet)
    stdout_console().print()
    if made.undetermined:
        stdout_console().print("No test passed: nothing is decided.", style=STYLES["fail"])
    elif made.exclude:
        print_text(f"--exclude={','.join(made.exclude)}")
    else:
        stdout_console().print("No bad node was found.", style=STYLES["ok"])


@command()
class Init(Command):
    """Write a commented evalspan.toml with values from this machine or its Slurm.

    Examples:

    evalspan init

    evalspan init --account my-account

    evalspan init --cluster local

    evalspan init --site lumi --account project_465000000
    """

    path: Path = argument("File to write.", Path("evalspan.toml"))
    force: bool = flag("Overwrite an existing file.")
    cluster: Literal["local", "slurm"] | None = option("Default: slurm if its commands are installed.")
    site: str | None = option(
        "What public documentation says of a site: lumi, frontier, leonardo, perlmutter, jupiter, clariden."
    )
    account: str | None = option("Slurm account of all jobs.")
    qos: str | None = option("QOS of all jobs.")

    def run(self) -> None:
        from coordinator.interface.cli.screen.work_folder_view import wrapped_daemon
        from coordinator.site.config import loading, template

        path = self.path
        preset = None if self.site is None else template.site_preset(self.site)
        if preset is not None and self.cluster == "local":
            raise OperatorError(f"--site {self.site} has Slurm: omit --cluster local")
        if path.exists() and not self.force:
            raise OperatorError(f"{path} already exists: --force overwrites it")
        kind = self.cluster or ("slurm" if preset or shutil.which("sbatch") else "local")
        named = {"cluster.account": self.account, "cluster.qos": self.qos}
        local = "one machine", {"cluster.kind": ("local", "")}
        if preset is not None:
            summary, chosen = _with_preset(preset, named)
        else:
            summary, chosen = _probe_slurm(named) if kind == "slurm" else local
        with report_write_errors(path):
            path.write_text(template.default_text(summary, chosen), encoding="utf-8")
        partition, partitions = chosen.get("cluster.partition", ("", ""))
        partitions = partition if preset is not None else partitions
        print_text(f"wrote {path}{f' for partition {partitions}' if partitions else ''}")
        if preset is not None:
            _show_preset(preset, chosen)
        options = "" if path == Path("evalspan.toml") else f" --config {shlex.quote(str(path))}"
        print_text(f"next: `evalspan doctor{options}` checks this site")
        if kind == "slurm":
            settings = loading.load_config(path, os.environ)  # creates no work folder
            print_text(f"then the daemon: `{wrapped_daemon(settings, options)}`")
            one = wrapped_daemon(settings, f" CHECKPOINT SUITE{options}", "evaluate")
            print_text(f"or one evaluation as a job: `{one}`")


def _with_preset(preset: SitePreset, named: Mapping[str, object]) -> tuple[str, dict[str, tuple[Any, str]]]:
    """What init writes of a site: what its Slurm says, where this machine can ask it, then what is documented."""
    try:
        summary, chosen = _probe_slurm(named)
    except OperatorError as error:
        print_text(
            f"Slurm is not asked, and only what is documented is written: {error.__cause__ or error}",
            "yellow",
        )
        summary = "a site that was not asked"
        chosen = {setting: (value, "") for setting, value in named.items() if value is not None}
        chosen["cluster.kind"] = ("slurm", "")
    documented = {setting: (value, preset.title) for setting, value in preset.settings.items()}
    return f"{summary}; {preset.title} by {preset.source}, read on {preset.read}", chosen | documented


def _show_preset(preset: SitePreset, chosen: Mapping[str, object]) -> None:
    """Print what a preset knows beside its settings, and what it does not."""
    for note in preset.notes:
        print_text(f"{preset.title}: {note}")
    if preset.account and "cluster.account" not in chosen:
        print_text(f"{preset.title}: jobs are charged to an account: set account in [cluster]", "yellow")
    print_text(
        f"{preset.title}: what its documentation does not say (limits, memory, /dev/shm) is left to `doctor`, on the site"
    )


def _probe_slurm(named: Mapping[str, object]) -> tuple[str, dict[str, tuple[Any, str]]]:
    """Return what init writes about this Slurm: nodes of all partitions that are up, not only the default one.

    `named`: settings from the command line.
    """
    from coordinator.intake.work_folder import load_settings
    from coordinator.operations.doctor.collect import settings_within_limits
    from coordinator.runtime.wiring import cluster_of, slurm_options
    from coordinator.site.cluster import Cluster, ClusterError, slurm_rules
    from coordinator.site.cluster.daemon_job import probe_of
    from coordinator.site.cluster.slurm_cli import SlurmCli
    from coordinator.site.config import loading, template
    from coordinator.site.config.checks import GPU_REQUEST

    try:
        rules = slurm_rules.ask_rules()
        names = [p.name for p in rules.partitions if p.up and not p.hidden]
        with tempfile.TemporaryDirectory() as scratch:

            def of(partition: str | None, request: str | None = None, **more: str) -> Cluster:
                asked = {
                    **named,
                    "cluster.kind": "slurm",
                    "cluster.partition": partition,
                    "slurm.gpu_request": request,
                }
                return cluster_of(load_settings(None, Path(scratch) / "probe", asked | more))

            def refusing_of(account: str) -> dict[str, str]:
                asked = {"cluster.account": account} if account else {}
                return slurm_rules.refusing_partitions({name: of(name, **asked) for name in names})

            nodes = of(",".join(names) or None).nodes()
            refusing = refusing_of("")
            account = load_settings(None, Path(scratch) / "probe", named).cluster.account
            if account is None and refusing.keys() >= set(names):
                account = slurm_rules.account_demanded(rules, refusing_of)
                if account is not None:
                    named = {**named, "cluster.account": account}
                    refusing = refusing_of("")
            limits = {p.name: p.max_seconds for p in rules.partitions if p.max_seconds is not None}
            summary, chosen = probe_of(nodes, rules.preemptible, refusing, limits)
            cluster = load_settings(None, Path(scratch) / "probe", named).cluster
            more = {"cluster.account": cluster.account, "cluster.qos": cluster.qos}
            if "cluster.partition" in chosen:
                form = slurm_rules.request_taken(partial(of, chosen["cluster.partition"][0]))
                more["slurm.gpu_request"] = None if form == GPU_REQUEST else form
            chosen |= {setting: (value, "") for setting, value in more.items() if value is not None}
            file = Path(scratch) / "evalspan.toml"  # not an existing file, whose limits it may keep to
            file.write_text(template.default_text(summary, chosen), encoding="utf-8")
            settings = loading.load_config(file, os.environ)
            chosen |= settings_within_limits(SlurmCli(slurm_options(settings)), rules)
    except ClusterError as error:
        raise OperatorError(
            f"the cluster cannot be reached ({error}): set SLURM_CONF or ask its administrators; "
            "`evalspan init --cluster local` writes settings for this machine only"
        ) from error
    return summary, chosen
