"""Notifications of `[notify]`: news of evaluations, as JSON on a command's standard input or to a webhook.

Rule: the loop only puts news in a queue; a thread sends them one by one. A failed delivery is retried TRIES times at doubled
intervals, then given up; one that a webhook rejects permanently is given up at once. A full queue drops the oldest, with a
line in the log. `daemon_services` keeps the ends whose delivery a daemon's own end cuts short. No error reveals more of a webhook's
address than its host, since the rest is a secret.
"""

from __future__ import annotations

import html
import logging
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from coordinator.base.words import first_of
from coordinator.decide.verdicts.gate import Outcome, outcome_of
from coordinator.errors import OperatorError
from coordinator.operations.monitor.gate import gate_evaluation, read_policy
from coordinator.results.report.training import Drop
from coordinator.runtime.summary import Summary
from coordinator.site.config.schema import Config, NotifyConfig
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import read_secret
from evaljobs.errors import JobError, one_line

log = logging.getLogger(__name__)

MOST_WAITING = 200  # queued news
MAX_TRIES = 6
FIRST_PAUSE = 2.0  # seconds before the second try; doubled each time
COMMAND_SECONDS = 60.0  # longest run of a command
WEBHOOK_SECONDS = 10.0  # longest wait for a webhook
RETRIED_STATUSES = (408, 425, 429)  # status codes of a webhook below 500 after which a retry may succeed
MOST_FELL = 20  # scores named in one notification


class News(Record):
    """Message for a command or webhook."""

    schema_version: Literal[2] = 2  # incremented if a field changes its meaning
    # ended: an evaluation has ended; failed: it has, with failed tasks; parked: it could not continue for a minute; fell: it
    # shows a score to be worse than it was; training: `evalspan supervise` has made a decision, or sees a loss spike
    event: Literal["ended", "failed", "parked", "fell", "training"]
    # one line for people; & < > are escaped as &amp; &lt; &gt; for chat programs, and nothing in it mentions a channel
    text: str
    evaluation_id: str  # name of its folder in the work folder; "" for a training
    checkpoint: (
        str  # the folder that training wrote; for a training the one that it resumed from, or their folder
    )
    step: int | None  # training step; None: unknown
    suite: str  # "" for a training
    at: float  # unix seconds
    status: str = ""  # of an ended evaluation: done | failed | cancelled
    errors: dict[str, str] = Field(default_factory=dict)  # task -> why it has no score
    failed_jobs: dict[str, str] = Field(
        default_factory=dict
    )  # job or trial -> reason, owner and line; 20 at most
    reason: str = ""  # why an evaluation is parked
    fell: tuple[Drop, ...] = ()  # scores that dropped, at most 20
    gate: Literal["", Outcome] = ""  # result of `[notify] gate` for an ended evaluation


def ended_news(end: Summary, gate: tuple[Outcome, str] | None = None) -> News:
    """Return the news of an end. `gate`: result of the rules of `[notify] gate`, and why."""
    event: Literal["ended", "failed"] = "failed" if end.result == "failed" else "ended"
    why = "; ".join(f"{task}: {error}" for task, error in list(end.errors.items())[:3])
    text = f"{end.evaluation_id} is {end.result}{f': {why}' if why else ''}"
    jobs = dict(list(end.failed_jobs.items())[:MOST_FELL])
    text += "".join(
        f"; {job}: {said}" for job, said in list(jobs.items())[:1] if event == "failed" and said not in why
    )
    if end.fell_to_chance:
        text += f"; {end.fell_to_chance}"
    if gate is not None:
        text += f"; gate: {gate[0]}{gate[1]}"
    return News(
        event=event,
        text=_for_chats(text),
        status=end.result,
        errors=end.errors,
        failed_jobs=jobs,
        gate=gate[0] if gate is not None else "",
        **_of(end, end.ended_at),
    )


def parked_news(summary: Summary, reason: str, at: float) -> News:
    text = _for_chats(f"{summary.evaluation_id} is parked: {reason}")
    return News(event="parked", text=text, reason=reason, **_of(summary, at))


def drop_news(end: Summary, drops: Sequence[Drop], standing: str) -> News:
    """Return the news of drops. `standing`: the training's state as a sentence."""
    said = first_of([f"{drop.name} is {drop.words}" for drop in drops], 3)
    text = _for_chats(f"{end.evaluation_id}: {said}; {standing}")
    return News(event="fell", text=text, fell=tuple(drops[:MOST_FELL]), **_of(end, end.ended_at))


def training_news(text: str, checkpoint: str, step: int | None, at: float) -> News:
    more: dict[str, Any] = {
        "evaluation_id": "",
        "checkpoint": checkpoint,
        "step": step,
        "suite": "",
        "at": at,
    }
    return News(event="training", text=_for_chats(text), **more)


def _for_chats(text: str) -> str:
    """Return a line that chats show literally: an error's text becomes no link and mentions no channel."""
    line = html.escape(" ".join(text.split()), quote=False)
    return "evalspan: " + re.sub(r"@(?=(?:all|channel|everyone|here)\b)", "@\u200b", line)


def _of(summary: Summary, at: float | None) -> dict[str, Any]:
    named = summary.model_dump(include={"evaluation_id", "checkpoint", "step", "suite"})
    return {**named, "at": at}


def gate_outcome(settings: Config, end: Summary) -> tuple[Outcome, str] | None:
    """Apply the rules of `[notify] gate` and return the result and why; None without rules, or if it was cancelled."""
    if settings.notify.gate is None or end.result == "cancelled":
        return None
    try:
        rulings, _ = gate_evaluation(settings, end.evaluation_id, read_policy(settings.notify.gate))
    except OperatorError as error:  # the first checkpoint, or a rule that names no score
        return "undecidable", f": {error}"
    except Exception as error:  # the news of the end itself are still sent
        log.exception("[notify] gate: %s", end.evaluation_id)
        return "undecidable", f": {one_line(error)}"
    bad = [one.line for one in rulings if one.outcome != "pass" and one.tier != "advisory"]
    return outcome_of(rulings), "".join(f"; {line}" for line in bad[:3])


def notifier_of(section: NotifyConfig) -> Notifier:
    """Return the notifier of the settings. Raise OperatorError if `webhook_file` contains no address."""
    return Notifier(section.command, _webhook(section))


def _webhook(section: NotifyConfig) -> str | None:
    """Return the webhook's address, from its file if it has one. Raise OperatorError, which reveals no part of it."""
    if section.webhook_file is None:
        return section.webhook
    if section.webhook is not None:
        raise OperatorError("[notify] has both webhook and webhook_file: keep one of them")
    try:
        address = read_secret("[notify] webhook_file", section.webhook_file)
        return NotifyConfig(webhook=address).webhook
    except JobError as error:
        raise OperatorError(str(error)) from error
    except ValidationError:
        raise OperatorError(
            f"[notify] webhook_file {section.webhook_file}: one line with the address, https://…"
        ) from None


class RefusedError(OSError):
    """A webhook rejected this notification and would reject it again."""


class Notifier:
    """Sends news in a thread. `pause(seconds)` waits between two attempts, and returns True once the daemon ends."""

    def __init__(
        self,
        command: Sequence[str] = (),
        webhook: str | None = None,
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        self._sinks: list[Callable[[bytes], None]] = []
        if command:
            self._sinks.append(lambda body: _run(command, body))
        if webhook:
            self._sinks.append(lambda body: _post(webhook, body))
        self._over = threading.Event()
        self._pause = pause or self._over.wait
        self._waiting: Queue[tuple[Callable[[], Iterable[News]], Callable[[], None]]] = Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None

    @property
    def wanted(self) -> bool:
        return bool(self._sinks)

    def tell(self, make: Callable[[], Iterable[News]], settled: Callable[[], None] = lambda: None) -> None:
        """Queue news. Both callbacks run in the thread: `make`, since it may read files; `settled` once the news were sent or
        given up, but never if the daemon ends first.
        """
        if not self._sinks:
            return
        with suppress(Empty):
            while self._waiting.full():
                self._waiting.get_nowait()[1]()
                self._waiting.task_done()
                log.warning("[notify]: more than %d news wait; the oldest is dropped", MOST_WAITING)
        self._waiting.put((make, settled))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="news", daemon=True)
            self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait at most `seconds` for the remaining news to be sent; the thread then ends with the process."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, seconds)
        self._over.set()

    def _work(self) -> None:
        while True:
            make, settled = self._waiting.get()
            try:
                cut = any(not self._send(sink, news) for news in make() for sink in self._sinks)
            except Exception:
                log.exception("[notify]: news could not be made")
                cut = False
            if cut:
                return
            settled()
            self._waiting.task_done()

    def _send(self, sink: Callable[[bytes], None], news: News) -> bool:
        """Send, or give up after TRIES. Return False if the daemon ends first."""
        body = news.model_dump_json().encode()
        for number in range(1, MAX_TRIES + 1):
            try:
                sink(body)
            except Exception as error:  # noqa: BLE001 (a person's command or server: anything may come of it)
                if number == MAX_TRIES or isinstance(error, RefusedError):
                    log.warning("[notify]: giving up on %s of %s: %s", news.event, news.evaluation_id, error)
                    return True
                if self._pause(FIRST_PAUSE * 2 ** (number - 1)):
                    return False
            else:
                return True
        return True


def _run(command: Sequence[str], body: bytes) -> None:
    done = subprocess.run(command, input=body, capture_output=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
        raise OSError(f"{command[0]} ended with {done.returncode} {last[0][:200]}".rstrip())


def _post(webhook: str, body: bytes) -> None:
    import requests  # noqa: PLC0415 (0.2 s, for a daemon with a webhook alone)

    named = f"the webhook at {urlsplit(webhook).hostname}"
    try:
        answer = requests.post(
            webhook,
            data=body,
            headers={"Content-Type": "application/json"},
            timeout=WEBHOOK_SECONDS,
            allow_redirects=False,
        )
    except requests.RequestException as error:  # its text contains the address
        raise OSError(f"{named} cannot be reached: {_kind(error)}") from None
    if answer.status_code in RETRIED_STATUSES or answer.status_code >= 500:
        raise OSError(f"{named} answered {answer.status_code}")
    if not answer.ok or answer.is_redirect:
        raise RefusedError(f"{named} answered {answer.status_code}; not retried")


def _kind(error: BaseException) -> str:
    """Return the system's name for the root cause of an error, otherwise the error's type."""
    cause: BaseException | None = error
    while cause is not None and getattr(cause, "strerror", None) is None:
        cause = cause.__cause__ or cause.__context__
    return str(getattr(cause, "strerror", None) or type(error).__name__)
