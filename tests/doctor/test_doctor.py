"""Laws of `evalspan doctor`: what it says of real clusters is what they are, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dev_cluster.api import Cluster
from dev_cluster.testing import unfinished, wait_until
from support.fake_cluster import FakeCluster, fake_node

from coordinator.cli.doctor import show
from coordinator.cluster.node_choice import choose
from coordinator.cluster.slurm_rules import Partition, SiteRules
from coordinator.config.schema import Config, NodesConfig
from coordinator.doctor import collect, findings
from coordinator.doctor.facts import Checkup, Facts, Finding
from coordinator.doctor.node_jobs import Answer, Target
from coordinator.doctor.slurm_findings import judge_partitions
from coordinator.evaluation.job_specs import Site

STAGED = {"fs": "tmpfs", "rung": "shm", "size": 8 << 30, "free": 8 << 30, "write_rate": 5e9, "read_rate": 9e9}


def ask(cluster: Cluster, **env: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a doctor that looks at this cluster."""
    work = cluster.user_dir / "doctor"
    options = ["--cluster", "slurm", "--work-dir", work, "--sample-mb", "16", "--wait", "120"]
    asked = {"CLUSTER_CPU_PARTITION": "cpu", "CLUSTER_PARTITION": "gpu", "TRIAL_DEVICE": "cpu", **env}
    done = cluster.run_as_user(
        [cluster.python, "-m", "coordinator", "doctor", "--json", *options],
        env={f"EVALSPAN_{name}": value for name, value in asked.items()},
        timeout=280,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def status(told: dict[str, Any]) -> dict[str, str]:
    return {f["what"]: f["status"] for f in told["findings"]}


def assert_nothing_is_left(cluster: Cluster) -> None:
    wait_until(lambda: not unfinished(cluster), "jobs that have answered end by themselves")
    left = cluster.run_as_user(["find", cluster.user_dir / "doctor" / "cache" / "doctor", "-type", "f"])
    assert left.stdout == ""


@pytest.mark.slurm
def test_an_ordinary_site_is_told_to_be_one(plain_cluster: Cluster) -> None:
    """Memory is seen to be shared by two jobs of a node, Redis is reached from it, nothing fails.

    It asks for GPUs, partitions and nodes as evaluations do: by roles, and only on nodes that the settings leave.
    """
    roles = {f"SLURM_{role}_PARTITION": "cpu" for role in ("METRIC", "BUILD")} | {
        "SLURM_TRIAL_PARTITION": "gpu"
    }
    request = {"SLURM_GPU_REQUEST": "--gpus-per-node={type}:{n}", "NODES_FEATURES": '["rack1"]'}
    code, told = ask(plain_cluster, CLUSTER_CPU_PARTITION="", **roles, **request)
    assert code == 0, told
    assert {status(told)[f"{kind} jobs"] for kind in ("build", "trial", "metric")} == {"ok"}
    assert told["nodes"].keys() == {"n1", "c1"}
    assert told["nodes"]["n1"]["shared"] is True
    assert told["nodes"]["n1"]["redis_trouble"] == ""
    assert told["nodes"]["n1"]["roots"][0]["write_rate"] > 0
    found = status(told)
    assert {found["staging"], found["n1 (gpu) memory"], found["work folder"]} <= {"ok", "warn"}
    assert found["sandbox on c1 (cpu)"] in {"ok", "warn"}
    assert_nothing_is_left(plain_cluster)
    memory = plain_cluster.run_as_user(
        ["srun", "-p", "gpu", "-w", "n1", "--mem=100", "find", "/dev/shm", "-name", "*nonce*"]
    )
    assert memory.stdout == ""


@pytest.mark.slurm
def test_an_odd_site_is_told_to_be_odd(odd_cluster: Cluster) -> None:
    """Its jobs ask for GPUs, its memory is seen to be private; that is a failure only where hosting was forbidden."""
    code, told = ask(odd_cluster)
    assert code == 0, told
    assert told["nodes"]["n1"]["shared"] is False
    (staging,) = (f for f in told["findings"] if f["what"] == "staging")
    assert staging["status"] == "warn"
    assert "EXCLUSIVE" in staging["found"]
    code, told = ask(odd_cluster, STAGE_HOST_TRIALS="false")
    assert code == 1
    assert status(told)["staging"] == "fail"
    assert_nothing_is_left(odd_cluster)


@pytest.mark.slurm
def test_doctor_probes_every_kind_of_job_at_its_real_limits(tight_cluster: Cluster) -> None:
    """All are taken; what no node of the CPU partition can hold is named with its kind."""
    _, told = ask(tight_cluster)
    found = {f["what"]: f["status"] for f in told["findings"]}
    assert {k: found[k] for k in ("build jobs", "trial jobs", "metric jobs")} == dict.fromkeys(
        ("build jobs", "trial jobs", "metric jobs"), "ok"
    ), told
    code, told = ask(tight_cluster, METRIC_MEMORY_MB="999000")
    assert code == 1
    failed = {f["what"]: f["found"] for f in told["findings"] if f["status"] == "fail"}
    assert "refused" in failed["metric jobs"]
    assert "build jobs" not in failed


SLURM = Config.model_validate({"cluster": {"kind": "slurm"}})
VERSIONS = {"lm_eval": "0.4.13", "torch": "2.9", "transformers": "5.1", "redis": "6"}


def answer(**record: Any) -> Answer:
    shared = record.pop("shared", True)
    roots = record.pop("roots", [{"root": "/dev/shm", "usable": True, "why": "", **STAGED}])
    facts = {"roots": roots, "versions": VERSIONS, "memory_cgroup_limit": None, "remove_ipc": False, **record}
    target = Target(node="n1", cluster=FakeCluster(fleet=()), sandbox=False)
    return Answer(target=target, record=facts, shared=shared)


@pytest.mark.parametrize(
    ("facts", "hosting", "status"),
    [
        ({}, False, {"ok"}),
        ({"shared": False}, False, {"warn"}),
        ({"shared": False}, True, {"ok"}),
        ({"shared": None}, False, {"warn"}),
        ({"remove_ipc": True}, False, {"ok", "warn"}),
        ({"redis_trouble": "connection refused"}, False, {"ok", "fail"}),
        ({"versions": {"lm_eval": None}}, False, {"ok", "fail"}),
        ({"versions": {**VERSIONS, "torch": "2.9+cpu"}}, False, {"ok", "fail"}),
        ({"roots": [{"root": "/dev/shm", "usable": False, "why": "not a folder"}]}, False, {"warn"}),
        (
            {
                "shared": None,
                "roots": [
                    {"root": "/dev/shm", "usable": False, "why": "full"},
                    {"root": "/scratch", "usable": True, "why": "", **STAGED, "rung": "disk"},
                ],
            },
            False,
            {"warn"},
        ),
    ],
)
def test_what_is_seen_on_a_node_is_judged(facts: dict[str, Any], hosting: bool, status: set[str]) -> None:
    """Only what would stop an evaluation fails; a lower rung is a warning; what could not be told is never ok."""
    found = list(findings.judge_node(answer(**facts), SLURM, hosting=hosting))
    assert {f.status for f in found} == status
    assert all(f.todo for f in found if f.status != "ok")


def judged(**facts: Any) -> dict[str, Finding]:
    """The findings of a local site whose own checks are all ok, but for these facts."""
    calm: dict[str, Any] = {
        "config": Config(),
        "python": "3.11",
        "versions": VERSIONS,
        "work_fs": "ext4",
        "work_free": 1 << 40,
        "redis": "answers",
    }
    return {f.what: f for f in findings.judge(Facts(**{**calm, **facts}))}


AWAY = "the controller is away"
LOST, BUSY, REFUSED = answer(), answer(), answer()
LOST.trouble, BUSY.trouble, REFUSED.trouble = "left no answer", "no answer within 60 s", "its job is FAILED"
REFUSED.refused = True
DRAINED = replace(fake_node("n1"), usable=False, state="drained", reason="new driver")
EXCLUDED = choose(fake_node("n1"), Config(nodes=NodesConfig(exclude=("n1",))))


def slurm(**tables: Any) -> Config:
    return Config.model_validate({"cluster": {"kind": "slurm"}} | tables)


@pytest.mark.parametrize(
    ("facts", "what", "status", "says"),
    [
        # what cannot be read is never ok, and shows with its reason
        ({"interpreter_error": "no such file"}, "trial interpreter", "fail", "no such file"),
        ({"redis_error": "connection refused"}, "Redis", "fail", "connection refused"),
        ({"cluster_error": "sinfo is not there"}, "cluster", "fail", "sinfo is not there"),
        ({"config": SLURM, "rules_error": AWAY}, "Slurm's settings", "warn", AWAY),
        ({"config": SLURM, "job_kinds": {"trial": ("warn", AWAY, True)}}, "trial jobs", "warn", AWAY),
        ({"config": SLURM, "job_kinds": {"metric": ("fail", "no CPUs", False)}}, "metric jobs", "fail", "no CPUs"),
        # nodes write their answers to the work folder: whatever its file system, those that answered see it
        ({"config": SLURM}, "work folder", "warn", ""),
        ({"config": SLURM, "answers": [answer(), LOST]}, "work folder", "warn", ""),
        ({"config": SLURM, "answers": [answer()]}, "work folder", "ok", ""),
        ({"config": SLURM, "work_fs": "tmpfs", "answers": [answer()]}, "work folder", "fail", ""),
        # a busy node is passed over; where every one was refused, no evaluation would run
        ({"answers": [BUSY, answer()]}, "n1", "warn", "60 s"),
        ({"answers": [REFUSED]}, "GPU nodes", "fail", ""),
        ({"answers": [REFUSED, BUSY]}, "GPU nodes", "", ""),
        # nodes that take no job are counted; those that the settings exclude are no warning unless none is left
        ({"config": SLURM, "gpu_nodes": [DRAINED]}, "GPU nodes", "fail", "0 of 1 usable: n1 is drained (new driver)"),
        ({"config": SLURM, "gpu_nodes": [DRAINED, fake_node("n2")]}, "GPU nodes", "warn", "1 of 2 usable"),
        ({"config": SLURM, "gpu_nodes": [fake_node("n2")]}, "GPU nodes", "ok", "1 of 1 usable"),
        ({"config": SLURM, "gpu_nodes": [EXCLUDED, fake_node("n2")]}, "GPU nodes", "ok", "1 more excluded"),
        ({"config": SLURM, "gpu_nodes": [EXCLUDED]}, "GPU nodes", "fail", "[nodes] exclude"),
        # what Slurm's commands do under pyslurm
        ({"config": slurm(), "api": "25.11.2; by Slurm's commands: scancel"}, "pyslurm", "ok", "scancel"),
        # what stops the daemon or members' checkpoints
        ({"config": slurm()}, "[watch]", "", ""),
        ({"config": slurm(shared_group="team")}, "[watch]", "warn", ""),
        ({"config": slurm(shared_group="team", watch={"roots": ["/"]})}, "[watch]", "", ""),
        ({"config": slurm(watch={"roots": ["/nowhere"]})}, "[watch]", "warn", ""),
        ({"config": slurm(watch={"roots": ["/"], "suite": "mien"})}, "[watch]", "fail", ""),
    ],
)  # fmt: skip
def test_a_fact_is_found_with_its_reason_and_what_to_do(
    facts: dict[str, Any], what: str, status: str, says: str
) -> None:
    """Only what would stop an evaluation fails. "": nothing is said of it."""
    assert {f.status for f in judged().values()} == {"ok"}
    found = judged(**facts).get(what)
    assert (found.status if found else "") == status
    if found:
        assert says in found.found
        assert found.todo or status == "ok"


def test_a_sandbox_that_does_not_hold_is_named_with_its_reason() -> None:
    """The reason why no better level holds is in the line."""
    levels = [
        {"level": "namespaces", "holds": False, "reason": "no user namespaces"},
        {"level": "landlock", "holds": False, "reason": "kernel 5.4"},
        {"level": "rlimits", "holds": True, "reason": ""},
    ]
    found = findings.judge_sandbox(levels, "on c1", allow_unsafe=False)
    assert found.status == "warn"
    assert "no user namespaces" in found.found
    assert "kernel 5.4" in found.found


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_the_trial_interpreter_must_import_its_engine(engine: str, tmp_path: Path) -> None:
    """A vLLM that is installed and cannot be imported is a failure in its own words; hf, which can be, is fine."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import libvllm_that_is_missing\n")
    (tmp_path / "vllm-0.10.0.dist-info").mkdir()
    (tmp_path / "vllm-0.10.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.10.0\n")
    path = os.pathsep.join([str(tmp_path), str(Path.cwd())])
    site = Site(
        work_dir=str(tmp_path),
        trial_command=(sys.executable,),
        worker_command=(sys.executable,),
        trial_env={"PYTHONPATH": path},
    )
    config = Config.model_validate({"trial": {"engine": engine}})
    facts = Facts(config=config, python="", work_fs="", work_free=0)
    collect.ask_interpreter(facts, site)
    finding = {f.what: f for f in findings.judge(facts)}["trial interpreter"]
    assert finding.status == ("ok" if engine == "hf" else "fail"), finding
    assert ("libvllm_that_is_missing" in finding.found) == (engine == "vllm")


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, {"GPU partition": "ok"}),
        ({"trial": "gpu"}, {"partition of trials": "ok"}),
        ({"trial": "gpu", "metric": "nope"}, {"partition of trials": "ok", "partition of metric workers": "fail"}),
        ({"precursor": "old"}, {"GPU partition": "ok", "partition of precursors": "fail"}),
    ],
)  # fmt: skip
def test_each_partition_that_a_role_names_is_checked(settings: dict[str, str], found: dict[str, str]) -> None:
    """One that is not there, or not up, fails, and the setting is named."""
    rules = SiteRules(
        config={},
        partitions=(Partition(name="gpu", default=True), Partition(name="old", up=False)),
    )
    tables = {role: {"partition": name} for role, name in settings.items()}
    config = Config.model_validate({"cluster": {"kind": "slurm"}, "slurm": tables})
    told = list(judge_partitions(rules, config))
    assert {f.what: f.status for f in told} == found
    for finding in told:
        assert "[slurm.metric] partition" in finding.todo or finding.what != "partition of metric workers"


@pytest.mark.parametrize(
    ("limit", "said"), [(600, "at most 10 min"), (240, "at most 4 min"), (5400, "at most 1.5 h")]
)
def test_a_partitions_time_is_said_in_minutes_or_hours(limit: int, said: str) -> None:
    rules = SiteRules(config={}, partitions=(Partition(name="gpu", default=True, max_seconds=limit),))
    found = {f.what: f.found for f in judge_partitions(rules, Config())}
    assert said in found["GPU partition"]


def test_the_table_names_a_node_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of 60 characters that differ at their end."""
    names = [f"gpu-node-of-the-very-long-named-cluster-in-building-12-n{i:04d}" for i in (1, 2)]
    found = tuple(Finding(what=f"{name} (gpu) memory", status="ok", found="shared by jobs") for name in names)
    show(Checkup(cluster="slurm", findings=found), Path("work"))
    told = capsys.readouterr().out
    cells = "".join(told.replace("shared by jobs", "").split())
    assert all(name in cells for name in names), told
