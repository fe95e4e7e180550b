"""Laws of what is made of the fields of the settings: the file that `init` writes, and the names in messages and pages."""

import ast
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.errors import OperatorError
from coordinator.interface.cli import app
from coordinator.site.cluster import NodeState
from coordinator.site.cluster.daemon_job import probe_of
from coordinator.site.config import loading, schema
from coordinator.site.config.template import default_text, site_preset, site_presets

ROOT = Path(__file__).resolve().parents[2]
NAMES = {".".join(location) for location, _ in schema.all_settings()}
TABLES = {name.rpartition(".")[0] for name in NAMES} - {""}


def loaded(folder, chosen):
    """The settings of the file that `init` writes."""
    file = folder / "evalspan.toml"
    file.write_text(default_text("a site", chosen))
    return loading.load_config(file, {})


def test_the_written_file_changes_nothing_and_is_the_whole_reference(tmp_path):
    """It names every setting once; each line that is taken out of its comment is valid, and shows the default or an example."""
    assert loaded(tmp_path, {"cluster.kind": ("local", "")}) == schema.Config(
        work_dir=Path.cwd() / "evalspan-work"
    )
    bare = re.sub(r"(?m)^# (?=[a-z_]+ = )", "", default_text("", {}))
    (tmp_path / "bare.toml").write_text(bare)
    whole = loading.load_config(tmp_path / "bare.toml", {}).model_dump(mode="json")
    written, table = [], ""
    for line in bare.splitlines():
        table = line.strip("[]") if line.startswith("[") else table
        if found := re.match(r"([a-z_]+) = ", line):
            written.append(f"{table}.{found[1]}".lstrip("."))
    assert sorted(written) == sorted(NAMES)
    default = schema.Config(work_dir=tmp_path / "evalspan-work").model_dump(mode="json")
    for location, field in schema.all_settings():
        shown, meant = _value(whole, location), _value(default, location)
        assert (shown == meant) is not bool(field.examples), location


def _value(data, location):
    for key in location:
        data = data[key]
    return data


def _node(name, gpus, *partitions):
    return NodeState(
        name=name, usable=True, state="idle", gpus=gpus, gpus_free=gpus, cpus=8, cpus_free=8,
        memory_mb=1, memory_free_mb=1, gpu_type="a100" if gpus else "", partitions=partitions,
    )  # fmt: skip


GPU, CPU = _node("n1", 8, "gpu", "more"), _node("c1", 0, "cpu")
MORE = _node("n2", 8, "more")
ALL = [GPU, MORE, CPU]


@pytest.mark.parametrize(
    ("nodes", "found", "chosen"),
    [
        (ALL, {}, ("more", "cpu", "4:00:00")),  # most GPUs, and one without any for CPU work
        ([CPU], {}, (None, None, "4:00:00")),
        ([GPU, MORE], {"preemptible": {"more"}}, ("gpu", None, "4:00:00")),  # more GPUs do not make up for jobs that end
        ([MORE], {"preemptible": {"more"}}, ("more", None, "4:00:00")),
        (ALL, {"refusing": {"more": "no", "cpu": "not you"}}, ("gpu", None, "4:00:00")),
        # where all refuse (an account is demanded) the reason is no partition's
        (ALL, {"refusing": dict.fromkeys(("gpu", "more", "cpu"), "no account")}, ("more", "cpu", "4:00:00")),
        # a time limit within MaxTime, where the default is none
        (ALL, {"max_seconds": {"more": 7200, "cpu": 60}}, ("more", "cpu", "2:00:00")),
        (ALL, {"max_seconds": {"more": 4 * 3600, "cpu": 60}}, ("more", "cpu", "4:00:00")),
    ],
)  # fmt: skip
def test_init_takes_the_best_partition_and_says_what_is_wrong_with_the_others(tmp_path, nodes, found, chosen):
    """What it chose is what is read: also the form of request for GPUs that the site takes, account and QOS."""
    summary, settings = probe_of(nodes, **found)
    assert nodes != ALL or summary == "2 nodes with 8 a100"
    wanted = {"slurm.gpu_request": "--gres=gpu:{type}:{n}", "cluster.account": "proj", "cluster.qos": "long"}
    config = loaded(tmp_path, settings | {setting: (value, "a note") for setting, value in wanted.items()})
    got = config.cluster
    assert (got.kind, got.partition, got.cpu_partition, config.trial.time_limit) == ("slurm", *chosen)
    assert ("trial.time_limit" in settings) == (chosen[2] != "4:00:00")
    assert (config.slurm.gpu_request, got.account, got.qos) == tuple(wanted.values())
    _, choice = settings.get("cluster.partition", ("", ""))
    for name in found.get("preemptible", ()):
        assert re.search(rf"\b{name} \(\d+ GPUs, jobs may be preempted\)", choice)
    for name, words in found.get("refusing", {}).items():
        assert re.search(rf"\b{name} \(\d+ GPUs, refuses your jobs: {words}\)", choice)
    assert choice in (tmp_path / "evalspan.toml").read_text()


# --- names of settings -------------------------------------------------------------------------------------------------

# "[trial] cpus", "[slurm.ROLE] qos", and "cpus = 2 in [trial]"
NAMED = re.compile(r"\[((?:%s)(?:\.\w+)?)\] `?([a-z]+(?:_[a-z]+)*)\b" % "|".join(sorted(TABLES)))  # noqa: UP031
SET_IN = re.compile(r"\b([a-z_]+) = [^=]{1,40}? in \[([a-z.]+)\]")
# words of prose behind a table: "[judge] in evalspan.toml"
PROSE = {"allows", "has", "in", "names", "of", "only", "or", "says", "that"}


def texts():
    """(place, text) of every page, and of every text in the code with its parts joined."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        if page.name != "CHANGELOG.md":
            yield str(page.relative_to(ROOT)), page.read_text()
    for room in ("coordinator", "evaljobs", "priors"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", node.value


def test_each_setting_that_a_message_or_a_page_names_is_there():
    """Renaming a field cannot make a message lie."""
    wrong = []
    for place, text in texts():
        found = [*NAMED.findall(text), *((table, key) for key, table in SET_IN.findall(text))]
        for table, key in found:
            name = f"{table.replace('ROLE', 'trial')}.{key}"
            if name not in NAMES and name not in TABLES and key not in PROSE:
                wrong.append(f"{place}: [{table}] {key}")
    assert wrong == []
    assert set(loading.OPTION_OF_SETTING) <= NAMES


@pytest.mark.parametrize("name", site_presets())
def test_a_preset_of_a_site_makes_a_file_that_loads_and_names_its_source(name, tmp_path, monkeypatch):
    """Where no Slurm answers, only what is documented is written; what the documentation leaves open is said."""
    monkeypatch.setenv("PATH", str(tmp_path))
    preset, file = site_preset(name), tmp_path / "evalspan.toml"
    done = CliRunner().invoke(app, ["init", str(file), "--site", name])
    assert done.exit_code == 0, done.output
    written = loading.load_config(file, {})
    assert written.cluster.kind == "slurm"
    for setting, value in preset.settings.items():
        found = written.model_dump(mode="json")
        for key in setting.split("."):
            found = found[key]
        assert found == value
    head = file.read_text()[:1000]
    assert (preset.source in head, preset.read in head) == (True, True)
    said = " ".join(done.output.split())
    assert f"{preset.title}: jobs are charged to an account" in said
    assert "is left to `doctor`" in said
    assert all(" ".join(note.split()) in said for note in preset.notes)
    assert name in CliRunner().invoke(app, ["init", "-h"]).output, "the help names each site"
    again = CliRunner().invoke(app, ["init", str(file), "--site", name, "--force", "--account", "mine"])
    assert "charged to an account" not in again.output
    assert loading.load_config(file, {}).cluster.account == "mine"


def test_a_site_without_a_preset_is_refused_with_those_that_there_are(tmp_path):
    refused = CliRunner().invoke(app, ["init", str(tmp_path / "x.toml"), "--site", "lumy"])
    assert isinstance(refused.exception, OperatorError)
    assert "did you mean 'lumi'" in str(refused.exception)
    assert "clariden" in str(refused.exception)
    assert not (tmp_path / "x.toml").exists()
