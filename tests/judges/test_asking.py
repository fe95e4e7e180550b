"""Laws of asking, against a real endpoint that fails in every way."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from dev_cluster.testing import wait_until
from support.endpoint import serving

from evaljobs.errors import OperatorError
from evaljobs.judges import asking
from evaljobs.judges.asking import Judges
from evaljobs.judges.judgement import Ask, Judgement

KEY = "sk-very-secret"
ASKER = """
import sys
from evaljobs.contract.specs import JudgeJob
from evaljobs.judges.asking import Judges
from evaljobs.judges.judgement import Ask
job = JudgeJob.model_validate_json(sys.argv[1])
asks = [Ask(system="s", user=f"{sys.argv[4]}{i}", form="rating") for i in range(int(sys.argv[3]))]
judges = Judges(job, sys.argv[2], f"job-{sys.argv[4]}")
print(judges.ask_missing(asks), sum(r.value is not None for r in judges.replies(asks)))
"""


def asks(count, name="q"):
    return [Ask(system="s", user=f"{name}{i}", form="rating") for i in range(count)]


def with_options(job, **options):
    return job.model_copy(update={"options": job.options.model_copy(update=options)})


def judges(job, folder, **options):
    return Judges(with_options(job, **options), str(folder), "job")


def start(job, folder, count, name):
    argv = [sys.executable, "-c", ASKER, job.model_dump_json(), str(folder), str(count), name]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def kept(folder):
    return [Judgement.model_validate_json(f.read_bytes()) for f in (folder / "judgements").glob("*.json")]


def late(request):
    time.sleep(0.02)  # seconds that the judge takes to answer
    request.answer()


def test_every_judgement_is_kept_with_its_prompt_and_never_asked_again(job, folder, endpoint):
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
    assert "Authorization" not in endpoint.requests[0].headers, "no setting names a key"


def drip(request):
    """An answer a byte at a time, without end."""
    request.handler.send_response(200)
    request.handler.end_headers()
    while not request.released.wait(0.05):
        request.handler.wfile.write(b" ")


def once(fault):
    return lambda r: fault(r) if r.number == 0 else r.answer()


def counted(prompt):
    """An answer whose prompt has so many tokens."""
    usage = {"prompt_tokens": prompt, "completion_tokens": 1}
    body = json.dumps({"choices": [{"message": {"content": "[[7]]"}}], "usage": usage}).encode()
    return lambda r: r.send(200, body)


def sends(body):
    return lambda r: r.send(200, body)


def refuses(status):
    return lambda r: r.error(status, "\x1b[2J\x9b31m\a too\r\nlong")


NO_ANSWER = None, "not a chat completion"
# what the endpoint does -> its way to answer, the item's value, words of its error, requests sent, asks of the next job
ANSWERS = {
    # a passing fault is tried again
    "5xx": (once(lambda r: r.error(503)), 7.0, "", 2, 0),
    "closed in the middle": (once(lambda r: r.close_in_the_middle()), 7.0, "", 2, 0),
    "hanging": (once(lambda r: r.hang()), 7.0, "", 2, 0),
    "without end": (once(drip), 7.0, "", 2, 0),
    "limited": (once(lambda r: r.error(429, Retry_After="0.1")), 7.0, "", 2, 0),
    "limited past its tries": (once(lambda r: r.error(429, Retry_After="1000")), 7.0, "", 2, 0),
    # what is no chat completion fails its item until the next job
    "broken JSON": (sends(b'{"choices": [{"mess'), *NO_ANSWER, 1, 1),
    "other JSON": (sends(b'{"choices": []}'), *NO_ANSWER, 1, 1),
    "numbers for names": (sends(b'{"choices": {"0": 1}, "error": 5}'), *NO_ANSWER, 1, 1),
    "no text": (sends(b'{"choices": [{"message": {"content": {"a": 1}}}]}'), *NO_ANSWER, 1, 1),
    "nested without end": (sends(b"[" * 200_000), *NO_ANSWER, 1, 1),
    "a number of 10,000 digits": (sends(b'{"choices": ' + b"9" * 10_000 + b"}"), *NO_ANSWER, 1, 1),
    # a refused ask is not repeated, and its words command no terminal
    **{f"refused, {status}": (refuses(status), None, "too long", 1, 1) for status in (400, 413, 422)},
    # an answer without a rating was paid for: kept, reported with its end, and not asked for again
    "no rating": (lambda r: r.answer("I would rather not say."), None, "rather not say", 1, 0),
    # a count of tokens that cannot be is billed as the most
    **{
        f"{str(count)[:9]} tokens": (counted(count), 7.0, "", 1, 0)
        for count in (None, 10**400, -5, 1.5, "many", True)
    },
}


@pytest.mark.parametrize("what", ANSWERS)
def test_each_answer_of_an_endpoint_has_its_reply(what, job, folder, endpoint, monkeypatch):
    """No answer ends the job, commands a terminal, or costs more than it can have cost."""
    handle, value, error, sent, again = ANSWERS[what]
    monkeypatch.setattr(asking, "LIMITED_PAUSE", 0.01)
    endpoint.handle = handle
    prices = {"price_per_million_prompt_tokens": 1.0, "price_per_million_completion_tokens": 1.0}
    one = judges(job, folder, timeout_seconds=1.0 if what in {"hanging", "without end"} else 60.0, **prices)
    one.ask_missing(asks(1))
    (reply,) = one.replies(asks(1))
    assert reply.value == value
    assert bool(reply.error) == (value is None)
    assert error in reply.error
    assert not reply.error or reply.error.isprintable()
    assert value is None or 0 < kept(folder)[0].cost_millionths < 10_000
    assert len(endpoint.requests) == sent
    endpoint.handle = lambda r: r.answer("[[2]]")
    next_job = judges(job, folder)
    assert next_job.ask_missing(asks(1)) == again
    assert next_job.replies(asks(1))[0].value == (2.0 if again else value)


def test_a_lasting_fault_fails_its_item_alone(job, folder, endpoint):
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


@pytest.mark.parametrize("status", [401, 403, 404, 301, 429])
def test_what_the_operator_must_mend_ends_the_job(status, job, folder, endpoint, monkeypatch):
    """A wrong key, model or address, or no quota: one error without the key; no redirect takes the key."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving() as other:
        endpoint.handle = lambda r: r.error(
            status, f"{KEY} {'-' * 300} insufficient_quota", Location=f"{other.url}/else"
        )
        with pytest.raises(OperatorError) as caught:
            judges(job, folder, concurrency=1, api_key_env="JUDGE_KEY", retries=0).ask_missing(asks(6))
        assert other.requests == []
    assert KEY not in str(caught.value)
    assert {r.headers["Authorization"] for r in endpoint.requests} == {f"Bearer {KEY}"}
    assert endpoint.users() == ["q0"]


def test_the_key_that_an_endpoint_echoes_is_in_no_file_and_no_message(job, folder, endpoint, monkeypatch):
    """In the answer, spelt with JSON's escapes, in a refusal, and in what is no answer."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    escaped = "".join(f"\\u{ord(c):04x}" for c in KEY)
    text = '{"choices": [{"message": {"content": "[[7]] %s"}}]}'
    sends = [(200, text % KEY), (200, text % escaped), (422, f'{{"error": {{"message": "{escaped}"}}}}')]
    sends.append((200, KEY))
    endpoint.handle = lambda r: r.send(sends[r.number][0], sends[r.number][1].encode())
    one = judges(job, folder, api_key_env="JUDGE_KEY", concurrency=1)
    assert one.ask_missing(asks(4)) == 4
    assert [bool(r.error) for r in one.replies(asks(4))] == [False, False, True, True]
    assert not any(KEY in r.error for r in one.replies(asks(4)))
    files = [path for path in folder.parent.rglob("*") if path.is_file()]
    assert len(files) >= 6
    assert not any(KEY.encode() in path.read_bytes() for path in files)


def test_a_dead_endpoint_is_not_asked_for_each_item(job, folder, endpoint):
    """After ten asks in a row that failed all tries, the rest fails at once and says why."""
    endpoint.handle = lambda r: r.error(500)
    one = judges(job, folder, concurrency=4, retries=0)
    one.ask_missing(asks(200))
    replies = one.replies(asks(200))
    assert all(r.value is None and r.error for r in replies)
    assert sum("in a row" in r.error for r in replies) > 180
    assert len(endpoint.requests) < 20


def test_an_endpoint_with_another_name_for_the_bound_is_asked_by_it(job, folder, endpoint):
    """A refusal that names max_completion_tokens costs no try: the asks go out again with that
    name. An endpoint that refuses both is refused.
    """

    def handle(request):
        if "max_tokens" in request.body:
            request.error(400, "'max_tokens' is not supported. Use 'max_completion_tokens' instead.")
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
    assert "refused" in never.replies(asks(1, "other"))[0].error


# --- limits and deaths ---------------------------------------------------------------------------------------------------


def test_two_jobs_ask_one_after_the_other_within_the_limits(job, folder, endpoint):
    """At most `concurrency` requests at once of both together, and sometimes as many; the same ask goes out once."""
    endpoint.handle = late
    workers = [start(with_options(job, concurrency=3), folder, 20, name) for name in "aab"]
    assert [w.communicate(timeout=60)[0].split()[1] for w in workers] == ["20"] * 3
    assert endpoint.most_open == 3
    assert len(endpoint.requests) == len(set(endpoint.users())) == 40


def test_requests_and_tries_keep_the_rate(job, folder, endpoint):
    """At 600 a minute no request follows another in less than 0.1 s, a try again included."""
    endpoint.handle = lambda r: r.error(500) if r.number == 0 else r.answer()
    one = judges(job, folder, requests_per_minute=600)
    assert one.ask_missing(asks(5)) == 5
    assert len(endpoint.requests) == 6
    assert endpoint.starts[5] - endpoint.starts[0] >= 0.45


def test_the_cost_cap_is_never_passed_and_says_so(job, folder, endpoint):
    """Twenty asks, budget for some: what the answers on disk cost stays below the cap, also with requests in
    flight; the rest fails with the figures, in later jobs, too.
    """
    priced = {
        "price_per_million_prompt_tokens": 1000.0,
        "price_per_million_completion_tokens": 1000.0,
        "max_tokens": 10,
        "max_cost": 1.0,  # 0.07 an ask, at most 0.077 + the message's bytes
    }
    endpoint.handle = lambda r: r.answer(prompt=60, completion=10)
    one = judges(job, folder, **priced)
    one.ask_missing(asks(20))
    replies = one.replies(asks(20))
    had = [r for r in replies if r.value is not None]
    assert 10 < len(had) < 15
    assert all("max_cost 1 would be passed" in r.error for r in replies if r.value is None)
    assert sum(k.cost_millionths for k in kept(folder)) == len(had) * 70_000 <= 1_000_000
    sent = len(endpoint.requests)
    assert judges(job, folder, **priced).ask_missing(asks(20)) == 0
    assert len(endpoint.requests) == sent


def test_a_killed_worker_loses_no_paid_answer_and_no_slot(job, folder, endpoint):
    """SIGKILL with answers on disk and requests in flight: the next worker sends the rest only, at once."""
    job = with_options(job, concurrency=2)
    endpoint.handle = lambda r: r.answer() if r.number < 5 else r.hang()
    first = start(job, folder, 12, "q")
    wait_until(lambda: len(kept(folder)) == 5 and endpoint.open == 2)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    answered = {k.user for k in kept(folder)}
    endpoint.handle = lambda r: r.answer()
    sent = len(endpoint.requests)
    assert start(job, folder, 12, "q").communicate(timeout=60)[0].split() == ["7", "12"]
    assert answered.isdisjoint(endpoint.users()[sent:])
    assert len(endpoint.requests) - sent == 7
    endpoint.released.set()
