"""Commands of `evalspan cancel | retry | release` to the coordinator of a work folder: files of its inbox.

Rule: a command is obeyed at least once, then its file is removed. One that cannot be obeyed now is tried again; one that
never can be is refused, with the reason in the log. Neither holds up the next command. The daemon obeys all, `evalspan
eval` those to its evaluation.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable
from functools import partial

from coordinator.base import clock
from coordinator.base.isolate import isolated, warn_once
from coordinator.base.words import one_line
from coordinator.errors import OperatorError, RetryError
from coordinator.intake.inbox import InboxFile, Notice, done, refuse
from coordinator.runtime.loop import Coordinator

log = logging.getLogger(__name__)


def obey_commands(coordinator: Coordinator, files: Iterable[InboxFile], only: str | None = None) -> None:
    """Obey the commands among the files of a look. `only`: those to this evaluation, and to nodes; the others stay for the daemon."""
    for file in files:
        notice = file.notice
        theirs = only is not None and (file.wrong or notice.evaluation_id not in ("", only))
        if notice.command != "evaluate" and not theirs:
            with isolated(partial(_passed_over, file)):
                _obey_or_wait(coordinator, file)


def _obey_or_wait(coordinator: Coordinator, file: InboxFile) -> None:
    if file.wrong:
        raise OperatorError(file.wrong)
    try:
        _obey(coordinator, file.notice)
    except (OSError, RetryError) as error:
        # EAGAIN: the evaluation is parked, and the log says so already
        if not (isinstance(error, OSError) and error.errno == errno.EAGAIN):
            warn_once(log, one_line(f"the command in {file.path} cannot be obeyed yet: {error}"))
        return
    done(file)


def _passed_over(file: InboxFile, error: Exception) -> None:
    why = one_line(error)
    if not isinstance(error, (KeyError, OperatorError)):
        log.warning("%s", file.path, exc_info=error)
    warn_once(log, one_line(f"the command in {file.path} is passed over: {why}"))
    with isolated(lambda full: warn_once(log, one_line(f"{file.path} cannot be moved: {full}"))):
        refuse(file, why, clock.now())


def _obey(coordinator: Coordinator, notice: Notice) -> None:
    name = notice.evaluation_id
    if notice.command == "cancel":
        coordinator.cancel(name, notice.reason)
    elif notice.command == "retry":
        coordinator.revive(name)
        coordinator.retry(name)
    else:
        coordinator.cordon(notice.nodes, clock.now() + notice.seconds)
