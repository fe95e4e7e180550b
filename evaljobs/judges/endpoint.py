"""One request to an OpenAI-compatible endpoint: `POST {url}/chat/completions`.

Rule: a request ends within its time though the other side is silent or drips a body (one that drips its headers is
ended by the job's own deadline), and ends in one of four ways: an answer, "again"
(429, 5xx, a connection lost, silence, broken JSON), "never" (this ask is refused), or an error of the operator's
(key, model, address). The key is sent to the configured address alone (no redirects), and is struck from every text
that comes back.
It does not know: caps, files, how often to try.
"""

from __future__ import annotations

import email.utils
import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import requests
import urllib3

from evaljobs.contract.specs import JudgeOptions
from evaljobs.errors import OperatorError
from evaljobs.judges.records import Ask

CONNECT_SECONDS: Final = 15.0
MAX_BYTES: Final = 8 << 20  # of a response; an answer of 2,048 tokens has some 10,000
MAX_PAUSE: Final = 300.0  # seconds of a Retry-After that are waited at once
OTHER_LIMIT: Final = "max_completion_tokens"
_TOLD: Final = 300  # characters of a refusal that are repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The judge's text, and the tokens that the endpoint counted (None where it did not say)."""

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None


class AgainError(Exception):
    """Trying again may work. `paid`: the other side may have counted it; `limited`: it asked for a pause; `anew`: the
    next request will be put in other words.
    """

    def __init__(
        self,
        why: str,
        *,
        paid: bool,
        limited: bool = False,
        anew: bool = False,
        after: float | None = None,
    ) -> None:
        super().__init__(why)
        self.paid = paid
        self.limited = limited
        self.anew = anew
        self.after = after


class NeverError(Exception):
    """This ask is refused, and would be again."""


def read_key(judge: JudgeOptions) -> str | None:
    """The key, from its variable or file; None where the settings name none. OperatorError where it is not there, or
    where others can read the file.
    """
    if judge.api_key_env is not None:
        key = os.environ.get(judge.api_key_env, "").strip()
        if not key:
            raise OperatorError(f"[judge] api_key_env: ${judge.api_key_env} is not set here")
    elif judge.api_key_file is not None:
        place = Path(judge.api_key_file)
        try:
            mode = place.stat().st_mode
            key = place.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OperatorError(f"[judge] api_key_file {place} cannot be read: {error}") from error
        if not stat.S_ISREG(mode) or mode & 0o077:
            raise OperatorError(f"[judge] api_key_file {place} is open to others: chmod 600 {place}")
    else:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise OperatorError("[judge]: the API key is empty, or no single line of plain characters")
    return key


class Endpoint:
    """The judge's address with its key. Threads may share it; each request has a connection of its own."""

    def __init__(self, judge: JudgeOptions, key: str | None) -> None:
        self._judge = judge
        self._key = key
        self._limit = "max_tokens"  # what the bound of an answer is called here

    def ask(self, ask: Ask) -> Answered:
        """The judge's answer. Raises AgainError, NeverError, OperatorError; their texts hold no key."""
        judge, limit = self._judge, self._limit
        body = {
            "model": judge.model,
            "messages": [
                {"role": "system", "content": ask.system},
                {"role": "user", "content": ask.user},
            ],
            "temperature": judge.temperature,
            limit: judge.max_tokens,
        }
        status, headers, data = self._post(json.dumps(body).encode())
        if status == 200:
            return self._answer(data)
        told = self._told(data)
        if status == 429:
            if "insufficient_quota" in told:
                raise OperatorError(f"the judge at {judge.url} has no quota left for this key: {told}")
            after = retry_after(headers.get("Retry-After"), time.time)
            raise AgainError(f"429 too many requests: {told}", paid=False, limited=True, after=after)
        if status in (408, 409, 425) or status >= 500:
            after = retry_after(headers.get("Retry-After"), time.time)
            raise AgainError(f"HTTP {status}: {told}", paid=False, after=after)
        if status in (401, 402, 403, 404, 405) or 300 <= status < 400:
            raise OperatorError(
                f"the judge at {judge.url} refuses us (HTTP {status}; check [judge] url, model and key): {told}"
            )
        if status == 400 and limit != OTHER_LIMIT and OTHER_LIMIT in told:
            self._limit = OTHER_LIMIT  # newer models of OpenAI's know this name alone
            raise AgainError(f"HTTP 400: {told}", paid=False, anew=True)
        raise NeverError(f"HTTP {status}: {told}")

    def _post(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        deadline = time.monotonic() + self._judge.timeout_seconds
        limits = (min(CONNECT_SECONDS, self._judge.timeout_seconds), self._judge.timeout_seconds)
        connected = False
        try:
            with (
                requests.Session() as session,
                session.post(
                    f"{self._judge.url.rstrip('/')}/chat/completions",
                    data=body,
                    headers={"Content-Type": "application/json", "Accept": "application/json"},
                    auth=self._authorize,
                    timeout=limits,
                    stream=True,
                    allow_redirects=False,
                ) as response,
            ):
                connected = True
                return response.status_code, response.headers, _read(response, deadline)
        except requests.exceptions.InvalidURL as error:
            raise OperatorError(f"[judge] url {self._judge.url} is none") from error
        except requests.exceptions.ConnectTimeout as error:
            raise AgainError("the endpoint cannot be reached in time", paid=False) from error
        except (requests.exceptions.Timeout, urllib3.exceptions.ReadTimeoutError) as error:
            raise AgainError(f"no answer within {self._judge.timeout_seconds:g} s", paid=True) from error
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            never = not connected and "NewConnectionError" in repr(error)
            raise AgainError(f"the connection failed: {self._clean(repr(error))}", paid=not never) from error

    def _authorize(self, request: Any) -> Any:
        """Given in place of a user and password, it also keeps requests from looking into ~/.netrc."""
        if self._key is not None:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _answer(self, data: bytes) -> Answered:
        try:
            found = json.loads(data)
            text = found["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise AgainError(f"the response is no chat completion: {self._told(data)}", paid=True) from error
        if text is not None and not isinstance(text, str):
            raise AgainError(f"the response's content is no text: {self._told(data)}", paid=True)
        usage = found.get("usage")
        return Answered(
            text=self._clean_all(text or ""),
            prompt_tokens=_count(usage, "prompt_tokens"),
            completion_tokens=_count(usage, "completion_tokens"),
        )

    def _told(self, data: bytes) -> str:
        """What a refusal says, on one line: its `error.message` and `error.code` where it has them."""
        text = data[: 1 << 16].decode(errors="replace")
        try:
            error = json.loads(text)["error"]
            text = " ".join(str(error[part]) for part in ("message", "code") if error.get(part))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        return self._clean(text)

    def _clean(self, text: str) -> str:
        return " ".join(self._clean_all(text).split())[:_TOLD] or "no message"

    def _clean_all(self, text: str) -> str:
        text = text.encode(errors="replace").decode()  # lone surrogates of a JSON text cannot be written down
        return text.replace(self._key, "[key]") if self._key else text


def _read(response: Any, deadline: float) -> bytes:
    """The body, bounded in bytes and in time: each read waits for seconds at most, and a drip ends at the deadline."""
    chunks: list[bytes] = []
    size = 0
    while chunk := response.raw.read1(1 << 16, decode_content=True):  # what is there, however little
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_BYTES:
            raise AgainError(f"the response is longer than {MAX_BYTES} bytes", paid=True)
        if time.monotonic() > deadline:
            raise requests.exceptions.ReadTimeout
    return b"".join(chunks)


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def retry_after(text: str | None, now: Callable[[], float]) -> float | None:
    """Seconds of a Retry-After header (a number or an HTTP date, RFC 9110 10.2.3), at most MAX_PAUSE; None for none."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - now()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(seconds, 0.0), MAX_PAUSE) if seconds == seconds else None  # noqa: PLR0124 (not a number)
