"""`evalspan clean` and `evalspan worker`: commands that run on a node."""

from __future__ import annotations

import json
import subprocess

import typer

from coordinator.interface.cli.app import (
    SettingsCommand,
    TableCommand,
    command,
    flag,
    print_text,
    show_json,
)


@command()
class Clean(TableCommand):
    """Remove unused weights from this node's memory; only files written by evalspan.

    Example:

    evalspan clean
    """

    everything: bool = flag("Also remove copies that are in use.", "--all")

    def run(self) -> None:
        from coordinator.intake.from_settings import site_of
        from coordinator.results.report.render import format_bytes

        settings = self.settings()
        argv = [*site_of(settings).worker_command, "-m", "evaljobs", "clean", *["--all"] * self.everything]
        for root in settings.stage.roots:
            argv += ["--root", root]
        done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True)
        roots = [json.loads(line) for line in done.stdout.splitlines()]
        if self.as_json:
            show_json({"schema_version": 1, "roots": roots})
            roots = []
        for one in roots:
            count = len(one["removed"])
            said = (
                f"removed {count} checkpoint{'' if count == 1 else 's'}, {format_bytes(one['freed_bytes'])}"
            )
            print_text(f"{one['root']}: {said}")
            for name in one["kept"]:
                print_text(
                    f"  kept {name}: a precursor holds it or a trial reads it (--all removes it as well)"
                )
            for problem in one["problems"]:
                print_text(f"  left alone: {problem}", "yellow")
        if done.returncode != 0:
            raise typer.Exit(done.returncode)


@command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
class Worker(SettingsCommand):
    """Run a metric worker in addition to those that the coordinator starts, and exit with its exit code.

    Additional arguments are passed on.

    Example:

    evalspan worker --work-dir /shared/evalspan-work
    """

    def run(self) -> None:
        from coordinator.intake.from_settings import site_of

        site = site_of(self.settings())
        argv = [*site.worker_command, "-m", "evaljobs", "worker", "--redis-file"]
        argv += [str(site.paths.redis_address), "--work-dir", site.work_dir, *self.rest]
        raise typer.Exit(subprocess.run(argv, check=False).returncode)
