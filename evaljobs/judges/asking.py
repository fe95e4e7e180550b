"""Sends asks to the judge, in parallel and within the caps, and keeps the judgements.

Rule: each judgement is on disk before it counts. An ask with an answer is never sent again. One
without an answer ends with a reason: its tries are used up, it was refused, the cost cap is
reached, or the endpoint fails all. Only an error that the operator must mend (key, model, address)
and a lasting absence of Redis end the job. Called from `scoring.score`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import JudgeJob
from evaljobs.errors import OperatorError, RetryError, one_line
from evaljobs.judges.caps import GRANT_SECONDS, Caps, Grant, Over
from evaljobs.judges.endpoint import MAX_PAUSE, AgainError, Answered, Endpoint, NeverError, read_key
from evaljobs.judges.judgement import Ask, Judgement, Reply, ask_key, cost, cost_at_most, read_answer
from evaljobs.judges.kept import Kept
from evaljobs.queue.redis_client import QueueUnavailable

log = logging.getLogger(__name__)

MAX_BACKOFF: Final = 60.0  # most seconds between two tries of an ask
LIMITED_SECONDS: Final = 900.0  # most seconds that an ask waits out 429 replies
AWAY_SECONDS: Final = 120.0  # most seconds to wait for Redis
GIVE_UP_AFTER: Final = 10  # consecutive asks without success before the endpoint counts as down


@dataclass(slots=True)
class _Try:
    """Cost (millionths) and tries of one ask so far, over all jobs of the evaluation."""

    cost: int
    tries: int = 0


class Judges:
    """The judge of one job; OperatorError where its evaluation has none (`job` is None).

    `backoff_seconds`: the first pause after a failed try; it doubles.
    """

    def __init__(
        self,
        job: JudgeJob | None,
        evaluation_dir: str,
        name: str,
        *,
        backoff_seconds: float = 1.0,
        grant_seconds: float = GRANT_SECONDS,
    ) -> None:
        if job is None:
            raise OperatorError(
                "the task asks a judge: say `judge = true` in its [[task]] and set [judge] url"
            )
        paths = EvaluationPaths(evaluation_dir)
        self._options = job.options
        self._evaluation = paths.root.name
        self._name = name
        self._backoff = backoff_seconds
        self._kept = Kept(paths.judgements, Path(job.cache_dir), self._evaluation)
        self._caps = Caps(
            Path(job.redis_file),
            job.options,
            self._evaluation,
            spent=self._kept.spent,
            grant_seconds=grant_seconds,
        )
        self._lock = threading.Lock()
        self._ended = threading.Event()  # set by an error of the whole job
        self._failed_in_a_row = 0
        self._errors: dict[str, str] = {}

    def ask_missing(self, asks: Iterable[Ask]) -> int:
        """Send the asks without an answer; returns how many. JobError where the operator must act."""
        by_key = {ask_key(ask, self._options): ask for ask in asks}
        missing = {key: ask for key, ask in by_key.items() if not self._has(key)}
        if not missing:
            return 0
        endpoint = Endpoint(self._options, read_key(self._options))
        with (
            self._caps,
            ThreadPoolExecutor(min(self._options.concurrency, len(missing)), "judge") as pool,
        ):
            done = [pool.submit(self._settled, endpoint, key, ask) for key, ask in missing.items()]
            try:
                return sum(future.result() for future in done)
            except BaseException:  # the job's deadline or a thread's error ends all threads
                self._ended.set()
                raise

    def replies(self, asks: Sequence[Ask]) -> list[Reply]:
        """The stored replies to these asks; sends no request."""
        return [self._reply(ask) for ask in asks]

    def _reply(self, ask: Ask) -> Reply:
        key = ask_key(ask, self._options)
        found = self._kept.find(key)
        if found is not None and found.answer is not None:
            return read_answer(ask.form, found.answer)
        kept = found.error if found is not None else "it was not asked"
        return Reply(value=None, error=self._errors.get(key) or kept)

    def _has(self, key: str) -> bool:
        found = self._kept.find(key)
        return found is not None and found.answer is not None

    def _settled(self, endpoint: Endpoint, key: str, ask: Ask) -> bool:
        """Whether the ask was sent. An error of the whole job stops the other threads."""
        try:
            return self._settle(endpoint, key, ask)
        except BaseException:
            self._ended.set()
            raise

    def _settle(self, endpoint: Endpoint, key: str, ask: Ask) -> bool:
        before = self._kept.find(key)
        spent = _Try(cost=before.cost_millionths if before is not None else 0)
        limited_until = time.monotonic() + LIMITED_SECONDS
        failures = 0
        while True:
            grant = self._grant(key, ask)
            if grant is None:
                return spent.tries > 0
            try:
                self._request(endpoint, grant, ask, spent)
            except AgainError as error:
                if error.anew or (error.limited and time.monotonic() < limited_until):
                    continue
                failures += 1
                if failures > self._options.retries:
                    with self._lock:
                        self._failed_in_a_row += 1
                    self._fail(key, ask, spent, f"given up after {spent.tries} tries: {one_line(error)}")
                    return True
                self._ended.wait(max(error.after or 0.0, self._pause_of(failures)))
            except NeverError as error:
                self._fail(key, ask, spent, f"refused: {error}")
                return True
            else:
                self._failed_in_a_row = 0
                return True

    def _request(self, endpoint: Endpoint, grant: Grant, ask: Ask, spent: _Try) -> None:
        """One try under a grant; its cost and any answer are on disk before the grant ends."""
        started = time.monotonic()
        most = cost_at_most(self._options, ask)
        paid = most  # unless the try is found to be free
        spent.tries += 1
        try:
            answered = endpoint.ask(ask)
            paid = self._cost(answered, most)
            spent.cost += paid
            self._write(grant.ask, ask, spent, answered=answered, seconds=time.monotonic() - started)
        except AgainError as error:
            paid = most if error.paid else 0
            if error.limited:  # set while the grant is held, so that no worker asks before
                self._pause(error.after if error.after is not None else self._pause_of(spent.tries))
            if paid:
                spent.cost += paid
                self._write(grant.ask, ask, spent, error=one_line(error))
            raise
        except (NeverError, OperatorError):
            paid = 0
            raise
        finally:
            self._give_back(grant, paid)

    def _cost(self, answered: Answered, most: int) -> int:
        if answered.prompt_tokens is None or answered.completion_tokens is None:
            return most
        return cost(self._options, answered.prompt_tokens, answered.completion_tokens)

    def _grant(self, key: str, ask: Ask) -> Grant | None:
        """A grant for one try; None once the ask has an answer from another job, or has failed."""
        most = cost_at_most(self._options, ask)
        away_since: float | None = None
        while not self._ended.is_set():
            if self._failed_in_a_row >= GIVE_UP_AFTER:
                self._errors[key] = f"not asked: the endpoint failed {GIVE_UP_AFTER} judgements in a row"
                return None
            try:
                taken = self._caps.take(key, most)
            except QueueUnavailable as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > AWAY_SECONDS:
                    raise RetryError(f"the judge's limits cannot be checked: {error}") from error
                self._ended.wait(1.0)
                continue
            away_since = None
            if isinstance(taken, Grant):
                if not self._has(key):
                    return taken
                self._give_back(taken, 0)  # another job had the grant meanwhile
                return None
            if isinstance(taken, Over):
                self._errors[key] = (
                    f"not asked: max_cost {self._options.max_cost:g} would be passed ({taken.spent / 1e6:.6g} "
                    f"spent, this one at most {most / 1e6:.6g})"
                )
                return None
            self._ended.wait(min(taken, 1.0))
        return None

    def _give_back(self, grant: Grant, paid: int) -> None:
        try:
            self._caps.settle(grant, paid)
        except QueueUnavailable as error:
            log.warning("a grant ends by itself: %s", error)

    def _pause(self, seconds: float) -> None:
        """Pause all workers, or this thread alone where Redis is away."""
        try:
            self._caps.pause(seconds)
        except QueueUnavailable:
            self._ended.wait(seconds)

    def _pause_of(self, failures: int) -> float:
        """Seconds before the next try: doubling, half of it random to spread the threads."""
        full = min(self._backoff * 2.0 ** min(failures - 1, 10), MAX_BACKOFF, MAX_PAUSE)
        return full * random.uniform(0.5, 1.0)

    def _fail(self, key: str, ask: Ask, spent: _Try, why: str) -> None:
        self._errors[key] = why
        self._write(key, ask, spent, error=why)

    def _write(
        self,
        key: str,
        ask: Ask,
        spent: _Try,
        *,
        answered: Answered | None = None,
        error: str = "",
        seconds: float = 0.0,
    ) -> None:
        options = self._options
        judgement = Judgement(
            key=key,
            evaluation=self._evaluation,
            job=self._name,
            url=options.url,
            model=options.model,
            temperature=options.temperature,
            max_tokens=options.max_tokens,
            form=ask.form,
            system=ask.system.encode(errors="replace").decode(),
            user=ask.user.encode(errors="replace").decode(),
            answer=answered and answered.text,
            error=error,
            prompt_tokens=answered and answered.prompt_tokens,
            completion_tokens=answered and answered.completion_tokens,
            cost_millionths=spent.cost,
            tries=max(1, spent.tries),
            seconds=seconds,
            answered_at=time.time(),
        )
        self._kept.keep(judgement)
