"""`evalspan plan | priors | compare | clean | worker | init`: tools beside evaluations."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordinator.cli.app import (
    CONFIG,
    HTML,
    JSON,
    WORK_DIR,
    app,
    say,
    say_aside,
    settings_of,
    settings_there,
    show_json,
    stdout,
    writing,
)
from coordinator.errors import OperatorError
from evaljobs.contract.paths import WorkPaths

if TYPE_CHECKING:
    from coordinator.config.schema import Config

priors_app = typer.Typer(no_args_is_help=True, help="Predicted run times of tasks, and what they rest on.")
app.add_typer(priors_app, name="priors")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise OperatorError(f"{path}: {error.strerror}") from error


@app.command()
def plan(
    context: typer.Context,
    instance: Annotated[Path | None, typer.Option("--instance", help="A planning instance (JSON).")] = None,
    suite: Annotated[str | None, typer.Option("--suite", "-s", help="Or: a suite's name or file.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    cpu_slots: Annotated[int, typer.Option(min=1, help="CPU slots for metrics, per node.")] = 16,
    model_size: Annotated[str, typer.Option(help='Parameters, e.g. "7b".')] = "7b",
    hardware: Annotated[str, typer.Option(help='GPU type, or "cpu".')] = "a100",
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint, or its Hub id, whose request sets are prepared.")
    ] = None,
    save_instance: Annotated[
        Path | None, typer.Option(help="With --suite: write its instance here, for --instance.")
    ] = None,
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    as_json: JSON = False,
) -> None:
    """Predict a suite's or an instance's makespan: lanes, lower bound, and more or fewer nodes.

    Examples:

    evalspan plan --suite core --nodes 4 --model-size 7b --hardware a100

    evalspan plan --instance instance.json --json
    """
    from coordinator.planning import from_suite, plan_instance
    from coordinator.report.comparisons import lane_table

    if (instance is None) == (suite is None):
        raise OperatorError("name an --instance file or a --suite")
    if instance is not None:
        _refuse_options_of_a_suite(context)
        text = _text(instance)
    else:
        settings = settings_of(config, work_dir)
        text = json.dumps(
            _suite_instance(
                settings,
                str(suite),
                tokenizer,
                nodes=nodes,
                gpus_per_node=gpus_per_node,
                cpu_slots=cpu_slots,
                model_parameters=from_suite.parameters(model_size),
                hardware=hardware,
            ),
            indent=1,
        )
        if save_instance is not None:
            _save(save_instance, text)
    try:
        made, more = plan_instance.plan_instance(text), plan_instance.what_if(text)
    except ValueError as error:
        raise OperatorError(f"{instance or suite}: {error}") from error
    if as_json:
        show_json(made if instance is not None else {**made, "what_if": more})
        return
    bound, makespan = made["lower_bound_seconds"], made["planned_makespan_seconds"]
    stdout().print(
        f"planned makespan {makespan:.1f} s, lower bound {bound:.1f} s, ratio {makespan / bound:.4f}"
    )
    for part in ("", lane_table(made["lanes"]), ""):
        stdout().print(part)
    say(more["sentence"])


def _refuse_options_of_a_suite(context: typer.Context) -> None:
    """OperatorError where `plan --instance` has an option that describes a suite's run."""
    known = {"instance", "as_json", "config", "work_dir"}
    if given := [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in known and _is_typed(context, name)
    ]:
        raise OperatorError(f"{', '.join(given)}: for --suite; an --instance file has its own values")


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _save(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text + "\n", encoding="utf-8")
    say(f"wrote {path}: `evalspan plan --instance {path}`", err=True)


def _suite_instance(settings: Config, name: str, tokenizer: str | None, **more: Any) -> dict[str, Any]:
    from coordinator.intake import from_settings, hub, request_sets
    from coordinator.intake.checkpoint import inspect
    from coordinator.planning import from_suite
    from coordinator.runtime.wiring import coordinator_of
    from priors.table import read

    loaded = from_settings.settled(settings, name)
    sets: dict[str, dict[str, str]] = {}
    if tokenizer is not None:
        performer = coordinator_of(settings).performer
        folder = hub.local_folder(tokenizer, say_aside, allow_bin=True, weights=False)
        checkpoint = inspect(folder, weights=False)
        model = from_settings.model_options(settings)
        inputs = from_settings.inputs_for(performer.site, performer.lm_eval_version)(loaded, model)
        sets = request_sets.at_hand(loaded, checkpoint, model, inputs, performer.site)
    try:
        history = read(WorkPaths(settings.work_dir).observations)
        from_suite.check_hardware(more["hardware"], history)
        size = {key: more[key] for key in ("model_parameters", "hardware", "gpus_per_node")}
        gpus = settings.trial.gpus_per_trial
        if gpus == 1 and (gpus := from_suite.gpus_per_trial(**size)) > 1:
            say(f"a trial takes {gpus} GPUs for the weights ([trial] gpus_per_trial states it)", err=True)
        return from_suite.instance(
            loaded, sets, history, engine=settings.trial.engine, gpus_per_trial=gpus, **more
        )
    except ValueError as error:
        raise OperatorError(str(error)) from error


@priors_app.command("show")
def priors_show(config: CONFIG = None, work_dir: WORK_DIR = None) -> None:
    """Print observed run times, task by task, and what the next plan makes of them.

    Example:

    evalspan priors show
    """
    from priors.commands import show

    show_json(_priors(show, config, work_dir))


@priors_app.command("import")
def priors_import(
    file: Annotated[Path, typer.Argument(help="Its priors/observations.jsonl.")],
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
) -> None:
    """Add the observations of another work folder's file. A corrupt file is refused with its line.

    Example:

    evalspan priors import other-work/priors/observations.jsonl
    """
    from priors.commands import import_file

    show_json(_priors(import_file, config, work_dir, file))


@priors_app.command("export")
def priors_export(config: CONFIG = None, work_dir: WORK_DIR = None) -> None:
    """Print all observations as JSON.

    Example:

    evalspan priors export
    """
    from priors.commands import export

    show_json(_priors(export, config, work_dir))


def _priors(what: Callable[..., Any], config: Path | None, work_dir: Path | None, *more: Any) -> Any:
    settings = settings_of(config, work_dir)
    try:
        return what(WorkPaths(settings.work_dir).observations, *more)
    except (ValueError, OSError) as error:
        raise OperatorError(str(error)) from error


@app.command()
def compare(
    evaluations: Annotated[list[str], typer.Argument(help="Two or more evaluation ids.")],
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    html: HTML = None,
    as_json: JSON = False,
) -> None:
    """Print scores of several evaluations side by side; marks a drop beyond two standard errors.

    Example:

    evalspan compare step-1000-core-1a2b3c4d step-2000-core-5e6f7a8b
    """
    from coordinator.cli.pages import write_page
    from coordinator.page import read
    from coordinator.report.comparisons import comparison, heads_of, show_comparison

    settings = settings_there(config, work_dir)
    if len(evaluations) < 2:
        raise OperatorError("name at least two evaluations; `evalspan report` prints one")
    if html is not None:
        write_page(html, read.of_comparison(settings, evaluations))
        return
    points, columns, _ = read.read_columns(settings, evaluations)
    ids, heads, rows = [p.evaluation_id for p in points], heads_of(points), comparison(columns)
    if as_json:
        show_json({"schema_version": 1, "evaluations": ids, "rows": rows, "headings": heads})
        return
    show_comparison(stdout(), heads, ids, rows)


@app.command()
def clean(
    config: CONFIG = None,
    work_dir: WORK_DIR = None,
    everything: Annotated[bool, typer.Option("--all", help="Also copies that are in use.")] = False,
    as_json: JSON = False,
) -> None:
    """Remove weights that nothing uses from this node's memory; only files that evalspan wrote.

    Example:

    evalspan clean
    """
    from coordinator.intake.from_settings import site_of

    settings = settings_of(config, work_dir)
    site = site_of(settings)
    argv = [*site.worker_command, "-m", "evaljobs", "clean", *(["--all"] if everything else [])]
    for root in settings.stage.roots:
        argv += ["--root", root]
    done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True)
    roots = [json.loads(line) for line in done.stdout.splitlines()]
    if as_json:
        show_json({"schema_version": 1, "roots": roots})
    else:
        for one in roots:
            _show_cleaned(one)
    if done.returncode != 0:
        raise typer.Exit(done.returncode)


def _show_cleaned(one: dict[str, Any]) -> None:
    from coordinator.report.render import size

    count = len(one["removed"])
    say(f"{one['root']}: removed {count} checkpoint{'' if count == 1 else 's'}, {size(one['freed_bytes'])}")
    for name in one["kept"]:
        say(f"  kept {name}: a precursor holds it or a trial reads it (--all removes it, too)")
    for problem in one["problems"]:
        say(f"  left alone: {problem}", "yellow")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def worker(context: typer.Context, config: CONFIG = None, work_dir: WORK_DIR = None) -> None:
    """Run a metric worker, beside those that the coordinator starts, and end with its exit code.

    Further arguments are passed on.

    Example:

    evalspan worker --work-dir /shared/evalspan-work
    """
    from coordinator.intake.from_settings import site_of

    settings = settings_of(config, work_dir)
    site = site_of(settings)
    argv = [*site.worker_command, "-m", "evaljobs", "worker", "--redis-file", str(site.paths.redis_address)]
    argv += ["--work-dir", site.work_dir, *context.args]
    raise typer.Exit(subprocess.run(argv, check=False, env=dict(os.environ)).returncode)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("evalspan.toml"),
    force: Annotated[bool, typer.Option(help="Overwrite what is there.")] = False,
    cluster: Annotated[
        Literal["local", "slurm"] | None, typer.Option(help="Default: slurm where its commands are.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account of all jobs.")] = None,
    qos: Annotated[str | None, typer.Option(help="QOS of all jobs.")] = None,
) -> None:
    """Write a commented evalspan.toml with values from this machine or its Slurm.

    Examples:

    evalspan init

    evalspan init --account my-account

    evalspan init --cluster local
    """
    from coordinator.cli.screen.slurm_answers import wrapped_daemon
    from coordinator.config import loading, template

    if path.exists() and not force:
        raise OperatorError(f"{path} is there already: --force overwrites it")
    kind = cluster or ("slurm" if shutil.which("sbatch") else "local")
    named = {"cluster.account": account, "cluster.qos": qos}
    local = "one machine", {"cluster.kind": ("local", "")}
    summary, chosen = _probe_slurm(named) if kind == "slurm" else local
    with writing(path):
        path.write_text(template.default_text(summary, chosen), encoding="utf-8")
    _, partitions = chosen.get("cluster.partition", ("", ""))
    say(f"wrote {path}{f' for partition {partitions}' if partitions else ''}")
    options = "" if path == Path("evalspan.toml") else f" --config {shlex.quote(str(path))}"
    say(f"next: `evalspan doctor{options}` checks this site")
    if kind == "slurm":
        settings = loading.load(path, os.environ)  # makes no work folder
        say(f"then the daemon: `{wrapped_daemon(settings, options)}`")
        one = wrapped_daemon(settings, f" CHECKPOINT SUITE{options}", "evaluate")
        say(f"or one evaluation as a job: `{one}`")


def _probe_slurm(named: Mapping[str, object]) -> tuple[str, dict[str, tuple[Any, str]]]:
    """What init writes of this Slurm: nodes of all its partitions that are up, not of the default one alone.

    `named`: settings of the command line.
    """
    from coordinator.cluster import Cluster, ClusterError, slurm_rules
    from coordinator.cluster.site_probe import probe_of
    from coordinator.config.checks import GPU_REQUEST
    from coordinator.runtime.wiring import cluster_of

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
                return cluster_of(settings_of(None, Path(scratch) / "probe", asked | more))

            def refusing_of(account: str) -> dict[str, str]:
                asked = {"cluster.account": account} if account else {}
                return slurm_rules.refusing({name: of(name, **asked) for name in names})

            nodes = of(",".join(names) or None).nodes()
            refusing = refusing_of("")
            account = settings_of(None, Path(scratch) / "probe", named).cluster.account
            if account is None and refusing.keys() >= set(names):
                account = slurm_rules.account_demanded(getpass.getuser(), rules, refusing_of)
                if account is not None:
                    named = {**named, "cluster.account": account}
                    refusing = refusing_of("")
            limits = {p.name: p.max_seconds for p in rules.partitions if p.max_seconds is not None}
            summary, chosen = probe_of(nodes, rules.preemptible, refusing, limits)
            cluster = settings_of(None, Path(scratch) / "probe", named).cluster
            more = {"cluster.account": cluster.account, "cluster.qos": cluster.qos}
            if "cluster.partition" in chosen:
                form = slurm_rules.request_taken(partial(of, chosen["cluster.partition"][0]))
                more["slurm.gpu_request"] = None if form == GPU_REQUEST else form
            chosen |= {setting: (value, "") for setting, value in more.items() if value is not None}
    except ClusterError as error:
        raise OperatorError(
            f"the cluster cannot be asked ({error}): set SLURM_CONF or ask its administrators; "
            "`evalspan init --cluster local` writes settings for this machine alone"
        ) from error
    return summary, chosen
