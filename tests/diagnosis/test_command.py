"""Laws of `evalspan diagnose`: what it prints of a log, an evaluation and a name that is neither."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.endpoint import serving
from support.trainings import leave
from typer.testing import CliRunner

from coordinator.errors import OperatorError
from coordinator.interface.cli import app
from coordinator.interface.cli.diagnose import VOTES
from coordinator.results.report.load_series import read_document
from coordinator.runtime.summary import failed_job
from coordinator.site.cluster.past_jobs import look_up
from coordinator.site.diagnosis.diagnose import CERTAIN_STATES
from coordinator.site.diagnosis.rules import _TOKEN, MOST_TOKENS, Proposal, accept_table
from evaljobs.contract.outcomes import Failed

FIELDS = ["reason", "owner", "recoverable", "line", "line_number", "advice"]


def said(*argv: object) -> object:
    done = CliRunner().invoke(app, ["diagnose", *map(str, argv)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_a_log_gets_six_fields(tmp_path: Path) -> None:
    log = tmp_path / "slurm-7.out"
    log.write_text("step 1\nOSError: [Errno 28] No space left on device\n")
    found = said(log, "--json")
    assert list(found) == FIELDS
    assert (found["reason"], found["owner"], found["line_number"]) == ("DiskFull", "storage", 2)
    assert said(log, "--json", "--state", "NODE_FAIL")["reason"] == "NodeFailure"


@pytest.mark.parametrize("text", ["", "root:x:0:0:root:/root:/bin/bash\n"])
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "passwd").write_text(text)
    with pytest.raises(OperatorError, match="no log of a job"):
        said(tmp_path / "passwd")


def test_each_failed_job_of_an_evaluation_is_named(tmp_path: Path) -> None:
    """By its outcome; one that died without any, by the cluster's word in the report, and by its log."""
    paths = leave(tmp_path, 10, 0.5)
    for folder in paths.folders():
        folder.mkdir(parents=True, exist_ok=True)
    paths.journal.write_text("")
    told = Failed(name="t-n1", job="trial", blame="retry", error="KeyError: 'a'")
    paths.outcome("failed", told.name).write_text(told.model_dump_json())
    known = {"node": "n", "gpus": 1, "device": "", "started_at": 0.0, "held": 5.0, "infer": 2.5, "load": 2.5}
    gpus = [
        {"trial": name, "ended": word, "other": 0.0, "shards": 1, **known}
        for name, word in (("t-n2.0", "NODE_FAIL"), ("t-n3.0", "FAILED"))
    ]
    paths.report.write_text(json.dumps(json.loads(paths.report.read_text()) | {"gpus": gpus}))
    paths.log("t-n3").write_text("Bus error (core dumped)\n")
    assert failed_job(paths, read_document(paths)) == "t-n1"
    found = said(paths.root.name, "--json", "--work-dir", tmp_path)
    assert {job: one["reason"] for job, one in found.items()} == {
        "t-n1": "KeyError",
        "t-n2.0": "NodeFailure",
        "t-n3.0": "DiskFull",
    }


SHOWN = "JobId=7 JobName=a b JobState=FAILED ExitCode=1:0 StdErr=/l/7.out StdIn=/dev/null StdOut=/l/7.out WorkDir=/w\n"
ROW = "{raw}|{id}|name|{state}|1:0|n1|/w|sbatch {options}|ada\n"


@pytest.mark.parametrize(
    ("shown", "listed", "state", "logs"),
    [
        (SHOWN, "", "FAILED", ("/l/7.out",)),
        ("", ROW.format(raw=7, id=7, state="FAILED", options="job.sh"), "FAILED", ("/w/slurm-7.out",)),
        ("", ROW.format(raw=7, id=7, state="TIMEOUT", options="-o out/%x-%j.log -e %j.err job.sh"), "TIMEOUT",
         ("/w/out/name-7.log", "/w/7.err")),
        ("", ROW.format(raw=9, id="7_3", state="FAILED", options="job.sh"), "FAILED", ("/w/slurm-7_3.out",)),
        ("", ROW.format(raw=7, id=7, state="FAILED", options="a") + ROW.format(raw="7.0", id="7.0", state="OUT_OF_MEMORY", options=""),
         "OUT_OF_MEMORY", ("/w/slurm-7.out",)),
    ],
)  # fmt: skip
def test_a_job_is_found_in_the_queue_or_in_accounting(
    shown: str, listed: str, state: str, logs: tuple[str, ...]
) -> None:
    job = look_up("7", lambda argv: shown if argv[0] == "scontrol" else listed, CERTAIN_STATES)
    assert job is not None
    assert (job.state, job.logs) == (state, logs)


def test_a_job_that_nobody_knows_is_none() -> None:
    assert look_up("7", lambda _argv: "", CERTAIN_STATES) is None


@pytest.fixture
def rules_of_the_package() -> Iterator[None]:
    yield
    accept_table("")


def test_a_rule_that_a_person_accepted_counts_before_those_of_the_package(
    tmp_path: Path, rules_of_the_package: None
) -> None:
    """One of the work folder; a damaged one is refused with its file."""
    log, rules = tmp_path / "a.log", tmp_path / "rules.toml"
    log.write_text(f"{FROBS}\nKeyError: 'a'\n")
    rules.write_text(Proposal("DiskFull", "the lattice", "said", FROBS, 3).as_toml())
    assert said(log, "--json", "--work-dir", tmp_path)["reason"] == "KeyError"
    rules.write_text(rules.read_text().replace("precedence = 57", "precedence = 20"))
    assert said(log, "--json", "--work-dir", tmp_path)["reason"] == "DiskFull"
    for damaged in ('[[rule]]\nreason = "Gremlins"\n', "rule = 3", rules.read_text().replace(FROBS, "x")):
        rules.write_text(damaged)
        with pytest.raises(OperatorError, match=str(rules)):
            said(log, "--work-dir", tmp_path)


def test_a_question_holds_4000_tokens_without_secrets_and_is_asked_of_unknown_failures_alone(
    tmp_path: Path,
) -> None:
    """Of any log; counted as if no token had more than four letters. The answer names the model that said it."""
    log, config = tmp_path / "a.log", tmp_path / "evalspan.toml"
    secret = "hf_" + "abcdefgh" * 4
    noise = "".join(f"fatal: part {n} of the lattice failed {'word ' * 40}\n" for n in range(400))
    log.write_text(f"{noise}API_TOKEN={secret}\nfatal: login with {secret} failed\n{FROBS}\n")
    with serving() as endpoint:
        endpoint.handle = lambda request: request.answer(json.dumps(GOOD))
        config.write_text(f'[judge]\nurl = "{endpoint.url}"\nmodel = "m"\n')
        found = said(log, "--ask", "--json", "--config", config)
        assert (found["reason"], found["said_by"]) == (GOOD["reason"], "m")
        assert len(endpoint.users()) == VOTES
        for text in endpoint.users():
            sent = text.partition("Lines of the log:\n")[2].rpartition("\n\nReasons: ")[0]
            assert FROBS in sent
            assert len(_TOKEN.findall(sent)) <= MOST_TOKENS
            assert secret not in text
        for known in ("KeyError: 'a'\n", "step 1 loss 2.0\nTraining completed.\n"):
            log.write_text(known)
            assert "said_by" not in said(log, "--ask", "--json", "--config", config)
        assert len(endpoint.users()) == VOTES


# --- a model's proposal ------------------------------------------------------------------------------------------------

FROBS = "frobnicator: fatal: the lattice is not aligned"
GOOD = {"reason": "RuntimeError", "pattern": "lattice is not aligned", "explanation": "the lattice"}


@pytest.mark.parametrize(
    ("answers", "written"),
    [
        ([GOOD, GOOD, {**GOOD, "reason": "ValueError"}], True),
        ([GOOD, {**GOOD, "reason": "KeyError"}, {**GOOD, "reason": "ValueError"}], False),
        ([{**GOOD, "reason": "Gremlins"}] * 3, False),
        ([{**GOOD, "pattern": "something else"}] * 3, False),
        ([{**GOOD, "pattern": "(a+)+$|lattice"}] * 3, False),
        ([{**GOOD, "pattern": "lattice"}] * 3, False),
        (["no JSON"] * 3, False),
    ],
    ids=["two of three agree", "each says another", "no reason", "not in this log", "endless", "in a healthy log", "no JSON"],
)  # fmt: skip
def test_a_model_proposes_a_rule_that_a_person_accepts(
    tmp_path: Path, answers: list[object], written: bool
) -> None:
    """Asked of a local endpoint, and only where no rule knows the log, without secrets. What over half say, and what matches this
    log and no healthy one, is marked as the model's and goes to a file in the form of a rule."""
    log, healthy, out, config = (tmp_path / name for name in ("a.log", "b.log", "rule.toml", "evalspan.toml"))
    log.write_text(f"step 3 of the run\nHF_TOKEN=a-very-secret-word\n{FROBS}\n")
    healthy.write_text("the lattice is whole\n")
    with serving() as endpoint:
        endpoint.handle = lambda request: request.answer(json.dumps(answers[request.number]))
        config.write_text(f'[judge]\nurl = "{endpoint.url}"\nmodel = "m"\n')
        argv = [str(log), "--config", str(config), "--ask", "--keep", str(out), "--healthy", str(healthy)]
        done = CliRunner().invoke(app, ["diagnose", *argv], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert all(FROBS in user and "secret-word" not in user for user in endpoint.users())
        assert ("RuntimeError, as m says" in done.output) == written
        assert len(endpoint.users()) == 3
        log.write_text("KeyError: 'a'\n")
        CliRunner().invoke(app, ["diagnose", *argv], catch_exceptions=False)
        assert len(endpoint.users()) == 3
    assert out.exists() == written
    if written:
        rule = tomllib.loads(out.read_text())["rule"][0]
        assert (rule["reason"], rule["pattern"], rule["example"]) == (GOOD["reason"], GOOD["pattern"], FROBS)
