"""`evalspan prune` and `status --disk`: the space and files of a work folder."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from coordinator.errors import EvalspanError, OperatorError
from coordinator.interface.cli.app import (
    REQUIRED,
    TableCommand,
    command,
    flag,
    option,
    print_text,
    show_json,
    stdout_console,
)
from evaljobs.contract.paths import WorkPaths

if TYPE_CHECKING:
    from coordinator.operations.keeping.retention import OnDisk, Size, WorkFolder
    from coordinator.site.config.schema import Config, RetentionConfig

DEFAULT_ROWS = 20  # evaluations listed by `status --disk` without --last
DEFAULT_KEEP = "scores"  # assumed by `status --disk` if `[retention]` is not set


def _policy(settings: Config, keep: str, older_than: str) -> RetentionConfig:
    from coordinator.site.config.checks import check_age

    try:
        check_age(older_than)
    except ValueError as error:
        raise OperatorError(f"--older-than {older_than}: {error}") from error
    return settings.retention.model_copy(update={"keep": keep, "older_than": older_than})


def _code(settings: Config) -> str | None:
    """Return the code folder of jobs; None while a coordinator runs, perhaps of another version, since it cleans up its own."""
    from coordinator.intake.from_settings import code_of
    from coordinator.runtime.work_lock import WorkLock

    if WorkLock(WorkPaths(settings.work_dir).lock).held():
        return None
    return code_of(settings)


@command()
class Prune(TableCommand):
    """Remove logs, responses and samples of old evaluations, and shared files that are no longer needed.

    --keep scores removes logs, specs, outcomes, responses, verdicts, judgements and samples.

    --keep responses removes logs, specs and outcomes.

    Both remove request sets, converted checkpoints and code that no evaluation needs.

    Evaluations that are open, pending or parked lose nothing, nor do the baselines of the settings.

    Examples:

    evalspan prune --keep responses --older-than 30d

    evalspan prune --keep scores --older-than 8w --yes
    """

    keep: Literal["scores", "responses"] = option(
        "What to keep of old evaluations, besides results, reports and journals.", default=REQUIRED
    )
    older_than: str = option(
        "Minimum age since an evaluation's end, such as 12h, 30d or 8w.", default=REQUIRED
    )
    yes: bool = flag("Remove; otherwise nothing is changed.", "--yes")
    dry_run: bool = flag("Only print what would be removed; this is the default.", "--dry-run")

    def run(self) -> None:
        from coordinator.operations.keeping.prune import prune_folder, read_work_folder
        from coordinator.operations.keeping.retention import removable_parts

        if self.yes and self.dry_run:
            raise OperatorError("pass either --yes or --dry-run")
        settings = self.there()
        work, now = WorkPaths(settings.work_dir), time.time()
        policy = _policy(settings, self.keep, self.older_than)
        made = removable_parts(read_work_folder(work), policy, now, code=_code(settings))
        left = {name: why for name, why in prune_folder(work, made, policy, now) if why} if self.yes else {}
        if self.as_json:
            show_json({"schema_version": 1, "removed": self.yes, "left": left, **_as_json(made)})
        else:
            _show_plan(made, done=self.yes)
        for name, why in left.items():
            print_text(f"{name} is left: {why}", "yellow", err=True)
        if any("Permission denied" in why for why in left.values()):
            raise EvalspanError(f"{work.root} is another user's work folder: ask that user to prune it")


def _as_json(made: WorkFolder) -> dict[str, Any]:
    return {
        "evaluations": [_evaluation(each) | {"parts": list(each.parts)} for each in made.evaluations],
        "shared": [{"path": item.path, "kind": item.kind, **_size(item.size)} for item in made.shared],
        **_size(made.size),
    }


def _size(size: Size) -> dict[str, int]:
    return {"files": size.files, "bytes": size.bytes}


def _evaluation(one: OnDisk) -> dict[str, Any]:
    return {"evaluation_id": one.evaluation_id, "ended_at": one.ended_at, **_size(one.size)}


def _show_plan(made: WorkFolder, *, done: bool) -> None:
    for removal in made.evaluations:
        goes = f"{', '.join(removal.parts)}: {_in_words(removal.size)}"
        ended = datetime.fromtimestamp(removal.ended_at or 0.0, UTC).astimezone()
        print_text(f"{removal.evaluation_id}, ended {ended:%Y-%m-%d}: {goes}")
    for item in made.shared:
        print_text(f"{item.path}: {item.kind}, {_in_words(item.size)}")
    if not made.evaluations and not made.shared:
        print_text("nothing to remove")
    elif done:
        print_text(f"removed: {_in_words(made.size)}")
    else:
        print_text(f"would remove {_in_words(made.size)}; nothing was changed: add --yes")


def _in_words(size: Size) -> str:
    from coordinator.results.report.render import format_bytes as of_bytes

    # members of an archive are not files
    files = f" in {size.files} file{'' if size.files == 1 else 's'}" if size.files else ""
    return of_bytes(size.bytes) + files


def show_disk(settings: Config, last: int | None, *, as_json: bool) -> None:
    """Print the use of the work folder by kind and by evaluation, the largest first, and what `prune` would free."""
    from coordinator.operations.keeping.prune import read_work_folder
    from coordinator.operations.keeping.retention import removable_parts

    section = settings.retention
    policy = _policy(settings, section.keep or DEFAULT_KEEP, section.older_than)
    found = read_work_folder(WorkPaths(settings.work_dir))
    freed = removable_parts(found, policy, time.time(), code=_code(settings))
    command = f"evalspan prune --keep {policy.keep} --older-than {section.older_than}"
    if as_json:
        show_json(
            {"schema_version": 1, **_disk_json(found), "prune": {"command": command, **_as_json(freed)}}
        )
        return
    most = last or DEFAULT_ROWS
    largest = sorted(found.evaluations, key=lambda e: -e.size.bytes)
    _table("kind", found.by_kind().items())
    if largest:
        rows = ((e.evaluation_id + (" (open)" if e.ended_at is None else ""), e.size) for e in largest[:most])
        _table("evaluation", rows)
    if len(largest) > most:
        print_text(f"{len(largest) - most} smaller evaluations are not shown: --last N shows more")
    print_text(f"{settings.work_dir}: {_in_words(found.size)}")
    print_text(f"`{command}` would free {_in_words(freed.size)}")


def _disk_json(found: WorkFolder) -> dict[str, Any]:
    return {
        **_size(found.size),
        "kinds": {kind: _size(size) for kind, size in found.by_kind().items()},
        "evaluations": [_evaluation(e) for e in sorted(found.evaluations, key=lambda e: -e.size.bytes)],
    }


def _table(title: str, rows: Iterable[tuple[str, Size]]) -> None:
    from coordinator.results.report.render import format_bytes as of_bytes
    from coordinator.results.report.tables import Sheet, print_parts

    sheet = Sheet("", title, "size", "files")
    for name, size in rows:
        sheet.add(name, of_bytes(size.bytes), str(size.files))
    print_parts(stdout_console(), sheet, "")
