"""What `status`, `report`, `report --series`, `compare`, `plan` and `doctor` say of recorded work folders.

`folders/NAME.tar.gz` are work folders of real evaluations (README.md says how each came about). Of `--json` the goldens
hold the fields of `FIELDS`: those that docs name, and that a user's program may rely on. Texts are snapshots.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.goldens import HERE
from support.simulated.parts import SITE

from coordinator.decide.evaluation import step as machine
from coordinator.decide.evaluation.events import EVENT, Accepted, Event
from coordinator.decide.evaluation.records import JOURNAL_FORMAT, RunOptions
from coordinator.interface import cli
from coordinator.results.report.stored_documents import sample_lines
from coordinator.runtime.journal import line_of
from coordinator.runtime.make_summary import find_by_journal
from coordinator.runtime.summary import (
    MAX_WARNINGS,
    Parked,
    Task,
    read_json,
    summary_of_record,
    with_document,
    write_summary,
)
from coordinator.site.config.schema import Config
from evaljobs.contract.archived_files import files_in
from evaljobs.contract.columns import columns_of, pack_columns
from evaljobs.contract.paths import EvaluationPaths

SUBJECT = {  # folder -> the evaluation of it that `report` is asked for, by the beginning of its id
    **dict.fromkeys(("running", "failed", "parked", "killed", "folded", "pruned", "cancelled", "older", "oldest"), "step-2000"),
    "ended": "step-1000", "series": "step-4000", "modes": "step-3000", "pending": "step-1000",
}  # fmt: skip
SCORE = "task metric filter value stderr higher_is_better"
POINT = "evaluation_id suite checkpoint step status mode makespan_seconds paused_seconds gpu_seconds cost"
# command -> its fields; a field of a list or record is followed by the fields of its members
FIELDS = {
    "status": {
        "": "schema_version daemon holder kept_back_seconds",
        "waiting": {"": "checkpoint suite since why evaluation_id"},
        "refused": {"": "checkpoint suite at why"},
        "evaluations": {
            "": "evaluation_id suite mode step checkpoint stage stopped shards_done shards scored entries accepted_at"
            " ended_at makespan_seconds errors fault warnings waits_for nodes_aside held_jobs failed_jobs trackers",
            "scores": {"": SCORE},
        },
    },
    "report": {
        "": "schema_version evaluation_id checkpoint step suite mode token_budget status accepted_at"
        " makespan_seconds predicted_makespan_seconds lower_bound_seconds ratio stages gpu_seconds gpu_busy_fraction nodes"
        " staged_bytes storage_bytes metric_seconds judge tokens reused reused_scores paused_seconds waited_seconds"
        " limited_seconds warnings scores groups versions n-shot higher_is_better n-samples",
        "entries": {"": "name status error unscored"},
    },
    "series": {
        "": "schema_version horizon",
        "points": {"": POINT, "scores": {"": f"{SCORE} documents version n_shot differs"}},
        "curves": {
            "": "suite task metric filter name higher_is_better",
            "points": {"": "label step value stderr change mean_before yardstick worse differs documents"},
        },
    },
    "compare": {
        "": "schema_version evaluations headings",
        "rows": {"": "task metric values stderrs change differs documents versions n_shot"},
    },
    "plan": {"": "schema_version planned_makespan_seconds lower_bound_seconds what_if"},
}
PLAN = [
    "--suite", "plan.toml", "--nodes", "2", "--gpus-per-node", "2", "--cpu-slots", "4", "--model-size", "1m",
    "--hardware", "cpu",
]  # fmt: skip
SUITE = 'name = "plan"\n' + "".join(
    f'[[task]]\nname = "{task}_toy"\n' for task in ("arc_easy", "gsm8k", "humaneval")
)
# fields that hold sentences: that there is one counts here; its words stand in the texts
SENTENCES = {"error", "errors", "failed_jobs", "fault", "sentence", "waits_for", "warnings", "why"}
RECORDED = "/runs/work/"  # where the folders were
OF_SOME_MACHINES = {"local interpreter"}  # a finding there alone
DIGITS = 6  # of a number


def kept(found, fields):
    """The fields of `fields` alone, without words of sentences, and numbers to DIGITS."""
    if isinstance(found, list):
        return [kept(one, fields) for one in found]
    whole = {name: plain(found[name], name) for name in fields[""].split() if name in found}
    return whole | {name: kept(found[name], more) for name, more in fields.items() if name and name in found}


def plain(value, name):
    if isinstance(value, Mapping):
        return {key: plain(one, name if name in SENTENCES else key) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one, name) for one in value]
    if isinstance(value, str) and value and name in SENTENCES:
        return "a sentence"
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) and value < 1e9 else value


@pytest.fixture
def run(monkeypatch, capsys):
    """The command `evalspan` in this process: exit code, standard output, standard error."""

    def evalspan(*words):
        monkeypatch.setattr(sys, "argv", ["evalspan", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out.replace(str(Path.cwd()), "DIR"), err.replace(str(Path.cwd()), "DIR")

    return evalspan


@pytest.fixture
def place(monkeypatch):
    """An empty folder with settings, and no others. Its path has the same length always: lines wrap by it."""
    folder = Path(tempfile.mkdtemp(prefix="views-", dir="/tmp"))
    (folder / "evalspan.toml").write_text('[cluster]\nkind = "local"\nslots = 2\n[trial]\ndevice = "cpu"\n')
    (folder / "plan.toml").write_text(SUITE)
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("EVALSPAN_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "HOME": str(folder),
        "EVALSPAN_CONFIG": "evalspan.toml",
        "EVALSPAN_WORK_DIR": "work",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TZ": "UTC",
    }.items():
        monkeypatch.setenv(name, value)
    time.tzset()
    yield folder
    monkeypatch.undo()
    time.tzset()
    shutil.rmtree(folder)


def unpack(name, place):
    """The work folder as it was recorded; unix seconds of five seconds later.

    Journals of evaluations that have not ended get the paths of here, and the journal format of now; those that have ended get
    the summary of now. Submissions and refusals lie in the inbox.
    """
    with tarfile.open(HERE / "folders" / f"{name}.tar.gz") as archive:
        archive.extractall(place, filter="data")
        newest = max(member.mtime for member in archive if member.isfile())
    work = place / "work"
    work.chmod(0o700)
    for file in work.glob("*/evaluation.json"):
        file.write_text(json.dumps(record_of_now(json.loads(file.read_text()))))
    for journal in work.glob("*/journal.jsonl"):
        if (journal.parent / "results.json").exists():
            _end(EvaluationPaths(journal.parent))
        else:
            kept_at = journal.stat().st_mtime
            lines = journal.read_text().replace(RECORDED, f"{work}/").splitlines()
            journal.write_bytes(b"".join(map(line_of, decided(lines))))
            os.utime(journal, (kept_at, kept_at))  # `stopped since` is read from it
            _park(EvaluationPaths(journal.parent), Config(work_dir=work))
    if (work / "submissions").exists():
        to_inbox(work)
    return newest + 5.0


def to_inbox(work):
    """Submissions had their evaluation's id in the file's name, and refusals stood in `pending.json`."""
    (work / "submissions").rename(work / "inbox")
    for file in (work / "inbox").glob("*.json"):
        notice = json.loads(file.read_text()) | {"evaluation_id": file.stem.partition("-")[2]}
        file.write_text(json.dumps(notice))
    if (work / "pending.json").exists():
        (work / "inbox" / "refused").mkdir()
        for number, reason in enumerate(json.loads((work / "pending.json").read_text())["refused"]):
            (work / "inbox" / "refused" / f"{number}.reason").write_text(json.dumps(reason))


def _park(paths, config):
    """The summary of an evaluation that was parked, as a coordinator of now writes it."""
    if paths.status.exists() and (was := json.loads(paths.status.read_bytes()))["what"] == "parked":
        found = find_by_journal(paths, time.time())
        parked = Parked(at=was["at"], error=was["error"], until=was["until"])
        assert write_summary(paths, found.model_copy(update={"parked": parked}))


SECTIONS = {
    "trial": {"gpus_per_trial": "gpus_per_trial", "trial_cpus": "cpus", "trial_memory_mb": "memory_mb"},
    "metric": {"worker_cpus": "cpus", "worker_memory_mb": "memory_mb"}
    | {name: name for name in ("allow_unsafe", "bootstrap_iters", "item_seconds")},
    "plan": {"plan_policy": "policy", "steal": "steal"},
    "stage": {"stage": "enabled", "host_trials": "host_trials"},
}  # section of the settings -> name in a recorded evaluation, name of the setting


def record_of_now(record):
    """An evaluation as it is recorded, with the sections of the settings in its options."""
    given = record["options"]
    sections = {
        section: {new: given[old] for old, new in names.items() if old in given}
        for section, names in SECTIONS.items()
    }
    kept = {key: value for key, value in given.items() if key in RunOptions.model_fields}
    inputs = record.get("inputs") or {}
    entries = [{"files": entry["files"]} for entry in inputs.get("entries", ())]
    now = record | {"options": kept | sections, "inputs": inputs | {"entries": entries}}
    return {key: value for key, value in now.items() if key != "submitted_by"}


def _end(paths):
    """The summary of an evaluation that has ended, and its documents, as a coordinator of now writes them."""
    parts = {}
    for file in files_in(paths.samples, "samples_*_[0-9][0-9][0-9].jsonl"):
        parts[int(file.stem[-3:]), file.stem[len("samples_") : -4]] = columns_of(sample_lines(file))
    if parts and not paths.documents.exists():
        paths.documents.write_bytes(pack_columns(dict(sorted(parts.items()))))
    report, results, size = read_json(paths.report), read_json(paths.results), paths.journal.stat().st_size
    before = read_json(paths.status)
    if before.get("what") != "ended" or before.get("journal_bytes") != size:
        before = {}
    shards, errors = len(report.get("shards", ())), before.get("errors", results.get("failed", {}))
    known = {
        "ended_at": paths.results.stat().st_mtime,
        "cancelled": "on request" if report.get("status") == "cancelled" else "",
        "shards": shards,
        "shards_done": shards,
        "scored": sum(entry["status"] == "scored" for entry in report.get("entries", ())),
        "warnings": report.get("warnings", ())[-MAX_WARNINGS:],
        "converted_digest": None,
    }
    known = {name: before.get(name, value) for name, value in known.items()} | {"journal_bytes": size}
    tasks = tuple(Task(name=name, state="failed", error=why) for name, why in errors.items())
    made = summary_of_record(paths, "").model_copy(
        update=known | {"tasks": tasks, "warnings": tuple(known["warnings"])}
    )
    assert write_summary(paths, with_document(made, paths))


def of_now(event):
    """An event as it is recorded, in the journal format of now."""
    if event["kind"] in ("accepted", "restarted"):
        event = {key: value for key, value in event.items() if key not in ("journal_format", "signs", "code")}
    for offer in event.get("offers", ()):
        offer.pop("memory_mb", None)
    event.get("outcome", {}).pop("idle_seconds", None)
    if "record" in event:
        event["record"] = record_of_now(event["record"])
    gone = {"job-started": ("ends_at",), "back-off-over": ("workers", "held", "precursors")}
    event = {key: value for key, value in event.items() if key not in gone.get(event["kind"], ())}
    return event | ({"journal_format": JOURNAL_FORMAT} if event["kind"] == "accepted" else {})


def decided(lines):
    """The events of a journal, each followed by the decisions that earlier formats left to a replay."""

    def taken(found):
        for one in found:
            if isinstance(one, Event) and one.kind not in (
                "job-intended",
                "shards-dealt",
                "token-budget-reduced",
            ):
                yield one
                yield from taken(machine.apply_event(state, one))

    state = None
    for line in lines:
        event = EVENT.validate_json(json.dumps(of_now(json.loads(line))))
        yield event
        if isinstance(event, Accepted):
            state, _ = machine.start_evaluation(event)
        else:
            yield from taken(machine.apply_event(state, event))
            yield from taken(machine.due_decisions(state, SITE, event.at))


@contextlib.contextmanager
def held(lock):
    """As a daemon holds its work folder."""
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("name", SUBJECT)
def test_what_is_said_of_a_recorded_work_folder(name, place, run, goldens, monkeypatch):
    """Values of `--json` that a user's program reads, exit codes, and the texts beside them."""
    now = unpack(name, place)
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setenv("PATH", str(place))
    ids = sorted(file.parent.name for file in (place / "work").glob("*/journal.jsonl"))
    commands = {
        "status": ["status"],
        "report": ["report", SUBJECT[name]],
        "series": ["report", "--series", "/runs/7b"],
        "compare": ["compare", *ids],
        "plan": ["plan", *PLAN],
    }
    texts = ""
    with held(place / "work" / "daemon.lock") if name == "running" else contextlib.nullcontext():
        for command, words in commands.items():
            code, out, _ = run(*words, "--json")
            found = {"exit code": code} | (kept(json.loads(out), FIELDS[command]) if out else {})
            goldens.check(f"views/{name}-{command}.json", found)
            code, out, err = run(*words)
            told = "\n".join(line.rstrip() for line in (out + err).splitlines())
            texts += f"$ evalspan {' '.join(words)}\n{told}\n\n"
    goldens.check(f"texts/views/{name}.txt", texts)


@pytest.mark.parametrize("name", ["running", "series", "failed", "modes", "pending"])
@pytest.mark.parametrize("width", [40, 120])
def test_what_a_terminal_shows_of_a_recorded_work_folder(name, width, place, run, *, goldens, monkeypatch):
    """No line but a command is wider than the terminal, no id is cut, and `status` has each evaluation once."""
    now = unpack(name, place)
    monkeypatch.setattr(time, "time", lambda: now)
    for variable, value in {"PATH": str(place), "FORCE_COLOR": "1", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(variable, value)
    ids = sorted(file.parent.name for file in (place / "work").glob("*/journal.jsonl"))
    texts = []
    with held(place / "work" / "daemon.lock") if name == "running" else contextlib.nullcontext():
        for words in (
            ["status"],
            ["report", SUBJECT[name], "--verbose"],
            ["report", "--series", "/runs/7b", "--mixed"],
            ["compare", *ids],
        ):
            _, out, _ = run(*words)
            told = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines())
            wide = [line.strip() for line in told.splitlines() if len(line) > width]
            assert all(re.fullmatch(r"`[^`]+`[.;]?", line) for line in wide), wide  # a command is whole
            texts.append(f"$ evalspan {' '.join(words)}\n{told}\n")
    firsts = [line.split(maxsplit=1)[0] for line in texts[0].splitlines() if line.strip()]
    assert all(firsts.count(one) == 1 for one in ids)
    goldens.check(f"texts/views/{name}-{width}.txt", "\n".join(texts))


def test_a_series_of_both_modes_is_shown_where_it_is_asked_for(place, run, goldens):
    """`--mixed` has both modes on one curve, with a mark where the mode changes."""
    unpack("modes", place)
    code, out, _ = run("report", "--series", "/runs/7b", "--mixed", "--json")
    assert code == 0
    goldens.check("views/modes-mixed.json", kept(json.loads(out), FIELDS["series"]))


def test_doctor_names_what_it_looked_at_on_a_machine_without_slurm(place, run, goldens):
    """Each finding has the same name and fields on any machine; what it found is the machine's."""
    code, out, _ = run("doctor", "--sample-mb", "1", "--json")
    made = json.loads(out)
    assert code == any(one["status"] == "fail" for one in made["findings"])
    names = [one["what"] for one in made["findings"] if one["what"] not in OF_SOME_MACHINES]
    fields = sorted({field for one in made["findings"] for field in one})
    nodes = {name: sorted(answer) for name, answer in made["nodes"].items()}
    goldens.check("views/doctor.json", made | {"findings": {"fields": fields, "what": names}, "nodes": nodes})
