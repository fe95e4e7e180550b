"""A submission: its files for the daemon in the work folder, and its fate.

Rule: a submission's files exist until the daemon has handled them. This tells what the daemon wrote before from what it wrote
after, without comparing clocks of two hosts. Called by `coordinator.api`.
"""

from __future__ import annotations

import time
from pathlib import Path

from coordinator.base.words import first_of
from coordinator.errors import OperatorError
from coordinator.intake import inbox, pending, resubmit
from coordinator.intake.work_folder import refuse_guest
from coordinator.runtime.journal import Journal
from coordinator.runtime.known_evaluations import find_folder, ids_of
from coordinator.runtime.summary import read_ended_summary, read_evaluation, read_summary
from coordinator.runtime.work_lock import WorkLock, is_daemon
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import Record


class Submission(Record):
    """The effect of a submission. `what` is for programs, `note` and `waits` are for people."""

    evaluation_id: str  # for `wait`, `results` and the commands
    checkpoint: str  # folder, as announced
    suite: str  # as in the notice: a name, or the full path of a file
    what: str  # new | known | priority-raised | taken-up-again | ended
    note: str = ""  # the same for people
    daemon: bool = False  # a daemon runs for the work folder
    waits: str = ""  # what it waits for, if no daemon runs
    sent: tuple[str, ...] = ()  # its files in the work folder; the daemon removes each once it is handled
    ended_bytes: int | None = None  # journal length of a resumed evaluation that had ended


def send_submission(
    paths: WorkPaths, notice: inbox.Notice, answer: resubmit.Resubmission, daemon: str
) -> Submission:
    """Write the notice of a checkpoint and the command that `answer` asks for. `daemon`: the command that starts one."""
    if answer.again:
        refuse_guest(paths.root)  # a command follows
    evaluation_id = notice.evaluation_id
    before = read_ended_summary(paths.evaluation(evaluation_id)) if answer.again else None
    sent = []
    if answer.announce:
        sent.append(inbox.leave_notice(paths, notice))
    if answer.again:
        sent.append(inbox.leave_notice(paths, inbox.Notice(command="retry", evaluation_id=evaluation_id)))
    holder = WorkLock(paths.lock).holder()
    waits = answer.announce or answer.again or (answer.what == "known" and not holder)
    return Submission(
        evaluation_id=evaluation_id,
        checkpoint=notice.checkpoint,
        suite=notice.suite,
        what=answer.what,
        note=answer.said,
        daemon=is_daemon(holder),
        waits=pending.waits_for_daemon(holder, daemon) if waits and not is_daemon(holder) else "",
        sent=tuple(map(str, sent)),
        ended_bytes=None if before is None else before.journal_bytes,
    )


def find_submission(settings: Config, name: str) -> Submission:
    """Return the evaluation whose id begins with `name`, or its pending submission. Raise OperatorError unless there is one."""
    try:
        found = find_folder(settings, name).root.name
    except OperatorError:
        for file in inbox.waiting_files(WorkPaths(settings.work_dir)):
            notice, sent = file.notice, (str(file.path),)
            if notice.evaluation_id == name:
                place = {"checkpoint": notice.checkpoint, "suite": notice.suite}
                return Submission(evaluation_id=name, what="new", sent=sent, **place)
        raise
    return Submission(evaluation_id=found, checkpoint="", suite="", what="known")


def withdraw_submission(settings: Config, name: str) -> str:
    """Withdraw the submission whose evaluation's id begins with `name`, and return the id; "" if none is pending.

    A running daemon may be accepting it at this moment, so it gets a command to cancel it as well.
    """
    paths = WorkPaths(settings.work_dir)
    files = inbox.waiting_files(paths)
    ids = {file.notice.evaluation_id for file in files} - {""}
    found = ids_of(name, sorted(ids))
    if len(found) > 1:
        raise OperatorError(
            f"{len(found)} submissions begin with {name!r}: {first_of(found)}; type more of the id"
        )
    if not found:
        return ""
    for file in files:
        if file.notice.evaluation_id == found[0]:
            file.path.unlink(missing_ok=True)
    if WorkLock(paths.lock).held():
        inbox.leave_notice(paths, inbox.Notice(command="cancel", evaluation_id=found[0]))
    return found[0]


def why_waiting(settings: Config, submission: Submission, daemon: str) -> str:
    """Return why nothing happens to it now, if no process works on it; otherwise "". `daemon`: the command that starts one."""
    paths = WorkPaths(settings.work_dir)
    holder = WorkLock(paths.lock).holder()
    begun = Journal.begun(paths.evaluation(submission.evaluation_id).journal)
    if is_daemon(holder) or (holder and begun):
        return ""
    return pending.waits_for_daemon(holder, daemon)


def has_ended(settings: Config, submission: Submission) -> bool:
    """Return whether it has ended since the submission.

    Raise OperatorError if the daemon refused the checkpoint, made another evaluation of it, or gave the evaluation up.
    """
    paths = WorkPaths(settings.work_dir)
    folder = paths.evaluation(submission.evaluation_id)
    unread = any(Path(file).exists() for file in submission.sent)  # first, since the daemon removes them last
    found = read_summary(folder)
    if found is not None and found.ended_at is not None:
        return found.journal_bytes != submission.ended_bytes
    if unread:
        return False
    if found is not None and found.parked is not None and found.parked.until is None:
        raise OperatorError(f"{submission.evaluation_id} was given up: {found.parked.error}")
    if not Journal.begun(folder.journal):
        _check_begun(paths, submission)
    return False


def _check_begun(paths: WorkPaths, submission: Submission) -> None:
    """Raise OperatorError unless its evaluation has begun."""
    name = submission.evaluation_id
    if refusal := inbox.refusal_of(paths, submission.sent):  # also of a command, which names no checkpoint
        raise OperatorError(f"{refusal.checkpoint or name} was refused: {refusal.why}")
    key = (submission.checkpoint, submission.suite)
    for refused in pending.read_pending(paths, time.time()).refused:
        if (refused.checkpoint, refused.suite) == key:
            raise OperatorError(f"{refused.checkpoint} was refused: {refused.why}")
    stem = name.rpartition("-")[0]
    # listing the folder makes NFS show evaluations of another host
    records = [
        read_evaluation(EvaluationPaths(f.parent)) for f in paths.root.glob(f"{stem}-*/evaluation.json")
    ]
    if Journal.begun(paths.evaluation(name).journal):
        return
    made = [r for r in records if r is not None and submission.checkpoint in (r.checkpoint.source, "")]
    newest = max(made, key=lambda r: r.accepted_at).evaluation_id if made else ""
    other = f"; its newest evaluation is {newest}" if newest else "; the daemon's log says more"
    raise OperatorError(
        f"the daemon did not begin {name}: the checkpoint's files changed, or the daemon has other settings than this "
        f"call{other}"
    )
