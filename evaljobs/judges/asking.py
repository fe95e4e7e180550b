"""Sends asks to the judge with the openai client, concurrently, and stores the judgements.

Rule: a file lock lets one job at a time use an endpoint, so that its limits are this process's own. Each judgement is on disk
before it counts, and an answered ask is never sent again. An unanswered ask ends with a reason. Only an error that the
operator must fix (key, model, address) ends the job. The key is only sent to the configured address, and removed from every
text that comes back. Called from `scoring.score`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import JudgeConfig, JudgeJob
from evaljobs.contract.storage import hold_lock, read_secret
from evaljobs.errors import OperatorError
from evaljobs.judges.judgement import (
    Ask,
    Judgement,
    Reply,
    ask_key,
    cost_at_most,
    find_judgement,
    read_answer,
    read_judgements,
    reply_cost,
    write_judgement,
)

LIMITED_SECONDS: Final = 900.0  # longest time for an ask to wait out 429 replies
LIMITED_PAUSE: Final = 30.0  # pause before an ask whose attempts all met 429 starts over
GIVE_UP_AFTER: Final = 10  # consecutive failed asks before the endpoint counts as down
OTHER_LIMIT: Final = "max_completion_tokens"  # the only name of `max_tokens` accepted by newer OpenAI models
_REFUSES_US: Final = (401, 402, 403, 404, 405)
MAX_TOKENS: Final = 10**7  # largest plausible number of tokens per request
_QUOTED: Final = 300  # characters of a refusal quoted in a message


def read_key(judge: JudgeConfig) -> str | None:
    """Read the key from its variable or file; None if no setting names one.

    Raise OperatorError if it is missing, or if other users can read the file.
    """
    if judge.api_key_env is not None:
        key = os.environ.get(judge.api_key_env, "").strip()
        if not key:
            raise OperatorError(f"[judge] api_key_env: ${judge.api_key_env} is not set here")
    elif judge.api_key_file is not None:
        key = read_secret("[judge] api_key_file", judge.api_key_file)
    else:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise OperatorError("[judge]: the API key is empty, or not a single line of plain characters")
    return key


def without_surrogates(text: str) -> str:
    """Return a text without lone surrogates, which can be neither sent nor written to a file."""
    return text.encode(errors="replace").decode()


class Judges:
    """The judge of one job. Raise OperatorError if its evaluation has none (`job` is None)."""

    def __init__(self, job: JudgeJob | None, evaluation_dir: str, name: str) -> None:
        if job is None:
            raise OperatorError("the task asks a judge: set `judge = true` in its [[task]] and [judge] url")
        self._options = job.options
        self._folder = EvaluationPaths(evaluation_dir).judgements
        self._cache = Path(job.cache_dir)
        self._evaluation = Path(evaluation_dir).name
        self._name = name
        self._key: str | None = None
        self._limit = "max_tokens"  # this endpoint's name for the limit on answer tokens
        self._spent = self._held = 0  # millionths: of answers on disk; at most of requests in flight
        self._failed_in_a_row = 0
        self._errors: dict[str, str] = {}

    def ask_missing(self, asks: Iterable[Ask]) -> int:
        """Send the unanswered asks and return how many. Raise JobError if the operator must act."""
        wanted = {ask_key(ask, self._options): ask for ask in asks}
        if not self._missing(wanted):
            return 0
        self._key = read_key(self._options)
        endpoint = hashlib.sha256(f"{self._options.url}\n{self._options.model}".encode()).hexdigest()[:16]
        # File WORK_DIR/cache/judgements/HASH.lock: locked (flock) by the one job that asks a judge | a metric worker | stays
        with hold_lock(self._cache / f"{endpoint}.lock"):
            found = read_judgements(self._folder)
            self._spent = sum(j.cost_millionths for j in found if j.evaluation == self._evaluation)
            return asyncio.run(self._ask_all(self._missing(wanted)))

    def replies(self, asks: Sequence[Ask]) -> list[Reply]:
        """Return the stored replies to these asks without sending a request."""
        return [self._reply(ask) for ask in asks]

    def _reply(self, ask: Ask) -> Reply:
        key = ask_key(ask, self._options)
        found = find_judgement(self._folder, self._cache, key)
        if found is not None and found.answer is not None:
            return read_answer(ask.form, found.answer)
        on_disk = found.error if found is not None else "not asked"
        return Reply(value=None, error=self._errors.get(key) or on_disk)

    def _missing(self, asks: Mapping[str, Ask]) -> dict[str, Ask]:
        found = {key: find_judgement(self._folder, self._cache, key) for key in asks}
        return {key: ask for key, ask in asks.items() if (had := found[key]) is None or had.answer is None}

    async def _ask_all(self, asks: Mapping[str, Ask]) -> int:
        import httpx2  # noqa: PLC0415 (a second, for jobs that ask)
        import openai  # noqa: PLC0415

        for name in ("httpx2", "openai"):  # they log each request
            logging.getLogger(name).setLevel(logging.WARNING)
        options, pace = self._options, asyncio.Lock()

        class InTime(openai.DefaultAsyncHttpxClient):
            async def send(self, *request: Any, **how: Any) -> httpx2.Response:
                """Send a request after a wait that keeps any 60 s within `requests_per_minute`, including retries.

                The complete answer must arrive in time, since the client's own limit starts over with each byte.
                """
                async with pace:
                    await asyncio.sleep(
                        60.0 / options.requests_per_minute if options.requests_per_minute else 0.0
                    )
                try:
                    async with asyncio.timeout(options.timeout_seconds):
                        return await super().send(*request, **how)
                except TimeoutError:
                    raise httpx2.ReadTimeout("") from None

        client = openai.AsyncOpenAI(
            base_url=options.url,
            api_key=self._key or "none",
            max_retries=options.retries,
            timeout=options.timeout_seconds,
            http_client=InTime(follow_redirects=False),
        )
        at_once = asyncio.Semaphore(options.concurrency)

        async def settled(key: str, ask: Ask) -> bool:
            async with at_once:
                return await self._settle(client, key, ask)

        async with client:
            return sum(await asyncio.gather(*(settled(key, ask) for key, ask in asks.items())))

    async def _settle(self, client: Any, key: str, ask: Ask) -> bool:
        """Store the judgement of one ask, or why it has none; return whether it was sent."""
        most = cost_at_most(self._options, ask)
        if self._failed_in_a_row >= GIVE_UP_AFTER:
            self._errors[key] = f"not asked: the endpoint failed {GIVE_UP_AFTER} judgements in a row"
            return False
        if not await self._affords(most):
            self._errors[key] = (
                f"not asked: max_cost {self._options.max_cost:g} would be passed ({self._spent / 1e6:.6g} "
                f"spent, this one at most {most / 1e6:.6g})"
            )
            return False
        self._held += most
        started = time.time()
        try:
            found = await self._asked(client, ask, most)
        finally:
            self._held -= most
        judgement = Judgement(
            key=key,
            evaluation=self._evaluation,
            job=self._name,
            **self._options.model_dump(include={"url", "model", "temperature", "max_tokens"}),
            form=ask.form,
            system=without_surrogates(ask.system),
            user=without_surrogates(ask.user),
            seconds=time.time() - started,
            answered_at=time.time(),
            **found,
        )
        write_judgement(self._folder, self._cache, judgement)
        self._spent += judgement.cost_millionths
        self._errors[key] = judgement.error
        return True

    async def _affords(self, most: int) -> bool:
        """Return whether `max_cost` allows a request of this cost; wait while that depends on requests in flight."""
        if self._options.max_cost is None:
            return True
        cap = self._options.max_cost * 1e6
        while self._held and self._spent + most <= cap < self._spent + self._held + most:  # noqa: ASYNC110 (rare)
            await asyncio.sleep(0.05)
        return self._spent + most <= cap

    async def _asked(self, client: Any, ask: Ask, most: int) -> dict[str, Any]:
        """Return a judgement's fields for the answer, or for its lack. Raise OperatorError if no ask can be answered."""
        import openai  # noqa: PLC0415

        try:
            response = await self._sent(client, ask)
        except openai.APIStatusError as error:
            why = self._clean(str(error))
            if (
                error.status_code in _REFUSES_US
                or error.status_code < 400
                or "insufficient_quota" in str(error)
            ):
                raise OperatorError(
                    f"the judge at {self._options.url} refuses the request (check [judge] url, model and key): {why}"
                ) from None
            if error.status_code < 500 and error.status_code not in (408, 409, 429):
                return {"answer": None, "error": f"refused: {why}"}
        except openai.APIError as error:  # no connection, or no answer in time
            why = self._clean(f"{error} {error.__cause__ or ''}")
        else:
            self._failed_in_a_row = 0
            return {"tries": response.retries_taken + 1, **self._read(response.text, most)}
        self._failed_in_a_row += 1
        tries = self._options.retries + 1
        return {"answer": None, "tries": tries, "error": f"given up after {tries} tries: {why}"}

    async def _sent(self, client: Any, ask: Ask) -> Any:
        """Return the endpoint's response to an ask. Raise openai.APIError after the client's own retries."""
        import openai  # noqa: PLC0415

        until = time.monotonic() + LIMITED_SECONDS
        while True:
            limit = self._limit
            try:
                return await client.chat.completions.with_raw_response.create(
                    model=self._options.model,
                    messages=[
                        {"role": "system", "content": without_surrogates(ask.system)},
                        {"role": "user", "content": without_surrogates(ask.user)},
                    ],
                    temperature=self._options.temperature,
                    extra_headers=None if self._key else {"Authorization": openai.Omit()},
                    **{limit: self._options.max_tokens},
                )
            except openai.BadRequestError as error:
                if limit == OTHER_LIMIT or OTHER_LIMIT not in str(error):
                    raise
                self._limit = OTHER_LIMIT
            except openai.RateLimitError as error:
                if "insufficient_quota" in str(error) or time.monotonic() >= until:
                    raise
                await asyncio.sleep(LIMITED_PAUSE)

    def _read(self, text: str, most: int) -> dict[str, Any]:
        """Parse the answer with its tokens and cost; without counts from the endpoint, its maximum cost."""
        try:
            found = json.loads(text)
            answer = found["choices"][0]["message"]["content"] or ""
            usage = found.get("usage") or {}
            prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
            known = prompt is not None and completion is not None
            return {
                "answer": self._without_key(answer),
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "cost_millionths": reply_cost(self._options, prompt or 0, completion or 0) if known else most,
            }
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {"answer": None, "error": f"the response is not a chat completion: {self._clean(text)}"}

    def _clean(self, text: str) -> str:
        line = " ".join(self._without_key(text).split())[:_QUOTED]
        return "".join(c if c.isprintable() else "?" for c in line)

    def _without_key(self, text: str) -> str:
        return without_surrogates(text).replace(self._key, "[key]") if self._key else without_surrogates(text)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None
