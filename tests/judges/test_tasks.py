"""Laws of judge tasks: lm-eval's own run of the shipped tasks with a real endpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.exactness import pipeline

from coordinator.errors import OperatorError as CoordinatorError
from coordinator.intake import suites
from coordinator.intake.from_settings import judge_for, judge_options
from coordinator.site.config.schema import Config, JudgeConfig
from evaljobs.contract.outcomes import Failed, Scored
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import SuiteSpec, TaskEntry
from evaljobs.errors import OperatorError
from evaljobs.judges.judgement import Reply
from evaljobs.lmeval import hooks, run
from evaljobs.scoring import score

TASKS = str(suites.suite_folder() / "judge")
SHORT = {"max_gen_toks": 4}


def suite_of(task, *, judge=True):
    entry = TaskEntry(name=task, limit=6, gen_kwargs=SHORT, judge=judge)
    return SuiteSpec(
        name="judged", include_path=(TASKS,), batch_size=2, apply_chat_template=True, tasks=(entry,)
    )


def answered(model_dir, folder, task, job):
    """All of an entry but its score."""
    return pipeline.answered(model_dir, suite_of(task), folder, 2, {}, judge=job)


def results_of(outcome):
    assert isinstance(outcome, Scored), outcome
    (found,) = json.loads(Path(outcome.result_file).read_text())["results"].values()
    return dict(found)


def second_turn(user):
    return "<|The Start of Assistant A's Conversation with User|>" in user


@pytest.mark.model
def test_ratings_are_asked_ahead_and_scored_from_disk(model_dir, folder, job, endpoint):
    """`execute` asks once per turn; `score` asks no more; a second score is the same."""
    endpoint.handle = lambda r: r.answer(
        f"fine [[{(2 + r.number % 2) if second_turn(r.user) else (6 + r.number % 3)}]]"
    )
    task = "mt_bench"
    spec = answered(model_dir, folder, task, job)
    parts = [pipeline.executed(spec, task, documents) for documents in ((0, 1, 2), (3, 4, 5))]
    assert [(p.documents, p.asked, p.failed) for p in parts] == [(3, 6, {})] * 2
    users = endpoint.users()
    given = [float(json.loads(f.read_bytes())["answer"][7:-2]) for f in folder.glob("judgements/*.json")]
    for _ in range(2):
        outcome = score.perform_metric_job(spec)
        found = results_of(outcome)
        assert found["judged,none"] == 1.0
        assert found["judge_score,none"] == pytest.approx(sum(given) / 12)  # FastChat's: over all turns
        turns = found["judge_score_turn1,none"], found["judge_score_turn2,none"]
        assert sum(turns) / 2 == pytest.approx(found["judge_score,none"])
        assert turns[0] >= 6
        assert turns[1] <= 3
        assert found["judge_score_stderr,none"] > 0
    assert len(endpoint.requests) == 12
    assert sum("[Question]" in user and "Assistant's Answer" in user for user in users) == 6
    questions = (suites.suite_folder() / "judge/data/questions.jsonl").read_text().splitlines()
    first, second = json.loads(questions[0])["turns"]
    place = next(EvaluationPaths(folder).samples.glob("samples_mt_bench_*"))
    said = json.loads(place.read_text().splitlines()[0])["resps"][0][0]
    assert len(said) == 2
    (shown,) = [user for user in users if second in user]
    order = [shown.index(text) for text in (first, said[0], second)]
    assert order == sorted(order)
    assert shown.endswith(f"{said[1]}\n\n<|The End of Assistant A's Conversation with User|>")


@pytest.mark.model
def test_references_of_both_turns_are_shown_where_a_question_needs_them(model_dir):
    """References for math, reasoning and coding, each turn's own; general prompts elsewhere."""
    tasks = run.task_manager((TASKS,), "mt_bench").load(["mt_bench"])["tasks"]
    task = tasks["mt_bench"]
    asked = []

    def note(asks):
        asked.extend(asks)
        return [Reply(value=None) for _ in asks]

    with hooks.JUDGES.answering(note):
        for doc in task.test_docs():
            assert task.process_results(doc, [("ONE", "TWO")]) == {"judged": 0.0}
    assert len(asked) == 160
    assert sum("The Start of Reference Answer" in ask.user for ask in asked) == 60
    for doc, first, second in zip(task.test_docs(), asked[::2], asked[1::2], strict=True):
        assert "TWO" not in first.user
        assert all(text in second.user for text in ("ONE", "TWO", doc["question_1"], doc["question_2"]))
        needs = doc["category"] in ("math", "reasoning", "coding")
        assert [t in second.user for t in doc["reference"]] == ([True, True] if needs else [])


@pytest.mark.model
def test_a_document_without_judgement_counts_in_no_mean_and_is_named(model_dir, folder, job, endpoint):
    """One turn is refused, one has no rating: means are of the others, `judged` is the share of
    whole documents, and outcomes have the reasons.
    """

    def handle(request):
        if request.number == 0:  # the first document's first turn
            request.error(400, "content policy")
        else:  # the second's second
            request.answer("no" if request.number == 3 else "[[8]]")

    endpoint.handle = handle
    task = "mt_bench"
    job = job.model_copy(update={"options": job.options.model_copy(update={"concurrency": 1})})
    spec = answered(model_dir, folder, task, job)
    part = pipeline.executed(spec, task, tuple(range(6)))
    assert len(part.failed) == 2
    assert any("content policy" in why for why in part.failed.values())
    assert any("no rating" in why for why in part.failed.values())
    endpoint.handle = lambda r: r.error(400, "content policy")
    outcome = score.perform_metric_job(spec)
    found = results_of(outcome)
    assert [found[f"judge_score{turn},none"] for turn in ("", "_turn1", "_turn2")] == [8.0] * 3
    assert found["judged,none"] == pytest.approx(4 / 6)
    place = next(EvaluationPaths(folder).samples.glob("samples_mt_bench_*"))
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    assert ["judge_score" in line for line in lines] == [False, False, True, True, True, True]
    assert ["judge_score_turn1" in line for line in lines] == [False, *[True] * 5]
    assert ["judge_score_turn2" in line for line in lines] == [True, False, *[True] * 4]
    assert isinstance(outcome, Scored)
    assert outcome.asked == 1, "the refused one alone; the one without a rating was paid for"


@pytest.mark.model
def test_pairs_are_judged_in_both_orders(model_dir, folder, job, endpoint):
    """A judge that always prefers the first answer gives ties, one that never prefers the baseline
    none; each turn is asked with swapped answers.
    """
    place = suites.suite_folder() / "judge/data/references.jsonl"
    baselines = [json.loads(line)["choices"][0]["turns"] for line in place.read_text().splitlines()]
    one, two = baselines[0]

    def handle(request):  # first turns: the first answer wins; second ones: the baseline loses
        user = request.user
        if second_turn(user):
            b = user.split("<|The Start of Assistant B's Conversation")[1]
            request.answer("so [[A]]" if any(turns[1] in b for turns in baselines) else "so [[B]]")
        else:
            request.answer("so [[A]]")

    endpoint.handle = handle
    spec = answered(model_dir, folder, "mt_bench_pair", job)
    outcome = score.perform_metric_job(spec)  # no execute job came before: the score asks
    found = results_of(outcome)
    assert [found[f"win_rate{turn},none"] for turn in ("", "_turn1", "_turn2")] == [0.75, 0.5, 1.0]
    assert found["judged,none"] == 1.0
    assert len(endpoint.requests) == 24
    for text, mark in ((one, "[The Start of Assistant B"), (two, "<|The Start of Assistant B")):
        firsts = [u.index(text) < u.index(mark) for u in endpoint.users() if text in u and mark in u]
        assert sorted(firsts) == [False, True]


@pytest.mark.model
def test_a_judge_task_without_a_judge_is_refused_early(model_dir, folder, endpoint, job):
    """Undeclared, it is refused by the build, before any GPU; a refused key fails the entry."""
    with pytest.raises(OperatorError, match=r"judge = true"):
        pipeline.answered(model_dir, suite_of("mt_bench", judge=False), folder, 2, {})
    endpoint.handle = lambda r: r.error(401, "no such key")
    outcome = score.perform_metric_job(answered(model_dir, folder, "mt_bench", job))
    assert isinstance(outcome, Failed)
    assert outcome.blame == "operator"
    assert "no such key" in outcome.error


@pytest.mark.parametrize("host", ["judge.site", "node17:8000", "10.0.0.3", "[2001:db8::1]:80"])
def test_a_key_crosses_no_network_unencrypted_unless_the_settings_allow_it(monkeypatch, tmp_path, host):
    """Refused before anything is submitted; without a key, on this machine and by https there is nothing to refuse."""
    monkeypatch.setenv("MY_JUDGE_KEY", "k")

    def judge(url, **more):
        return judge_options(Config(judge=JudgeConfig(url=url, model="m", **more)))

    assert judge_for(Config(judge=JudgeConfig(url="no address")), suites.load_suite("quickstart")) is None
    assert judge("http://h/v1/").url == "http://h/v1", "no slash at its end"
    with pytest.raises(CoordinatorError, match="https://HOST/v1"):
        judge("http://[::1/v1")
    with pytest.raises(CoordinatorError, match="others on the network could read the key: use https"):
        judge(f"http://{host}/v1", api_key_env="MY_JUDGE_KEY")
    for url in (f"https://{host}/v1", "http://127.0.0.1:1/v1", "http://[::1]/v1", "http://localhost/v1"):
        assert judge(url, api_key_env="MY_JUDGE_KEY").url == url
    assert judge(f"http://{host}/v1").api_key_env is None
    (tmp_path / "key").write_text("k")
    (tmp_path / "key").chmod(0o600)
    found = judge(f"https://{host}/v1", api_key_file=tmp_path / "key")
    assert found.api_key_file == tmp_path / "key"
    allowed = judge(f"http://{host}/v1", api_key_env="MY_JUDGE_KEY", allow_http=True)
    assert allowed.api_key_env == "MY_JUDGE_KEY"


@pytest.mark.model
def test_a_whole_evaluation_with_a_judge(model_dir, tmp_path, endpoint):
    """`evalspan eval` here: answers, judgements, scores and cost, the key in no file. A refused ask
    makes the exit code 1, and a retry sends it alone.
    """

    def handle(request):
        if request.user == endpoint.requests[0].user:
            request.error(400, "policy")
        else:
            request.answer("[[A]]")

    endpoint.handle = handle
    (tmp_path / "evalspan.toml").write_text(
        f'[trial]\nthreads = 1\ndevice = "cpu"\nmemory_mb = 2000\n[metric]\nbootstrap_iters = 10\n'
        f'[judge]\nurl = "{endpoint.url}"\nmodel = "m"\napi_key_env = "MY_JUDGE_KEY"\n'
        "max_cost = 1.0\nprice_per_million_prompt_tokens = 1.0\nprice_per_million_completion_tokens = 1.0\n"
    )
    suite = tmp_path / "judged.toml"
    suite.write_text(
        f'name = "judged"\ninclude_path = ["{TASKS}"]\nbatch_size = 4\napply_chat_template = true\n'
        '[[task]]\nname = "mt_bench_pair"\njudge = true\nlimit = 3\ngen_kwargs = { max_gen_toks = 4 }\n'
    )
    own = {"EVALSPAN_CONFIG": str(tmp_path / "evalspan.toml"), "MY_JUDGE_KEY": "sk-whole-secret"}
    env = {**os.environ, **own}
    program = str(Path(sys.executable).parent / "evalspan")
    where = ["--work-dir", str(tmp_path / "w")]
    argv = [program, "eval", str(model_dir), "--suite", str(suite), "--json", *where]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["results"]["mt_bench_pair"]
    assert (found["win_rate,none"], found["judged,none"]) == (0.5, pytest.approx(2 / 3))
    (root,) = (place.parent for place in tmp_path.glob("w/*/report.json"))
    told = json.loads((root / "report.json").read_text())
    assert told["entries"][0]["unscored"] == 1
    use = told["judge"]["tasks"]["mt_bench_pair"]
    counts = ("judgements", "missing", "prompt_tokens", "completion_tokens")
    assert [use[name] for name in counts] == [11, 1, 1100, 110]
    assert told["judge"]["cost"] == use["cost"] == pytest.approx(1210e-6)
    shown = [program, "report", root.name, *where]
    wide = {**env, "COLUMNS": "200"}
    text = subprocess.run(shown, env=wide, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "of at most 1" in text
    assert "11 judgements, 1 missing, 1100 + 110 tokens" in text
    asked = len(endpoint.requests)
    endpoint.handle = lambda r: r.answer("[[A]]")
    retry = [program, "retry", root.name, *where]
    subprocess.run(retry, env=env, capture_output=True, text=True, timeout=200, check=True)
    assert len(endpoint.requests) == asked + 1
    assert json.loads((root / "results.json").read_text())["results"]["mt_bench_pair"]["judged,none"] == 1.0
    assert len(list(root.glob("judgements/*.json"))) == 12
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"sk-whole-secret" not in path.read_bytes(), path
