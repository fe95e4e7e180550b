"""Attacks of a judge's endpoint on the job that asks it: bytes on a real socket, whatever HTTP says of them."""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.endpoint import serving

from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import JudgeJob, JudgeOptions
from evaljobs.errors import OperatorError
from evaljobs.judges.asking import Judges
from evaljobs.judges.judgement import Ask, Reply, read_answer
from evaljobs.judges.kept import judgements

KEY = "sk-very-secret"
Serve = Callable[[socket.socket], None]


@contextlib.contextmanager
def raw(serve: Serve) -> Iterator[str]:
    """The url of a server that reads a request whole, and then does with the connection what `serve` does."""
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            got = b""
            while b"max_tokens" not in got:
                got += connection.recv(1 << 16)
            serve(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while not over.is_set():
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        over.set()
        listener.shutdown(socket.SHUT_RDWR)


def asked(url: str, work: WorkPaths, folder: Path, **options: object) -> Reply:
    """The reply to one ask of a job that tries once."""
    fields = {"url": url, "model": "judge-1", "timeout_seconds": 20.0, "retries": 0, "concurrency": 1}
    made = JudgeOptions.model_validate(fields | options)
    job = JudgeJob(options=made, redis_file=str(work.redis_address), cache_dir=str(folder / "cache"))
    judges = Judges(job, str(folder / "evaluation"), "job", backoff_seconds=0.02)
    ask = Ask(system="s", user="u", form="rating")
    judges.ask_missing([ask])
    return judges.replies([ask])[0]


def whole(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def rated(text: str = "[[7]]", **usage: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}], "usage": usage}).encode()


def drip(connection: socket.socket, first: bytes, more: bytes) -> None:
    connection.sendall(first)
    while True:
        connection.sendall(more)
        time.sleep(0.05)


ENDLESS = {
    "the name of a header": (b"HTTP/1.1 200 OK\r\nX-", b"a"),
    "interim answers": (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "empty chunks of a body": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_an_answer_that_drips_without_end_is_ended_by_the_requests_own_time(what, shared_work, tmp_path):
    """Whichever part of it drips: a metric worker is held for `timeout_seconds`, and not for as long as the endpoint likes."""
    with raw(lambda connection: drip(connection, *ENDLESS[what])) as url:
        reply = asked(url, shared_work, tmp_path, timeout_seconds=0.5)
    assert "no answer within 0.5 s" in reply.error


MALFORMED = {
    "no status": b"nothing of HTTP\r\n\r\n",
    "a thousand headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
    "a header of a megabyte": b"HTTP/1.1 200 OK\r\nX: " + b"y" * (1 << 20) + b"\r\n\r\n",
    "a chunk of 2**64": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\nx",
    "a chunk of no size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nx",
    "a number of 10,000 digits": whole(b'{"choices": ' + b"9" * 10_000 + b"}"),
    "lone surrogates": whole(b'{"choices": [{"message": {"content": "\\ud800"}}]}'),
    "no text": whole(b'{"choices": [{"message": {"content": [[7]]}}]}'),
    "numbers for names": whole(b'{"choices": {"0": 1}, "error": 5}'),
    "a status of 10,000": b"HTTP/1.1 10000 OK\r\n\r\n",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_answer_fails_its_item_and_not_the_job(what, shared_work, tmp_path):
    def serve(connection: socket.socket) -> None:
        connection.sendall(MALFORMED[what])

    with raw(serve) as url:
        reply = asked(url, shared_work, tmp_path)
    assert reply.value is None
    assert reply.error


@pytest.mark.parametrize("layers", [1, 3])
def test_an_answer_that_unpacks_without_end_takes_bounded_memory(layers, shared_work, tmp_path):
    """2 GiB in a few kilobytes, packed once or several times over."""
    block = gzip.compress(bytes(1 << 24), 9)
    body = block * 128
    for _ in range(layers - 1):
        body = gzip.compress(body, 9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    packed = "Content-Encoding: " + ", ".join(["gzip"] * layers)
    with raw(lambda connection: connection.sendall(whole(body, packed))) as url:
        reply = asked(url, shared_work, tmp_path)
    assert reply.value is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


RATINGS = [
    "[[" + "1" * 7_000_000,
    "[" + "1" * 7_000_000,
    "[[" * 3_500_000,
    "[[1." * 2_000_000,
    "[[9" + "9" * 400 + "]]",
]


@pytest.mark.parametrize("number", range(len(RATINGS)))
def test_no_answer_of_a_judge_takes_long_to_read(number):
    """Each has nearly the most bytes that are read of a response: a search that is quadratic in them would take days."""
    assert read_answer("rating", RATINGS[number]).value is None


@pytest.mark.parametrize("count", [10**400, 10**30, -5, 1.5, "many", True])
def test_a_count_of_tokens_that_cannot_be_is_billed_as_the_most_that_it_can_have_cost(
    count, shared_work, tmp_path
):
    """The item has its answer, and what one answer says of its cost uses up no other evaluation's money."""
    body = whole(rated(prompt_tokens=count, completion_tokens=1))
    prices = {"price_per_million_prompt_tokens": 1.0, "price_per_million_completion_tokens": 1.0}
    with raw(lambda connection: connection.sendall(body)) as url:
        assert asked(url, shared_work, tmp_path, max_cost=1.0, **prices).value == 7.0
    (kept,) = judgements(tmp_path / "evaluation" / "judgements")
    assert 0 < kept.cost_millionths < 10_000


def test_a_redirect_takes_the_key_to_no_other_host(shared_work, tmp_path, monkeypatch):
    """Nor is the other host asked at all."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving() as other, serving() as endpoint:
        endpoint.handle = lambda request: request.send(
            307, b"", {"Location": f"{other.url}/chat/completions"}
        )
        with pytest.raises(OperatorError) as refused:
            asked(endpoint.url, shared_work, tmp_path, api_key_env="JUDGE_KEY")
        assert other.requests == []
    assert KEY not in str(refused.value)


def test_the_key_that_an_endpoint_echoes_is_in_no_file_and_no_message(shared_work, tmp_path, monkeypatch):
    """In the answer, in a refusal, spelt with JSON's escapes, and in the status line."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    escaped = "".join(f"\\u{ord(c):04x}" for c in KEY).encode()
    for number, answer in enumerate(
        [
            whole(rated(f"[[7]] {KEY}")),
            whole(b'{"choices": [{"message": {"content": "[[7]] ' + escaped + b'"}}]}'),
            b"HTTP/1.1 422 " + KEY.encode() + b"\r\nContent-Length: 0\r\n\r\n",
            b'HTTP/1.1 422 no\r\n\r\n{"error": {"message": "' + escaped + b'"}}',
            KEY.encode() + b"\r\n\r\n",
        ]
    ):
        with raw(lambda connection, answer=answer: connection.sendall(answer)) as url:
            reply = asked(url, shared_work, tmp_path / str(number), api_key_env="JUDGE_KEY")
        assert KEY not in reply.error
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert not any(KEY.encode() in path.read_bytes() for path in files)


def test_a_refusal_cannot_write_to_the_terminal(shared_work, tmp_path):
    """Its words are quoted in warnings and reports: without escape sequences, on one line."""
    body = b'{"error": {"message": "\\u001b[2J\\u009b31m\\u0007all\\r\\nwell"}}'
    with raw(lambda c: c.sendall(whole(body).replace(b"200 OK", b"422 no"))) as url:
        reply = asked(url, shared_work, tmp_path)
    assert "all" in reply.error
    assert reply.error.isprintable()
