"""Laws of asking, against a real endpoint that fails in every way and a real Redis."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.endpoint import Endpoint, Request

from evaljobs.contract.specs import JudgeJob
from evaljobs.errors import OperatorError
from evaljobs.judges.asking import Judges
from evaljobs.judges.caps import prefix
from evaljobs.judges.judgement import Ask, Judgement
from evaljobs.queue import redis_client

ASKER = """
import sys
from evaljobs.contract.specs import JudgeJob
from evaljobs.judges.asking import Judges
from evaljobs.judges.judgement import Ask
job = JudgeJob.model_validate_json(sys.argv[1])
asks = [Ask(system="s", user=f"{sys.argv[4]}{i}", form="rating") for i in range(int(sys.argv[3]))]
judges = Judges(job, sys.argv[2], f"job-{sys.argv[4]}", backoff_seconds=0.02, grant_seconds=float(sys.argv[5]))
print(judges.ask_missing(asks), sum(r.value is not None for r in judges.replies(asks)))
"""


def asks(count: int, name: str = "q") -> list[Ask]:
    return [Ask(system="s", user=f"{name}{i}", form="rating") for i in range(count)]


def judges(job: JudgeJob, folder: Path, **options: object) -> Judges:
    changed = job.model_copy(update={"options": job.options.model_copy(update=options)})
    return Judges(changed, str(folder), "job", backoff_seconds=0.02)


def start(job: JudgeJob, folder: Path, count: int, name: str, grant: float = 10.0) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", ASKER, job.model_dump_json(), str(folder), str(count), name, str(grant)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def kept(folder: Path) -> list[Judgement]:
    return [Judgement.model_validate_json(f.read_bytes()) for f in (folder / "judgements").glob("*.json")]


def test_every_judgement_is_kept_with_its_prompt_and_never_asked_again(job, folder, endpoint) -> None:
    """A second job with the same asks, even of another evaluation, sends nothing."""
    questions = asks(5)
    assert judges(job, folder).ask_missing([*questions, *questions]) == 5
    again = judges(job, folder)
    assert again.ask_missing(questions) == 0
    assert [r.value for r in again.replies(questions)] == [7.0] * 5
    other = folder.parent / "other"
    other.mkdir()
    assert judges(job, other).ask_missing(questions) == 0
    assert len(endpoint.requests) == 5
    assert sorted((k.system, k.user, k.answer) for k in kept(folder)) == [
        ("s", q.user, "Rating: [[7]]") for q in questions
    ]
    assert endpoint.requests[0].path == "/v1/chat/completions"
    assert endpoint.requests[0].body["model"] == "judge-1"


FAULTS: dict[str, Callable[[Request], None]] = {
    "5xx": lambda r: r.error(503),
    "broken JSON": lambda r: r.send(200, b'{"choices": [{"mess'),
    "other JSON": lambda r: r.send(200, b'{"choices": []}'),
    "no text": lambda r: r.send(200, b'{"choices": [{"message": {"content": {"a": 1}}}]}'),
    "nested without end": lambda r: r.send(200, b"[" * 200_000),
    "closed in the middle": lambda r: r.close_in_the_middle(),
    "hanging": lambda r: r.hang(),
    "dripping": lambda r: r.drip(),
    "limited": lambda r: r.error(429, Retry_After="0.1"),
    "too long": lambda r: r.send(200, b" " * ((8 << 20) + 1)),
}
SILENT = ("hanging", "dripping")  # found by the clock alone


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_is_tried_again(fault, job, folder, endpoint) -> None:
    """Each fault once, then an answer: the ask has its judgement and nothing is marked failed."""
    endpoint.handle = lambda r: FAULTS[fault](r) if r.number == 0 else r.answer()
    one = judges(job, folder, timeout_seconds=1.0 if fault in SILENT else 60.0)
    one.ask_missing(asks(1))
    (reply,) = one.replies(asks(1))
    assert reply.value == 7.0
    assert len(endpoint.requests) == 2


def test_a_lasting_fault_fails_its_item_alone(job, folder, endpoint) -> None:
    """One ask fails after its tries, the others succeed; the next job sends only that one."""
    endpoint.handle = lambda r: r.error(500, "poisoned") if r.user == "q1" else r.answer()
    one = judges(job, folder)
    one.ask_missing(asks(4))
    replies = one.replies(asks(4))
    assert [r.value for r in replies] == [7.0, None, 7.0, 7.0]
    assert "poisoned" in replies[1].error
    assert "3 tries" in replies[1].error
    assert endpoint.users().count("q1") == 3
    endpoint.handle = lambda r: r.answer("[[2]]")
    two = judges(job, folder)
    assert "poisoned" in two.replies(asks(4))[1].error
    assert two.ask_missing(asks(4)) == 1
    assert [r.value for r in two.replies(asks(4))] == [7.0, 2.0, 7.0, 7.0]


def test_an_answer_without_a_rating_is_an_answer(job, folder, endpoint) -> None:
    """It was paid for: kept, reported with its end, and not asked for again."""
    endpoint.handle = lambda r: r.answer("I would rather not say.")
    for sent in (1, 0):
        one = judges(job, folder)
        assert one.ask_missing(asks(1)) == sent
        (reply,) = one.replies(asks(1))
        assert reply.value is None
        assert "rather not say" in reply.error


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_ask_is_not_repeated(status, job, folder, endpoint) -> None:
    """An ask that the endpoint refuses fails at once, with the endpoint's words."""
    endpoint.handle = lambda r: r.error(status, "too long for this model")
    one = judges(job, folder)
    one.ask_missing(asks(1))
    assert "too long for this model" in one.replies(asks(1))[0].error
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404, 301])
def test_what_the_operator_must_mend_ends_the_job(status, job, folder, endpoint, monkeypatch) -> None:
    """A wrong key, model or address: one error without the key; no redirect takes the key."""
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    endpoint.handle = lambda r: r.error(status, "bad key sk-very-secret", Location=f"{endpoint.url}/else")
    with pytest.raises(OperatorError) as caught:
        judges(job, folder, concurrency=1, api_key_env="JUDGE_KEY").ask_missing(asks(6))
    assert "sk-very-secret" not in str(caught.value)
    assert len(endpoint.requests) == 1
    assert endpoint.requests[0].headers["Authorization"] == "Bearer sk-very-secret"


def test_a_dead_endpoint_is_not_asked_for_each_item(job, folder, endpoint) -> None:
    """After ten asks in a row that failed all tries, the rest fails at once and says why."""
    endpoint.handle = lambda r: r.error(500)
    one = judges(job, folder, concurrency=4, retries=1)
    one.ask_missing(asks(200))
    replies = one.replies(asks(200))
    assert all(r.value is None and r.error for r in replies)
    assert sum("in a row" in r.error for r in replies) > 150
    assert len(endpoint.requests) < 40


# --- caps ----------------------------------------------------------------------------------------------------------------


def test_two_processes_share_the_concurrency_cap(job, folder, endpoint) -> None:
    """Two workers, 24 asks each, a cap of 3: at most 3 requests at once, and sometimes 3."""
    job = job.model_copy(update={"options": job.options.model_copy(update={"concurrency": 3})})

    def handle(request: Request) -> None:
        time.sleep(0.03)  # seconds that the judge takes to answer
        request.answer()

    endpoint.handle = handle
    workers = [start(job, folder, 24, name) for name in "ab"]
    assert [w.communicate(timeout=60)[0].split() for w in workers] == [["24", "24"]] * 2
    assert endpoint.most_open == 3
    assert len(endpoint.requests) == 48


def test_two_processes_share_the_rate_cap(job, folder, endpoint, redis_work) -> None:
    """At 10 a minute two workers make 10 requests, then wait until the minute has passed."""
    job = job.model_copy(update={"options": job.options.model_copy(update={"requests_per_minute": 10})})
    workers = [start(job, folder, 8, name) for name in "ab"]
    wait_until(lambda: len(endpoint.requests) == 10)
    client = redis_client.connect(redis_work.redis_address)
    starts = prefix(job.options) + "starts"
    assert client.zcard(starts) == 10
    wait_until(lambda: len(kept(folder)) == 10)
    assert any(w.poll() is None for w in workers), "six asks wait"
    assert len(endpoint.requests) == 10
    for member, _ in client.zrange(starts, 0, -1, withscores=True):  # the minute passes
        client.zincrby(starts, -60_001, member)
    assert [w.communicate(timeout=60)[0].split() for w in workers] == [["8", "8"]] * 2
    assert len(endpoint.requests) == 16


def test_a_pause_holds_for_all_workers(job, folder, endpoint) -> None:
    """After a 429 with Retry-After neither process sends a request before that time."""
    endpoint.handle = lambda r: r.error(429, Retry_After="1") if r.number == 0 else r.answer()
    job = job.model_copy(update={"options": job.options.model_copy(update={"concurrency": 1})})
    workers = [start(job, folder, 3, name) for name in "ab"]
    assert [w.communicate(timeout=60)[0].split() for w in workers] == [["3", "3"]] * 2
    assert endpoint.starts[1] - endpoint.starts[0] >= 0.95
    assert len(endpoint.requests) == 7


def test_the_cost_cap_is_never_passed_and_says_so(job, folder, endpoint) -> None:
    """Twenty asks, budget for some: the sum spent stays below the cap, and the rest fails with the
    figures, in later jobs and after Redis has lost its data.
    """
    priced = {
        "price_per_million_prompt_tokens": 1000.0,
        "price_per_million_completion_tokens": 1000.0,
        "max_tokens": 10,
        "max_cost": 1.0,  # 0.11 an ask, at most 0.077 + the message's bytes
    }
    endpoint.handle = lambda r: r.answer(prompt=60, completion=10)
    one = judges(job, folder, **priced)
    one.ask_missing(asks(20))
    replies = one.replies(asks(20))
    had = [r for r in replies if r.value is not None]
    assert 0 < len(had) < 20
    assert all("max_cost 1 would be passed" in r.error for r in replies if r.value is None)
    assert sum(k.cost_millionths for k in kept(folder)) == len(had) * 70_000 <= 1_000_000
    sent = len(endpoint.requests)
    client = redis_client.connect(Path(job.redis_file))
    for key in list(client.scan_iter(match="evalspan:judge:*")):
        client.delete(key)
    two = judges(job, folder, **priced)
    assert two.ask_missing(asks(20)) == 0
    assert len(endpoint.requests) == sent


def test_answers_that_were_lost_are_counted_at_their_most(job, folder, endpoint) -> None:
    """Silence may have been billed: it counts as if it had been."""
    priced = {"price_per_million_completion_tokens": 1000.0, "max_tokens": 100, "max_cost": 0.25}
    endpoint.handle = lambda r: r.hang()
    one = judges(job, folder, timeout_seconds=0.2, retries=5, **priced)
    one.ask_missing(asks(1))
    assert "max_cost" in one.replies(asks(1))[0].error
    wait_until(
        lambda: len(endpoint.requests) == 2
    )  # the endpoint may get the request after this side gave up
    assert [k.cost_millionths for k in kept(folder)] == [200_000]


# --- deaths --------------------------------------------------------------------------------------------------------------


def test_a_killed_worker_loses_no_paid_answer_and_no_slot(job, folder, endpoint) -> None:
    """SIGKILL with answers on disk and requests in flight: the next worker sends the rest only, and
    the dead one's grants end by themselves.
    """
    job = job.model_copy(update={"options": job.options.model_copy(update={"concurrency": 2})})
    endpoint.handle = lambda r: r.answer() if r.number < 5 else r.hang()
    first = start(job, folder, 12, "q", grant=0.5)
    wait_until(lambda: len(kept(folder)) == 5 and endpoint.open == 2)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    answered = {k.user for k in kept(folder)}
    endpoint.handle = lambda r: r.answer()
    sent = len(endpoint.requests)
    second = start(job, folder, 12, "q", grant=0.5)
    assert second.communicate(timeout=60)[0].split() == ["7", "12"]
    assert answered.isdisjoint(endpoint.users()[sent:])
    assert len(endpoint.requests) - sent == 7
    endpoint.released.set()


def test_the_same_ask_is_never_sent_twice_at_once(job, folder, endpoint) -> None:
    """A job that runs beside its own retry: each ask goes out once in all."""

    def handle(request: Request) -> None:
        time.sleep(0.02)
        request.answer()

    endpoint.handle = handle
    workers = [start(job, folder, 20, "q") for _ in range(2)]
    assert [w.communicate(timeout=60)[0].split()[1] for w in workers] == ["20", "20"]
    assert len(endpoint.requests) == len(set(endpoint.users())) == 20


def test_a_living_worker_keeps_its_lease(job, folder, endpoint) -> None:
    """A request longer than a grant holds its slot: grants are renewed while the worker lives."""
    job = job.model_copy(update={"options": job.options.model_copy(update={"concurrency": 1})})

    def handle(request: Request) -> None:
        if request.number == 0:
            request.released.wait(3.6)  # two grants and more
        request.answer()

    endpoint.handle = handle
    workers = [start(job, folder, 2, name, grant=1.5) for name in "ab"]
    assert [w.communicate(timeout=60)[0].split() for w in workers] == [["2", "2"]] * 2
    assert endpoint.most_open == 1


def test_redis_away_is_waited_out(endpoint: Endpoint, folder: Path, tmp_path: Path) -> None:
    """No address is published yet: asking starts when it is."""
    import threading

    from coordinator.services.redis_server import RedisServer
    from evaljobs.contract.paths import WorkPaths
    from evaljobs.contract.specs import JudgeOptions

    server = RedisServer(WorkPaths(tmp_path / "work"))
    options = JudgeOptions(url=endpoint.url, model="m")
    late = JudgeJob(
        options=options, redis_file=str(server.folder / "address.json"), cache_dir=str(tmp_path / "c")
    )
    one = Judges(late, str(folder), "job")
    thread = threading.Thread(target=one.ask_missing, args=(asks(2),))
    thread.start()
    try:
        server.ensure()
        thread.join(60)
        assert [r.value for r in one.replies(asks(2))] == [7.0, 7.0]
    finally:
        server.stop()
    assert json.loads((next((folder / "judgements").glob("*.json"))).read_text())["job"] == "job"


def test_an_endpoint_with_another_name_for_the_bound_is_asked_by_it(job, folder, endpoint) -> None:
    """A refusal that names max_completion_tokens costs no try: the asks go out again with that
    name. An endpoint that refuses both is refused.
    """

    def handle(request: Request) -> None:
        if "max_tokens" in request.body:
            told = (
                "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
            )
            request.error(400, told)
        else:
            request.answer()

    endpoint.handle = handle
    asked = judges(job, folder, concurrency=2, retries=0, max_tokens=77)
    assert asked.ask_missing(asks(9)) == 9
    assert all(r.value == 7.0 for r in asked.replies(asks(9)))
    refused = [r for r in endpoint.requests if "max_tokens" in r.body]
    assert 1 <= len(refused) <= 2
    assert all(r.body["max_completion_tokens"] == 77 for r in endpoint.requests if r not in refused)
    endpoint.handle = lambda r: r.error(400, "max_completion_tokens is no parameter either")
    never = judges(job, folder, retries=0)
    assert never.ask_missing(asks(1, "other")) == 1
    (reply,) = never.replies(asks(1, "other"))
    assert reply.value is None
    assert "refused" in reply.error
