"""Faults made for real on a development cluster: `evalspan diagnose JOBID` names each, by accounting and the job's log."""

import json

import pytest
from dev_cluster.testing import sbatch, state, wait_state, wait_until

pytestmark = pytest.mark.slurm
SMALL_SHM = "unshare -rm sh -c 'mount -t tmpfs -o size=1m tmpfs /dev/shm && {}'"
PEERS = """
import os, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
dist.all_reduce(torch.ones(1))
if rank:
    os.kill(os.getpid(), 9)
dist.all_reduce(torch.ones(1))
"""
MAPPED = """
import mmap
file = open("/dev/shm/a", "wb+")
file.truncate(1 << 24)
mmap.mmap(file.fileno(), 1 << 24)[:] = bytes(1 << 24)
"""
OFFLINE = "import datasets; datasets.load_dataset('evalspan-tests/there-is-none')"
# script, options of sbatch, reason
FAULTS = {
    "an out-of-memory kill": ("{py} -c 'x = bytearray(1 << 30)'", "--mem=100", "OOMKilled"),
    "a full /dev/shm": (SMALL_SHM.format("{py} {dir}/mapped.py"), "", "DiskFull"),
    "a full disk": (SMALL_SHM.format("dd if=/dev/zero of=/dev/shm/a bs=1M count=4"), "", "DiskFull"),
    "a killed peer": ("{py} {dir}/peers.py 1 {dir}/store & {py} {dir}/peers.py 0 {dir}/store", "--mem=3000", "ConnectionError"),
    "a missing module": ("{py} -c 'import no_such_module'", "", "ImportError"),
    "a missing command": ("no-such-command", "", "FileNotFoundError"),
    "a bad config": ("{py} -c 'import tomllib; tomllib.loads(\"[a\")'", "", "ValueError"),
    "a bad option": ("{py} -m json.tool --no-such-option", "", "ArgumentError"),
    "a data set offline": ('HF_HUB_OFFLINE=1 HF_HOME={dir}/hf {py} -c "' + OFFLINE + '"', "--mem=3000", "DatasetLoadingError"),
    "a time limit": ("exec sleep 600", "-t 1", "TimeLimit"),
    "a power cut": ("exec sleep 600", "-p gpu -w n2", "NodeFailure"),
    "a preemption": ("exec sleep 600", "-p spare --gpus=2 -w n1", "Preempted"),
    "scancel": ("exec sleep 600", "", "Cancelled"),
    "nothing": ("echo step 1 loss 2.0; echo done", "", "Healthy"),
}  # fmt: skip


def test_each_fault_is_named(strict_cluster):
    """The word of accounting, the log that the job named, and the failure that began it."""
    site, folder = strict_cluster, strict_cluster.user_dir
    for name, text in (("mapped.py", MAPPED), ("peers.py", PEERS)):
        site.run_as_user(["tee", str(folder / name)], input=text, check=True)
    made = {
        fault: sbatch(
            site,
            script.replace("{py}", str(site.python)).replace("{dir}", str(folder)),
            *("--no-requeue", "-p", "cpu", "-t", "10", "-o", f"{folder}/%j.log"),
            *options.split(),
        )
        for fault, (script, options, _) in FAULTS.items()
    }
    wait_state(site, made["a power cut"], "RUNNING")
    wait_state(site, made["a preemption"], "RUNNING")
    site.kill_node("n2")
    sbatch(site, "sleep 1", "-p", "gpu", "--gpus=2", "-w", "n1")
    for ended in ("scancel", "a time limit"):
        wait_state(site, made[ended], "RUNNING")
    site.run_as_user(["scancel", made["scancel"]])
    limited = made["a time limit"]
    site.update(f"jobid={limited}", "endtime=now+1")  # sooner than its minute
    busy = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "UNKNOWN")
    wait_until(lambda: not any(state(site, job) in busy for job in made.values()), "the faults", 400.0)
    said = {fault: _diagnosed(site, job) for fault, job in made.items()}
    site.bring_back("n2")
    site.wait_nodes(site.nodes, "idle")
    reasons = {fault: reason for fault, (_, _, reason) in FAULTS.items()}
    wrong = [_log(folder / f"{made[f]}.log") for f, one in said.items() if one["reason"] != reasons[f]]
    assert {fault: one["reason"] for fault, one in said.items()} == reasons, wrong


def _diagnosed(site, job):
    done = site.run_as_user([str(site.python), "-m", "coordinator", "diagnose", job, "--json"])
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def _log(path):
    return path.read_text(errors="replace")[-500:] if path.exists() else ""
