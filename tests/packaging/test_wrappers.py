"""Laws of the sbatch wrappers: training is sacred, and a coordinator near its time limit comes back.

Beside a real Slurm `evalspan` is the real one; elsewhere a small program of the test's, as are Slurm's commands: there
what is tested is what the wrappers do around them.
"""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from dev_cluster.api import dev_cluster, unavailable
from dev_cluster.testing import state, wait_state, wait_until

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DAEMON = """trap 'echo ended; exit 0' TERM
printf '%s|%s|%s|%s\\n' "$*" "$EVALSPAN_WATCH_FOLDERS" "$EVALSPAN_WATCH_SUITE" "$EVALSPAN_CLUSTER_KIND"
while :; do sleep 0.1; done"""
LATE = """trap 'until [ -e end ]; do sleep 0.05; done; exit 0' TERM
touch ready
while :; do sleep 0.1; done"""


class Job:
    """A batch job's folder, where programs of the test's stand for evalspan and Slurm's commands and write down their calls."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "calls"
        (folder / "bin").mkdir()
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.env = {
            **os.environ,
            "PATH": path,
            "SLURM_JOB_ID": "7",
            "EVALSPAN_BIN": str(folder / "bin/evalspan"),
        }
        self.program("evalspan", DAEMON)
        for name in ("sbatch", "scontrol"):
            self.program(name, f'printf "%s " {name} "$@"; echo')

    def program(self, name, body):
        """`body` prints to the log; its own standard output is descriptor 3."""
        file = self.folder / "bin" / name
        file.write_text(f'#!/bin/bash\nexec 3>&1 >> "{self.log}"\n{body}\n')
        file.chmod(0o755)

    def start(self, script, *words, **env):
        argv, out = ["bash", SCRIPTS / script, *words], (self.folder / "said").open("w")
        return subprocess.Popen(argv, cwd=self.folder, env=self.env | env, stdout=out, stderr=out, text=True)

    def train(self, *command, **env):
        words = ("ckpt", "core", "--", *command)
        return self.start("train-with-eval.sbatch", *words, **{"EVALSPAN_FINISH": "no", **env})

    def calls(self):
        return [line.strip() for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def said(self):
        return (self.folder / "said").read_text()


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


@pytest.mark.parametrize("code", [0, 3])
def test_the_jobs_exit_code_is_the_trainings(job, code):
    """Whatever training exits with, the job does; the daemon was told folder and suite, and ended in order."""
    training = job.train("sh", "-c", f'until [ -s "{job.log}" ]; do sleep 0.05; done; exit {code}')
    assert training.wait(timeout=120) == code
    assert job.calls() == [f'daemon --wait|["{job.folder / "ckpt"}"]|core|slurm', "ended"]


def test_a_daemon_that_cannot_start_does_not_touch_training(job):
    """No evalspan at all: training runs and its exit code counts."""
    assert job.train("sh", "-c", "touch trained", EVALSPAN_BIN="missing").wait(timeout=120) == 0
    assert (job.folder / "trained").exists()


def test_signals_reach_training_and_its_own_exit_code_counts(job):
    """A signal that Slurm sends ahead of the time limit is training's to handle."""
    train = job.train("bash", "-c", "trap 'exit 7' USR1; touch ready; while :; do sleep 0.05; done")
    wait_until((job.folder / "ready").exists, "training runs")
    train.send_signal(signal.SIGUSR1)
    assert train.wait(timeout=120) == 7


@pytest.mark.parametrize("finish", ["--partition=cpu -A x", "no"])
def test_what_is_open_when_training_ends_is_finished_by_a_job_of_its_own(job, finish):
    """A daemon that ends when it is idle, with the user's options, and told of the folder; or none, where asked so."""
    assert job.train("false", EVALSPAN_FINISH=finish).wait(timeout=120) == 1, "training's own"
    submitted = [call for call in job.calls() if call.startswith("sbatch")]
    assert len(submitted) == (finish != "no")
    for call in submitted:
        assert f" {finish} --wrap {job.env['EVALSPAN_BIN']} daemon --until-idle" in call


@pytest.mark.parametrize(("number", "again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_an_evaluation_near_its_time_limit_is_queued_again_and_one_that_slurm_ends_is_not(job, number, again):
    """Either way the coordinator gets SIGTERM; the wrapper requeues itself only for Slurm's warning: a requeue and
    preemption are Slurm's own.
    """
    process = job.start("evaluate.sbatch", "ckpt", "core", "--batch-size", "4")
    wait_until(job.calls, "the coordinator runs")
    process.send_signal(number)
    assert process.wait(timeout=120) == 0
    called, *then = job.calls()
    assert called.startswith("eval ckpt --suite core --cluster slurm --batch-size 4|")
    assert then == ["ended", *["scontrol requeue 7"] * again]


# id, comment and reason of pending jobs: two of evalspan's wait for a limit, one since its last coordinator's end, and Slurm has
# not looked at one yet
WAITING = (
    "20_0|evalspan:work:1a/trial|QOSMaxJobsPerUserLimit\\n21|evalspan:work:1a/build|AssocGrpGRES\\n"
    "22|evalspan:work:1a/trial|Resources\\n23|mine|QOSMaxJobsPerUserLimit\\n8||Dependency\\n"
    "24|evalspan:work:1a/metric|BeginTime\\n25|mine|BeginTime\\n26|evalspan:work:1a/trial|None\\n"
)
KEPT = "scontrol update jobid=20_0,21,26 starttime=now+180"


@pytest.mark.parametrize(
    ("then", "called_at_last"), [("it ends", ""), ("scancel", "scancel 8"), ("no room", "scontrol requeue 7")]
)
def test_a_daemon_near_its_time_limit_submits_its_successor_before_it_ends(job, then, called_at_last):
    """With its own options and log. Cancelled meanwhile it takes the successor along; where Slurm takes none, it is queued
    again. Jobs that wait for a limit on jobs start later, so that its place is the successor's; that begins them at its start.
    """
    job.program("sbatch", 'echo "$@"; ' + ("exit 1" if then == "no room" else "echo 8 >&3"))
    shown = f"case $* in *%k*) printf '%b' '{WAITING}' ;; *%r*) echo None ;; *) echo 'cpu|a|(null)|1-00:00:00|(null)' ;; esac"
    job.program("squeue", f"{{ {shown}; }} >&3")
    job.program("scancel", 'echo "scancel $*"')
    job.program("evalspan", LATE)
    asks = {"SLURM_JOB_NAME": "evalspan-daemon", "SLURM_MEM_PER_NODE": "100"}
    process = job.start("evalspan-daemon.sbatch", "--wait", **asks)
    wait_until((job.folder / "ready").exists, "the daemon runs")
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "--wait" in str(job.calls()), "a successor is submitted")
    begun, submitted = job.calls()[:2]
    assert begun == "scontrol update jobid=24 starttime=now"
    said = {"--partition=cpu", "--account=a", "--time=1-00:00:00", "--mem=100", f"--output={job.folder}/said"}
    assert said <= set(submitted.split())
    assert not any(word.startswith(("--qos", "--constraint")) for word in submitted.split())
    if then == "scancel":
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: called_at_last in job.calls(), "the successor is cancelled")
    (job.folder / "end").touch()
    assert process.wait(timeout=120) == 0
    assert {*job.calls()[2:]} == {KEPT, *filter(None, [called_at_last])}


@pytest.mark.parametrize("script", ["evaluate.sbatch", "evalspan-daemon.sbatch"])
def test_a_job_without_evalspan_ends_at_once_and_says_what_to_set(job, script):
    missing = str(job.folder / "no" / "evalspan")
    assert job.start(script, "ckpt", "core", EVALSPAN_BIN=missing).wait(timeout=120) == 2
    assert f"this job finds no {missing}: set EVALSPAN_BIN=" in job.said()
    assert not job.calls()


@pytest.mark.parametrize(
    ("code", "seconds", "then"),
    [
        (1, 60, "job 8 goes on"),
        (137, 3600, "job 8 goes on"),
        (137, 3600, "it is queued again"),
        (1, 0, ""),
        (2, 3600, ""),
    ],
)
def test_a_daemon_that_dies_has_a_successor_unless_it_never_ran_or_the_settings_are_wrong(
    job, code, seconds, then
):
    """After its first minute any end but 2 is made up for, as before its time limit: by a successor, whose place no job takes
    that waits for a limit; where Slurm takes none, the job is queued again.
    """
    job.program("evalspan", f"exit {code}")
    job.program("sbatch", "echo sbatch; " + ("exit 1" if "queued" in then else "echo 8 >&3"))
    job.program(
        "squeue", f"case $* in *%k*) printf '%b' '{WAITING}' ;; *) echo 'cpu|a|b|1:00|(null)' ;; esac >&3"
    )
    # bash counts SECONDS on from there
    asks = {"SLURM_JOB_NAME": "evalspan-daemon", "SECONDS": str(seconds)}
    ended = job.start("evalspan-daemon.sbatch", **asks).wait(timeout=120)
    queued = then == "it is queued again"
    handed_over = ["sbatch", KEPT, *["scontrol requeue 7"] * queued] if then else []
    assert (ended, job.calls()[1:]) == (0 if queued else code, handed_over)
    assert then in job.said()
    assert (f"ended with exit code {code} after" in job.said()) == bool(then)


@pytest.fixture(scope="module")
def site():
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with dev_cluster(nodes=1, gpus=1, cpu_nodes=1, cpus=4) as cluster:
        yield cluster


def _furnish(site, model):
    """What a user has: a checkpoint, settings, the wrapper, and a program `evalspan`."""
    home = site.user_dir
    texts = {
        "evalspan.toml": 'work_dir = "work"\n[trial]\ndevice = "cpu"\n[cluster]\nkind = "slurm"\npartition = "gpu"\npoll_seconds = 1.0\n',
        "evalspan": f'#!/bin/sh\nexec {site.python} -m coordinator "$@"\n',
        "daemon.sbatch": (SCRIPTS / "evalspan-daemon.sbatch").read_text(),
    }
    for name, text in texts.items():
        site.run_as_user(["tee", home / name], input=text, check=True)
    site.run_as_user(["chmod", "755", home / "evalspan"], check=True)
    site.run_as_user(["mkdir", home / "step-5"], check=True)
    for file in model.iterdir():  # the user cannot read root's temporary folders
        shutil.copyfile(file, home / "step-5" / file.name)
        (home / "step-5" / file.name).chmod(0o644)


ASKS = """#!/bin/bash
trap '{python} -c "import os; from coordinator.base.signals import cancelled_by_slurm as c; print(c(os.environ))"; exit' TERM
echo ready
while :; do sleep 0.1; done
"""


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("command", "answer"),
    [("scancel", True), ("scontrol requeue", False), ("scancel --batch -s TERM", False)],
)
def test_only_scancel_is_taken_for_a_cancellation(site, command, answer):
    """Asked of a real Slurm at the moment of SIGTERM: a requeue and a mere signal leave the jobs to the next run."""
    name = command.replace(" ", "")
    script, log = site.user_dir / f"{name}.sh", site.user_dir / f"{name}.log"
    site.run_as_user(["tee", script], input=ASKS.format(python=site.python), check=True)
    argv = ["sbatch", "--parsable", "--requeue", "--mem=100", "-p", "cpu", f"--output={log}", script]
    job = site.run_as_user(argv, check=True).stdout.strip()
    wait_until(lambda: log.exists() and "ready" in log.read_text(), "the job runs")
    site.run_as_user([*command.split(), job], check=True)
    wait_until(lambda: {"True", "False"} & set(log.read_text().split()), "the job asks")
    assert str(answer) in log.read_text().split()
    site.run_as_user(["scancel", job])


@pytest.mark.slurm
@pytest.mark.model
def test_the_daemon_as_a_job_of_an_ordinary_user(site, tiny_model_dir):
    """It serves a submit; near its limit a successor takes over at once; a second one waits its turn. Cancelled it stays
    away, and the second takes the evaluation over and obeys a command.
    """
    _furnish(site, tiny_model_dir)
    program = site.user_dir / "evalspan"
    journals = (site.user_dir / "work").glob

    def events(kind):
        texts = [file.read_bytes() for file in journals("*/journal.jsonl")]
        # the last line may be half written
        return sum(json.loads(line)["kind"] == kind for text in texts for line in text.split(b"\n")[:-1])

    def daemon():
        argv = ["sbatch", "--parsable", "--mem=100", "-p", "cpu", "daemon.sbatch"]
        return site.run_as_user(argv, env={"EVALSPAN_BIN": str(program)}, check=True).stdout.strip()

    first = daemon()
    told = site.run_as_user(
        [program, "submit", "step-5", "--suite", "quickstart", "--json"], env={"NO_COLOR": "1"}, check=True
    )
    name = json.loads(told.stdout)["evaluation_id"]
    wait_until(lambda: events("accepted") == 1, "the evaluation is accepted")
    site.run_as_user(["scancel", "--batch", "--signal=USR1", first], check=True)
    wait_state(site, first, "COMPLETED")
    wait_until(lambda: events("restarted") == 1, "the successor has taken it up")
    listed = ["squeue", "--noheader", "--name=evalspan-daemon", "--format=%i"]
    (successor,) = site.run_as_user(listed, check=True).stdout.split()
    assert successor != first
    log = (site.user_dir / "evalspan-daemon.log").read_text()
    assert f"job {successor} goes on" in log
    second = daemon()
    assert (state(site, successor), state(site, second)) == ("RUNNING", "PENDING")
    site.run_as_user(["scancel", successor], check=True)
    wait_until(lambda: events("restarted") == 2, "the second daemon has taken it up")
    wait_state(site, successor, "CANCELLED")
    site.run_as_user([program, "cancel", name], check=True)
    ours = ["squeue", "--noheader", "--format=%j"]
    wait_until(lambda: site.run_as_user(ours).stdout.split() == ["evalspan-daemon"], "its jobs are gone")
    wait_until((site.user_dir / "work" / name / "results.json").exists, "its end is written")
    site.run_as_user(["scancel", second], check=True)
    wait_until(lambda: state(site, second) == "CANCELLED", "the second daemon has ended")
    wait_until(lambda: not site.job_pids(second), "its processes are gone")
