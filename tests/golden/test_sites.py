"""What Slurm is asked to run, and what `evalspan doctor` and `init` say, on recorded sites (`support.played_site`)."""

import json
import re
import sys
from pathlib import Path

import pytest
from support.goldens import long
from support.played_site import RECORDED, PlayedSite, evaluate, make_checkpoint
from typer.testing import CliRunner

from coordinator.interface.cli import app

pytestmark = long
GB = 10**9
# task -> requests, tokens of each, tokens to generate, executes programs
TOYS = {"choice": (24, 40, 0, False), "sums": (24, 30, 32, False), "pages": (6, 200, 0, False), "programs": (8, 60, 64, True)}  # fmt: skip
HUGE = {"huge": (40_000, 6000, 0, False)}
CPU = {"cluster.cpu_partition": "cpu"}
SHORT, ROLES = {"cluster.qos": "short"}, {
    "slurm.gpu_request": "--gpus-per-node={type}:{n}", "slurm.precursor.partition": "spare", "slurm.metric.extra_args": ["--nice=7"],
    "nodes.gpu_types": ["a100"], "nodes.exclude": ["n1,gpu-node-of-the-very-long-named-cluster-in-building-12-n[0003]"],
}  # fmt: skip
# name of tests/odd_sites -> recording, settings
SITES = {
    "plain": ("plain", {}),
    "cgroups": ("cgroups", {}),
    "max-wall": ("accounts", SHORT),
    "max-jobs": ("accounts", {"cluster.qos": "few-jobs"}),
    "max-jobs-two-nodes": ("accounts-two-nodes", {"cluster.qos": "few-jobs"}),
    "max-submit": ("accounts", {"cluster.qos": "few-submits"}),
    "group-cpus": ("accounts", {"cluster.qos": "few-cpus"}),
    "gpus-of-a-user": ("accounts", {"cluster.qos": "few-gpus"}),
    "max-time": ("max-time", {}),
    "max-time-enforced": ("max-time-enforced", {}),
    "untyped-gpus": ("untyped-gpus", {}),
    "mixed-nodes": ("mixed-nodes", {}),
    "reservation": ("reservation", {}),
    "power-saving": ("power-saving", {"nodes.wake": True}),
    "no-arrays": ("no-arrays", {}),
    "requests": ("mixed-nodes", ROLES),
    "all-limits": ("all-limits", SHORT),
    "two-minutes": ("two-minutes", {}),
    "private-memory": ("private-memory", {}),
    "whole-nodes": ("whole-nodes", {}),
    "gpu-jobs-only": ("gpu-jobs-only", CPU),
    "memory-per-cpu": ("memory-per-cpu", {}),
    "busy": ("busy", {"cluster.account": "research"} | CPU),
}
MANY = {f"task{i:02}": (400, 300, 0, False) for i in range(60)}
JUDGE = {"judge.url": "https://judge.example/v1", "judge.model": "judge", "judge.api_key_env": "JUDGE_KEY"}
# plan -> recording, settings, tasks, the suite's head, bytes of each checkpoint
PLANS = {
    "many-small-tasks": ("large", {}, MANY, "", [14 * GB]),
    "one-huge-task": ("large", {}, HUGE, "", [14 * GB]),
    "round-robin": ("large", {"plan.policy": "round-robin"}, MANY, "", [14 * GB]),
    "programs": ("large", {}, {"programs": (4000, 300, 512, True)} | TOYS, "", [14 * GB]),
    "judged": ("large", JUDGE, {"judged": (800, 300, 512, True)} | TOYS, "", [14 * GB]),
    "next-checkpoint": ("plain", {}, TOYS, "", [2 * GB, 2 * GB]),
    "three-checkpoints": ("busy", {"cluster.account": "research", "trial.memory_mb": 2000} | CPU, TOYS, "", [GB // 10] * 3),
    "max-wall": ("large", SHORT, HUGE, "", [14 * GB]),
    "many-gpus-a-trial": ("large", {"trial.gpus_per_trial": 4, "trial.cpus": 8}, HUGE, "", [140 * GB]),
    "vllm": ("large", {"trial.engine": "vllm"}, HUGE | TOYS, "", [14 * GB]),
    "fast": ("large", {}, TOYS | HUGE, 'mode = "fast"\n', [14 * GB]),
    "found-batch-size": ("large", {}, TOYS | HUGE, 'batch_size = "auto"\n', [14 * GB]),
    "few-nodes": ("large", {"borrow.max_nodes": 3, "borrow.max_gpus": 20, "borrow.leave_nodes_free": 6}, HUGE, "", [14 * GB]),
    "spare-nodes": ("large", {"cluster.partition": "cpu", "borrow.best_effort": "spare", "borrow.best_effort_qos": "short"}, TOYS, "", [14 * GB]),
    "roles": ("large", ROLES | {"slurm.precursor.partition": None, "slurm.build.qos": "short", "slurm.trial.account": "research", "slurm.trial.extra_args": ["--exclusive=user"], "cluster.extra_args": ["--constraint=rack1"], "cluster.nice": 5, "cluster.reservation": "evals"}, TOYS, "", [14 * GB]),
    "hosted": ("large", {"stage.host_trials": True}, TOYS | HUGE, "", [14 * GB]),
    "not-staged": ("large", {"stage.enabled": False}, TOYS, "", [14 * GB]),
    "own-environment": ("large", {"trial.env": {"HF_HOME": "/models/it's"}, "trial.prologue": "module load cuda", "shared_group": None, "trial.memory_mb": 9000, "metric.memory_mb": 3000, "metric.workers": 3}, TOYS, "", [14 * GB]),
}  # fmt: skip


@pytest.fixture
def site_of(tmp_path, monkeypatch):
    """Makes the test's one site of a recording and the sizes of its tasks."""
    made = []

    def make(recording, sizes=None):
        made.append(PlayedSite(tmp_path, recording, monkeypatch, sizes or {}))
        return made[-1]

    yield make
    for site in made:
        site.end()


def play(site, settings, head="", checkpoints=(GB,)):
    """`head`: of the suite's file. `checkpoints`: bytes of each."""
    folders = []
    for number, size in enumerate(checkpoints):
        folders.append(site.folder / f"step-{10 * number}")
        folders[-1].mkdir()
        make_checkpoint(folders[-1], size)
    suite = site.folder / "suite.toml"
    judge = {"judged": "judge = true\n"}
    tasks = "".join(f'[[task]]\nname = "{task}"\n{judge.get(task, "")}' for task in site.sizes)
    size = "" if "batch_size" in head else "batch_size = 8\n"
    suite.write_text(f'name = "suite"\n{size}{head}{tasks}')
    evaluate(site, folders, suite, settings)
    return site.found()


@pytest.mark.parametrize("name", SITES)
def test_a_site_is_asked_for_the_same_jobs(name, site_of, goldens):
    """Jobs of a toy evaluation there in their order, with node, GPUs, CPUs, memory, time; and what is cancelled."""
    recording, settings = SITES[name]
    found = play(site_of(recording, TOYS), settings)
    goldens.check(f"sites/jobs/{name}.json", found["rounds"])


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_asked_for_the_same_jobs(name, site_of, monkeypatch, goldens):
    """The same, with the whole text and all arguments of the first job of each kind."""
    recording, settings, sizes, head, checkpoints = PLANS[name]
    site = site_of(recording, sizes)
    monkeypatch.setenv("JUDGE_KEY", "x")
    cpu = {} if recording == "plain" else CPU
    goldens.check(f"sites/plans/{name}.json", play(site, cpu | settings, head, checkpoints))


# Findings about this machine and its interpreter, and of node jobs, which never start here.
ELSEWHERE = re.compile(
    r"python|trial interpreter|work folder|hook|Redis.*|.* \((gpu|cpu|spare).*\)|.* and \d+ more"
)
STYLE = re.compile(r"\x1b\[[0-9;]*m")
SETTING = re.compile(r"\[[\w.]+\] \w+(?: = (?:\"[^\"]*\"|\w+))?")
# name -> recording, environment, and limits that its accounting has: "TABLE ROW FIELD" -> value
CHECKUPS = {
    **{name: (name, {}, {}) for name in ("plain", "max-time", "untyped-gpus", "mixed-nodes", "reservation", "power-saving", "no-arrays", "all-limits", "two-minutes", "private-memory", "whole-nodes", "gpu-jobs-only", "memory-per-cpu", "busy", "large")},
    "max-wall": ("accounts", {"CLUSTER_QOS": "short"}, {}),
    "max-jobs": ("accounts-two-nodes", {"CLUSTER_QOS": "few-jobs"}, {}),
    "max-submit": ("accounts", {"CLUSTER_QOS": "few-submits"}, {}),
    "group-cpus": ("accounts", {"CLUSTER_QOS": "few-cpus"}, {}),
    "gpus-of-a-user": ("accounts", {"CLUSTER_QOS": "few-gpus"}, {}),
    "nodes-woken": ("power-saving", {"NODES_WAKE": "true"}, {}),
    "account-named": ("busy", {"CLUSTER_ACCOUNT": "research", "CLUSTER_CPU_PARTITION": "cpu"}, {}),
    "wrong-partition": ("plain", {"CLUSTER_CPU_PARTITION": "cpus"}, {}),
    "own-reservation": ("reservation", {"CLUSTER_RESERVATION": "maintenance"}, {}),
    "typed-gpus": ("untyped-gpus", {"SLURM_GPU_REQUEST": "--gres=gpu:{type}:{n}"}, {}),
    "gpus-of-two-nodes": ("large", {"TRIAL_GPUS_PER_TRIAL": "16"}, {}),
    "large-trials": ("mixed-nodes", {"TRIAL_MEMORY_MB": "70000"}, {}),
    "enough": ("large", {}, {"user research MaxSubmit": "100", "assoc research GrpTRES": "gres/gpu=32,node=20", "user research MaxTRES": "cpu=1"}),
    "jobs-30": ("large", {}, {"user research MaxJobs": "30", "assoc research GrpTRES": "gres/gpu=20", "assoc research GrpJobs": "50"}),
    "jobs-12": ("large", {}, {"user research MaxJobs": "12", "qos normal MaxTRESPU": "gres/gpu=6", "qos normal GrpTRES": "node=2"}),
    "jobs-5": ("large", {}, {"user research MaxJobs": "5", "qos normal GrpTRES": "cpu=20,mem=90G", "assoc research GrpSubmit": "44"}),
    "jobs-4": ("large", {}, {"user research MaxJobs": "4", "qos normal MaxTRESPA": "cpu=30", "assoc root GrpTRES": "gres/gpu=3"}),
    "jobs-2": ("large", {}, {"user research MaxJobs": "2", "user research MaxTRES": "gres/gpu=4,mem=10G", "qos normal MaxSubmitPA": "9"}),
    "none-may-start": ("large", {}, {"user research MaxJobs": "0", "qos normal MaxTRESPU": "gres/gpu=0", "qos normal GrpTRES": "mem=4000M"}),
    "least-gpus": ("large", {}, {"qos normal MinTRES": "gres/gpu=1", "qos normal MaxTRESPerNode": "gres/gpu=2"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """A Python whose answers are kept: to import torch and lm-eval for each check would take most of the time."""
    folder = tmp_path_factory.mktemp("python")
    kept = f'{folder}/$(printf %s "$*" | cksum | tr -d " ")'
    ask = f'{{ {sys.executable} "$@" > $f.$$ && mv $f.$$ $f; }}'
    (folder / "python").write_text(f"#!/bin/sh\nf={kept}\n[ -e $f ] || {ask}\ncat $f\n")
    (folder / "python").chmod(0o755)
    return folder / "python"


@pytest.mark.parametrize("name", CHECKUPS)
def test_doctor_says_the_same(name, site_of, monkeypatch, goldens, interpreter):
    """Its exit code, what fails or warns of Slurm, with the figures that it names and the settings that would do."""
    recording, env, limits = CHECKUPS[name]
    site = site_of(recording)
    for key, value in limits.items():
        table, row, field = key.split()
        next(r for r in site.site[table] if row in (r.get("Name"), r.get("Account")))[field] = value
    for variable, value in {**env, "TRIAL_PYTHON": str(interpreter), "TRIAL_DEVICE": "cpu"}.items():
        monkeypatch.setenv(f"EVALSPAN_{variable}", value)
    options = f"--cluster slurm --partition gpu --json --wait 1 --work-dir {site.work}"
    done = CliRunner().invoke(app, ["doctor", *options.split()])
    rows = [f for f in json.loads(done.stdout)["findings"] if not ELSEWHERE.fullmatch(f["what"])]
    found = [
        {
            "what": f["what"],
            "status": f["status"],
            "figures": " ".join(re.findall(r"\d+", f["found"])),
            "settings": SETTING.findall(f["todo"]),
        }
        for f in rows
        if f["status"] != "ok"
    ]
    lines = "".join(site.plain(f"{f['status']:4} {f['what']}: {f['found']} -> {f['todo']}\n") for f in rows)
    goldens.check(f"sites/doctor/{name}.json", {"exit code": done.exit_code, "findings": found})
    goldens.check(f"texts/sites/doctor-{name}.txt", lines)


@pytest.mark.parametrize("name", sorted(place.stem for place in RECORDED.iterdir()))
def test_init_says_the_same(name, site_of, tmp_path, monkeypatch, goldens):
    """The settings of the file that it writes, once more with that file there, and the line that submits the daemon's job."""
    site = site_of(name)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init"])
    first = Path("evalspan.toml").read_text()
    CliRunner().invoke(app, ["init", "--force"])
    assert Path("evalspan.toml").read_text() == first
    said = site.plain(
        re.sub(r"\S*/(evalspan-daemon|evaluate)\.sbatch", r"\1.sbatch", STYLE.sub("", done.output))
    )
    kept = re.findall(r"^\w+ = [^#\n]*[^#\s]", Path("evalspan.toml").read_text(), re.MULTILINE)
    found = {"exit code": done.exit_code, "settings": kept, "lines": re.findall(r"`(sbatch [^`]*)`", said)}
    goldens.check(f"sites/init/{name}.json", found)
    goldens.check(f"texts/sites/init-{name}.txt", said)
