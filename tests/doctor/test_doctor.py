"""Laws of `evalspan doctor`: what it says of real clusters is what they are, and it leaves nothing behind."""

import json
import os
import sys
from pathlib import Path

import pytest
from dev_cluster.testing import srun, unfinished, wait_until

from coordinator.decide.evaluation.job_specs import Site
from coordinator.errors import OperatorError
from coordinator.operations.doctor import collect, findings, shared_storage
from coordinator.operations.doctor.facts import Facts
from coordinator.site.config.schema import Config
from evaljobs.staging.capacity import MEMORY_FS, fs_type


def ask(cluster, **env):
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


def status(told):
    return {f["what"]: f["status"] for f in told["findings"]}


def assert_nothing_is_left(cluster):
    wait_until(lambda: not unfinished(cluster), "jobs that have answered end by themselves")
    left = cluster.run_as_user(["find", cluster.user_dir / "doctor" / "cache" / "doctor", "-type", "f"])
    assert left.stdout == ""


@pytest.mark.slurm
def test_an_ordinary_site_is_told_to_be_one(plain_cluster):
    """Memory is seen to be shared by two jobs of a node, Redis is reached from it, nothing fails.

    It asks for GPUs, partitions and nodes as evaluations do: by roles, and only on nodes that the settings leave.
    """
    roles = {"SLURM_METRIC_PARTITION": "cpu", "SLURM_BUILD_PARTITION": "cpu", "SLURM_TRIAL_PARTITION": "gpu"}
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
    assert srun(plain_cluster, "find /dev/shm -name '*nonce*'", "-p", "gpu", "-w", "n1") == ""


@pytest.mark.slurm
def test_an_odd_site_is_told_to_be_odd(odd_cluster):
    """Its jobs ask for GPUs, its memory is seen to be private."""
    code, told = ask(odd_cluster)
    assert code == 0, told
    assert told["nodes"]["n1"]["shared"] is False
    (staging,) = (f for f in told["findings"] if f["what"] == "staging")
    assert staging["status"] == "warn"
    assert "EXCLUSIVE" in staging["found"]
    assert_nothing_is_left(odd_cluster)


@pytest.mark.slurm
def test_doctor_probes_every_kind_of_job_at_its_real_limits(tight_cluster):
    """All are taken, but what no node of the CPU partition can hold: that is named with its kind."""
    code, told = ask(tight_cluster, METRIC_MEMORY_MB="999000")
    found = {f["what"]: (f["status"], f["found"]) for f in told["findings"]}
    assert (code, found["build jobs"][0], found["trial jobs"][0]) == (1, "ok", "ok"), told
    assert found["metric jobs"][0] == "fail"
    assert "refused" in found["metric jobs"][1]


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_the_trial_interpreter_must_import_its_engine(engine, tmp_path):
    """A vLLM that is installed and cannot be imported is a failure in its own words; hf, which can be, is fine."""
    for name, text in (
        ("vllm/__init__.py", "import libvllm_that_is_missing\n"),
        ("vllm-0.10.0.dist-info/METADATA", "Name: vllm\nVersion: 0.10.0\n"),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    python, path = (sys.executable,), os.pathsep.join([str(tmp_path), str(Path.cwd())])
    env = {"PYTHONPATH": path}
    site = Site(work_dir=str(tmp_path), trial_command=python, worker_command=python, trial_env=env)
    config = Config.model_validate({"trial": {"engine": engine}})
    facts = Facts(config=config, python="", work_fs="", work_free=0)
    collect.ask_interpreter(facts, site)
    finding = {f.what: f for f in findings.judge_site(facts)}["trial interpreter"]
    assert finding.status == ("ok" if engine == "hf" else "fail"), finding
    assert ("libvllm_that_is_missing" in finding.found) == (engine == "vllm")


# --- what the nodes of a cluster see -------------------------------------------------------------------------------------

OWN = {  # path, file system -> whether this machine alone has it; a disk elsewhere may be exported to the nodes
    ("/home/a/suite", "tmpfs"): True,  # a diskless login node
    ("/dev/shm/suite", "tmpfs"): True,
    ("/tmp/a", "ext4"): True,
    ("/var/tmp/a", "overlay"): True,
    ("/run/user/1000", "xfs"): True,
    ("/tmp", "nfs4"): False,
    ("/tmpfiles/a", "ext4"): False,
    ("/home/a", "ext4"): False,
    ("/scratch", "lustre"): False,
}
# nodes' addresses -> whether all are this machine, "login.cluster"; "": Slurm did not say
HERE = {"127.0.0.1 127.0.0.2 ::1": True, "login login": True, "login 10.0.0.7": False, "n1": False, "": True}


def test_own_is_memory_and_what_each_machine_has():
    """Node memory anywhere, temporary folders on a local disk. Nodes are here only where each one's address is."""
    assert {place: shared_storage.is_own(Path(place[0]), place[1]) for place in OWN} == OWN
    assert {names: shared_storage.are_all_here(names.split(), "login.cluster") for names in HERE} == HERE


def test_a_folder_that_nodes_cannot_see_is_refused_by_its_path(tmp_path, monkeypatch):
    """One line with the path that is named, and what to do; also for a link to it and a pattern in it.

    Folders that nodes may see cost the controller nothing; a cluster that does not answer refuses nothing.
    """
    place, sinfo, link = Path("/dev/shm"), tmp_path / "sinfo", tmp_path / "link"
    if fs_type(place) not in MEMORY_FS:
        pytest.skip("no memory file system at /dev/shm")
    sinfo.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\necho '127.0.0.1   '; echo '10.0.0.7   '\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    shared_storage.check_shared(["/", "/usr"])
    assert not (tmp_path / "asked").exists()
    link.symlink_to(place)
    for path in (str(place), str(link), f"{place}/*.jsonl"):
        with pytest.raises(OperatorError) as refused:
            shared_storage.check_shared(["/", path])
        assert path in str(refused.value)
        assert "storage that they share" in str(refused.value)
    sinfo.write_text("#!/bin/sh\nexit 1\n")
    shared_storage.check_shared(["/dev/shm"])
