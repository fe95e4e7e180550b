"""One request to an OpenAI-compatible endpoint: `POST {url}/chat/completions`.

Rule: a request ends within its time even where the endpoint is silent or sends its answer slowly. It ends in an answer, AgainError (429, 5xx, lost connection,
silence, broken JSON), NeverError (this ask is refused) or OperatorError (key, model, address). The
key goes to the configured address alone (no redirects) and is removed from every text that comes
back. Called from `asking`.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import requests
import requests.adapters
import urllib3

from evaljobs.contract.specs import JudgeOptions
from evaljobs.contract.storage import read_secret
from evaljobs.errors import OperatorError
from evaljobs.judges.judgement import Ask

CONNECT_SECONDS: Final = 15.0
MAX_BYTES: Final = 8 << 20  # largest response in bytes; an answer of 2,048 tokens has some 10,000
MAX_TOKENS: Final = 10**7  # most tokens of one request that an endpoint can mean
MAX_PAUSE: Final = 300.0  # longest wait in seconds for one Retry-After
OTHER_LIMIT: Final = "max_completion_tokens"
_QUOTED: Final = 300  # most characters of a refusal that a message quotes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The judge's text and the endpoint's token counts (None: it sent none)."""

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None


class AgainError(Exception):
    """Trying again may work.

    `paid`: the try may have been billed. `limited`: the endpoint asked for a pause. `anew`: the
    next try differs, so it can follow at once. `after`: seconds to wait first.
    """

    def __init__(
        self, why: str, *, paid: bool, limited: bool = False, anew: bool = False, after: float | None = None
    ) -> None:
        super().__init__(why)
        self.paid, self.limited, self.anew, self.after = paid, limited, anew, after


class NeverError(Exception):
    """The endpoint refuses this ask, and would refuse it again."""


def read_key(judge: JudgeOptions) -> str | None:
    """The key from its variable or file; None where no setting names one.

    Raises OperatorError where it is missing, or where other users can read the file.
    """
    if judge.api_key_env is not None:
        key = os.environ.get(judge.api_key_env, "").strip()
        if not key:
            raise OperatorError(f"[judge] api_key_env: ${judge.api_key_env} is not set here")
    elif judge.api_key_file is not None:
        key = read_secret("[judge] api_key_file", Path(judge.api_key_file))
    else:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise OperatorError("[judge]: the API key is empty, or no single line of plain characters")
    return key


class Endpoint:
    """The judge's address with its key. Threads may share it; each request has its own connection."""

    def __init__(self, judge: JudgeOptions, key: str | None) -> None:
        self._judge = judge
        self._key = key
        self._limit = "max_tokens"  # this endpoint's name for the limit on answer tokens

    def ask(self, ask: Ask) -> Answered:
        """The judge's answer. Errors are AgainError, NeverError, OperatorError, without the key."""
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
        refusal, after = self._refusal(data), retry_after(headers.get("Retry-After"), time.time)
        if status == 429:
            if "insufficient_quota" in refusal:
                raise OperatorError(f"the judge at {judge.url} has no quota left for this key: {refusal}")
            raise AgainError(f"429 too many requests: {refusal}", paid=False, limited=True, after=after)
        if status in (408, 409, 425) or status >= 500:
            raise AgainError(f"HTTP {status}: {refusal}", paid=False, after=after)
        if status in (401, 402, 403, 404, 405) or 300 <= status < 400:
            raise OperatorError(
                f"the judge at {judge.url} refuses us (HTTP {status}; check [judge] url, model and key): {refusal}"
            )
        if status == 400 and limit != OTHER_LIMIT and OTHER_LIMIT in refusal:
            self._limit = OTHER_LIMIT  # newer OpenAI models accept this name alone
            raise AgainError(f"HTTP 400: {refusal}", paid=False, anew=True)
        raise NeverError(f"HTTP {status}: {refusal}")

    def _post(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        deadline = _Deadline(self._judge.timeout_seconds)
        limits = (min(CONNECT_SECONDS, self._judge.timeout_seconds), self._judge.timeout_seconds)
        connected = False
        try:
            with (
                deadline.session() as session,
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
            raise OperatorError(f"[judge] url {self._judge.url} is not a URL") from error
        except requests.exceptions.ConnectTimeout as error:
            raise AgainError("the endpoint cannot be reached in time", paid=False) from error
        except (requests.exceptions.Timeout, urllib3.exceptions.ReadTimeoutError) as error:
            raise AgainError(f"no answer within {self._judge.timeout_seconds:g} s", paid=True) from error
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            if deadline.passed:
                raise AgainError(f"no answer within {self._judge.timeout_seconds:g} s", paid=True) from error
            never = not connected and "NewConnectionError" in repr(error)
            raise AgainError(f"the connection failed: {self._clean(repr(error))}", paid=not never) from error

    def _authorize(self, request: Any) -> Any:
        """Add the key. As `auth` it replaces user and password, so requests does not read ~/.netrc."""
        if self._key is not None:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _answer(self, data: bytes) -> Answered:
        try:
            found = json.loads(data)
            text = found["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise AgainError(
                f"the response is no chat completion: {self._refusal(data)}", paid=True
            ) from error
        if text is not None and not isinstance(text, str):
            raise AgainError(f"the response's content is no text: {self._refusal(data)}", paid=True)
        usage = found.get("usage")
        return Answered(
            text=self._clean_all(text or ""),
            prompt_tokens=_count(usage, "prompt_tokens"),
            completion_tokens=_count(usage, "completion_tokens"),
        )

    def _refusal(self, data: bytes) -> str:
        """A refusal's text on one line: its `error.message` and `error.code` where it has them."""
        text = data[: 1 << 16].decode(errors="replace")
        try:
            error = json.loads(text)["error"]
            text = " ".join(str(error[part]) for part in ("message", "code") if error.get(part))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        return self._clean(text)

    def _clean(self, text: str) -> str:
        line = " ".join(self._clean_all(text).split())[:_QUOTED] or "no message"
        return "".join(c if c.isprintable() else "?" for c in line)

    def _clean_all(self, text: str) -> str:
        text = text.encode(errors="replace").decode()  # lone surrogates cannot be written to a file
        return text.replace(self._key, "[key]") if self._key else text


class _Deadline(requests.adapters.HTTPAdapter):  # type: ignore[misc]
    """Ends the connection of one request after `seconds`, in whatever part of the answer it is then.

    The limits of requests and http.client begin anew with each byte that arrives.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.passed = False
        self._connections: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def session(self) -> requests.Session:
        """A session over this adapter alone, for one request. The time begins now."""
        session = requests.Session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, self)
        self._timer.start()
        return session

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        connections, plain = self._connections, pool.ConnectionCls

        class Watched(plain):  # type: ignore[misc,valid-type]
            def _new_conn(self) -> Any:
                connection = super()._new_conn()
                connections.append(connection.dup())  # TLS takes the descriptor away from the first
                return connection

        pool.ConnectionCls = Watched
        return pool

    def _end(self) -> None:
        self.passed = True
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._timer.cancel()
        for connection in self._connections:
            connection.close()
        super().close()


def _read(response: Any, deadline: _Deadline) -> bytes:
    """The body, limited in bytes and in time."""
    chunks: list[bytes] = []
    size = 0
    while chunk := response.raw.read1(1 << 16, decode_content=True):  # the bytes that have arrived
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_BYTES:
            raise AgainError(f"the response is longer than {MAX_BYTES} bytes", paid=True)
    if deadline.passed:
        raise requests.exceptions.ReadTimeout
    return b"".join(chunks)


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def retry_after(text: str | None, now: Callable[[], float]) -> float | None:
    """Seconds of a Retry-After (number or HTTP date, RFC 9110), at most MAX_PAUSE, or None."""
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
