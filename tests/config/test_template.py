"""Laws of what is made of the fields of the settings: the file that `init` writes, and the names in messages and pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster import NodeState
from coordinator.cluster.site_probe import SiteProbe, probe_of
from coordinator.config import loading, schema
from coordinator.config.template import default_text

ROOT = Path(__file__).resolve().parents[2]
NAMES = {".".join(location) for location, _ in schema.settings()}
TABLES = {name.rpartition(".")[0] for name in NAMES} - {""}


def loaded(folder: Path, probe: SiteProbe) -> schema.Config:
    """The settings of the file that `init` writes."""
    file = folder / "evalspan.toml"
    file.write_text(default_text(probe.summary, probe.chosen()))
    return loading.load(file, {})


def test_the_written_file_changes_nothing_and_is_the_whole_reference(tmp_path: Path) -> None:
    """It names every setting once; each line that is taken out of its comment is valid, and shows the default or an example."""
    local = SiteProbe()
    assert loaded(tmp_path, local) == schema.Config(work_dir=Path.cwd() / "evalspan-work")
    bare = re.sub(r"(?m)^# (?=[a-z_]+ = )", "", default_text("", {}))
    (tmp_path / "bare.toml").write_text(bare)
    whole = loading.load(tmp_path / "bare.toml", {}).model_dump(mode="json")
    written, table = [], ""
    for line in bare.splitlines():
        table = line.strip("[]") if line.startswith("[") else table
        if found := re.match(r"([a-z_]+) = ", line):
            written.append(f"{table}.{found[1]}".lstrip("."))
    assert sorted(written) == sorted(NAMES)
    default = schema.Config(work_dir=tmp_path / "evalspan-work").model_dump(mode="json")
    for location, field in schema.settings():
        shown, meant = _value(whole, location), _value(default, location)
        assert (shown == meant) is not bool(field.examples), location


def _value(data: Any, location: tuple[str, ...]) -> Any:
    for key in location:
        data = data[key]
    return data


def _node(name: str, gpus: int, *partitions: str) -> NodeState:
    return NodeState(
        name=name, usable=True, state="idle", gpus=gpus, gpus_free=gpus, cpus=8, cpus_free=8,
        memory_mb=1, memory_free_mb=1, gpu_type="a100" if gpus else "", partitions=partitions,
    )  # fmt: skip


GPU, CPU = _node("n1", 8, "gpu", "more"), _node("c1", 0, "cpu")
MORE = _node("n2", 8, "more")


@pytest.mark.parametrize(
    ("nodes", "found", "chosen"),
    [
        ([GPU, MORE, CPU], {}, ("more", "cpu")),  # most GPUs, and one without any for CPU work
        ([CPU], {}, (None, None)),
        ([GPU, MORE], {"preemptible": {"more"}}, ("gpu", None)),  # more GPUs do not make up for jobs that end
        ([MORE], {"preemptible": {"more"}}, ("more", None)),
        ([GPU, MORE, CPU], {"refusing": {"more": "no", "cpu": "not you"}}, ("gpu", None)),
        # where all refuse (an account is demanded) the reason is no partition's
        ([GPU, MORE, CPU], {"refusing": dict.fromkeys(("gpu", "more", "cpu"), "no account")}, ("more", "cpu")),
    ],
)  # fmt: skip
def test_init_takes_the_best_partition_and_says_what_is_wrong_with_the_others(
    tmp_path: Path, nodes: list[NodeState], found: dict[str, Any], chosen: tuple[str | None, str | None]
) -> None:
    probe = probe_of(nodes, **found)
    got = loaded(tmp_path, probe).cluster
    assert (got.kind, got.partition, got.cpu_partition) == ("slurm", *chosen)
    for name in found.get("preemptible", ()):
        assert re.search(rf"\b{name} \(\d+ GPUs, jobs may be preempted\)", probe.choice)
    for name, words in found.get("refusing", {}).items():
        assert re.search(rf"\b{name} \(\d+ GPUs, refuses your jobs: {words}\)", probe.choice)
    assert probe.choice in (tmp_path / "evalspan.toml").read_text()


def test_init_writes_what_the_site_asks_for(tmp_path: Path) -> None:
    """A time limit within MaxTime, the form of request for GPUs, account and QOS; nothing where the default does."""
    wanted = SiteProbe(
        kind="slurm", max_seconds=7200, gpu_request="--gres=gpu:{type}:{n}", account="proj", qos="long"
    )
    got = loaded(tmp_path, wanted)
    assert (got.trial.time_limit, got.slurm.gpu_request) == ("2:00:00", "--gres=gpu:{type}:{n}")
    assert (got.cluster.account, got.cluster.qos) == ("proj", "long")
    assert SiteProbe(kind="slurm", max_seconds=4 * 3600).chosen().keys() == {"cluster.kind"}


# --- names of settings -------------------------------------------------------------------------------------------------

# "[trial] cpus", "[slurm.ROLE] qos", and "cpus = 2 in [trial]"
NAMED = re.compile(r"\[((?:%s)(?:\.\w+)?)\] `?([a-z]+(?:_[a-z]+)*)\b" % "|".join(sorted(TABLES)))  # noqa: UP031
SET_IN = re.compile(r"\b([a-z_]+) = [^=]{1,40}? in \[([a-z.]+)\]")
# words of prose behind a table: "[judge] in evalspan.toml"
PROSE = {"allows", "has", "in", "names", "of", "only", "or", "says", "that"}


def texts() -> Iterator[tuple[str, str]]:
    """(place, text) of every page, and of every text in the code with its parts joined."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        if page.name != "CHANGELOG.md":
            yield str(page.relative_to(ROOT)), page.read_text()
    for room in ("coordinator", "evaljobs", "priors"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", node.value


def test_each_setting_that_a_message_or_a_page_names_is_there() -> None:
    """Renaming a field cannot make a message lie."""
    wrong = []
    for place, text in texts():
        found = [*NAMED.findall(text), *((table, key) for key, table in SET_IN.findall(text))]
        for table, key in found:
            name = f"{table.replace('ROLE', 'trial')}.{key}"
            if name not in NAMES and name not in TABLES and key not in PROSE:
                wrong.append(f"{place}: [{table}] {key}")
    assert wrong == []
    assert set(loading.OPTIONS) <= NAMES
