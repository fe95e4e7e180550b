"""Laws of what Slurm is given: bash reads a script back as exactly the argv and environment that went in."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.slurm_options import slurm_options

from coordinator.cluster import Job, RefusedError
from coordinator.cluster.job_environment import client_environment, submission_environment
from coordinator.cluster.sbatch_text import (
    batch_script,
    log_file,
    log_pattern,
    quote,
    sbatch_arguments,
)
from coordinator.config.checks import RESERVED, check_extra_args, check_gpu_request

# Any bytes but NUL, as Python holds file names; the odd ones often.
WORDS = st.one_of(
    st.binary(max_size=30).filter(lambda b: b"\0" not in b).map(os.fsdecode),
    st.text(alphabet="'\"\\$`! \n\r\t*?~#&|;<>(){}[]%é\u2028", max_size=20),
)


def run(script: str, **env: str) -> bytes:
    done = subprocess.run(
        ["bash"],
        input=script.encode(),
        capture_output=True,
        check=False,
        timeout=30,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@settings(max_examples=40)
@given(words=st.lists(WORDS, min_size=1, max_size=6), value=WORDS)
def test_bash_reads_back_every_argument_and_variable(words: list[str], value: str) -> None:
    """The script is printable ASCII, whatever the paths: sbatch takes no DOS line breaks, and locales differ."""
    program = 'printf "%s\\0" "$@" "$ODD"'
    job = Job(name="a", argv=("bash", "-c", program, "bash", *words), log="/l", env={"ODD": value})
    script = batch_script(job)
    assert all(c.isprintable() or c == "\n" for c in script)
    assert script.isascii()
    assert run(script).split(b"\0")[:-1] == [os.fsencode(w) for w in (*words, value)]


def test_a_jobs_log_has_the_mode_of_the_settings_whatever_the_umask(tmp_path: Path) -> None:
    job = Job(name="a", argv=("true",), log="/l")
    log = tmp_path / "log"
    with log.open("ab") as out:
        log.chmod(0o666)
        subprocess.run(["bash", "-c", batch_script(job, 0o640)], stdout=out, check=True)
    assert log.stat().st_mode & 0o777 == 0o640
    done = subprocess.run(["bash", "-c", batch_script(job)], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")  # no file: left alone


def test_an_argument_with_a_nul_is_our_own_bug() -> None:
    with pytest.raises(ValueError, match="NUL"):
        quote("a\0b")


def test_the_job_is_our_process_and_knows_its_index() -> None:
    """The shell is replaced, so a signal reaches us; outside of an array the index is 0."""
    job = Job(name="a", argv=("sh", "-c", "echo $$ $PPID $EVALSPAN_INDEX"), log="/l")
    own, parent, index = run(batch_script(job), SLURM_ARRAY_TASK_ID="7").split()
    assert (int(parent), index) == (os.getpid(), b"7")
    assert int(own) != os.getpid()
    assert run(batch_script(job)).split()[2] == b"0"


def test_the_arguments_say_all_that_a_job_needs() -> None:
    job = Job(
        name="es-1-trial-n1-a1",
        argv=("x",),
        log="/w/100%/l.%i.log",
        count=4,
        node="n1",
        gpus=2,
        cpus=3,
        memory_mb=500,
        time_limit_seconds=3601,
        comment="ev",
    )
    options = slurm_options(
        partition="gpu",
        cpu_partition="cpu",
        account="a",
        qos="q",
        nice=5,
        reservation="r",
        token="t",  # noqa: S106
        extra_args=("--x",),
    )
    arguments = sbatch_arguments(job, options)
    wanted = """--parsable --job-name=es-1-trial-n1-a1 --comment=t/ev --output=/w/100%%/l.%a.log --no-requeue
        --array=0-3 --nodelist=n1 --gres=gpu:2 --cpus-per-task=3 --mem=500M --time=61 --signal=B:TERM@60
        --partition=gpu --account=a --qos=q --nice=5 --reservation=r"""
    assert set(wanted.split()) <= set(arguments)
    assert arguments[-1] == "--x"


ALL = {"partition": "gpu", "cpu_partition": "cpu", "account": "all", "qos": "q", "extra_args": ("--x",)}
ROLES = {
    "precursor": {"partition": "shared", "qos": "tiny"},
    "trial": {"account": "gpus", "extra_args": ("--constraint=nvlink",)},
    "build": {"partition": "long"},
}
BIG = {"trial": {"partition": "big"}}
ON_GPU = {"node": "n1", "gpus": 1}
TRIAL = "--nodelist=n1 --gres=gpu:1 --partition=gpu --account=gpus --qos=q --x --constraint=nvlink"
SHOWN = re.compile(r"--(array|nodelist|exclude|gres|partition|account|qos|x|constraint)\b")


@pytest.mark.parametrize(
    ("roles", "fields", "asked"),
    [
        # CPU work goes to the CPU partition, unless it is a node's own
        ({}, {}, "--partition=cpu --account=all --qos=q --x"),
        ({}, {"node": "n1"}, "--nodelist=n1 --partition=gpu --account=all --qos=q --x"),
        ({}, {"gpus": 1}, "--gres=gpu:1 --partition=gpu --account=all --qos=q --x"),
        # nodes that launch nothing are excluded from jobs of no node
        ({}, {"exclude": ("c1", "c2")}, "--exclude=c1,c2 --partition=cpu --account=all --qos=q --x"),
        ({}, {"exclude": ("c1", "c2"), "node": "c1"}, "--nodelist=c1 --partition=gpu --account=all --qos=q --x"),
        ({}, ON_GPU | {"best_effort": True}, "--nodelist=n1 --gres=gpu:1 --partition=spare --account=all --qos=low --x"),
        ({}, {"time_limit_seconds": 60}, "--partition=cpu --account=all --qos=q --x"),
        # a role's arguments stand behind those of all jobs
        (ROLES, {"purpose": "stage", "node": "n1"}, "--nodelist=n1 --partition=shared --account=all --qos=tiny --x"),
        (ROLES, {"purpose": "trial"} | ON_GPU, TRIAL),
        (ROLES, {"purpose": "host"} | ON_GPU, TRIAL),
        (ROLES, {"purpose": "metric"}, "--partition=cpu --account=all --qos=q --x"),
        (ROLES, {"purpose": "build"}, "--partition=long --account=all --qos=q --x"),
        (ROLES, {"purpose": "convert"}, "--partition=long --account=all --qos=q --x"),
        # a precursor stands beside its trials
        (BIG, {"purpose": "stage", "node": "n1"}, "--nodelist=n1 --partition=big --account=all --qos=q --x"),
        (BIG, {"purpose": "metric", "node": "n1"}, "--nodelist=n1 --partition=gpu --account=all --qos=q --x"),
    ],
)  # fmt: skip
def test_each_job_asks_for_partition_account_qos_and_node_of_its_role(
    roles: dict[str, Any], fields: dict[str, Any], asked: str
) -> None:
    """And a short job is not told to end before it began: `--signal` may come a minute early."""
    options = slurm_options(**ALL, slurm=roles, borrow={"best_effort": "spare", "best_effort_qos": "low"})
    job = Job(name="a", argv=("x",), log="/l", **fields)
    said = sbatch_arguments(job, options)
    assert " ".join(a for a in said if SHOWN.match(a)) == asked
    assert any(a.startswith("--signal") for a in said) == (job.time_limit_seconds > 120)


def test_the_log_is_where_the_job_says() -> None:
    """The index counts in the file's name alone; a path that Slurm's pattern cannot say is refused."""
    array = Job(name="a", argv=("x",), log="/w%i/l.%i.%a", count=2)
    assert (log_pattern(array), log_file(array, 1)) == ("/w%%i/l.%a.%%a", "/w%i/l.1.%a")
    single = Job(name="a", argv=("x",), log="/w/l.%i")
    assert (log_pattern(single), log_file(single, 0)) == ("/w/l.0", "/w/l.0")
    with pytest.raises(RefusedError):
        log_pattern(Job(name="a", argv=("x",), log="/w\\x/l"))


def test_what_belongs_to_another_job_or_habit_is_not_handed_on() -> None:
    """A coordinator inside a Slurm job, or a user with SQUEUE_FORMAT, gets the same answers and jobs as any other."""
    inherited = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "1",
        "SLURM_MEM_PER_CPU": "9",
        "SQUEUE_FORMAT": "%i",
        "CUDA_VISIBLE_DEVICES": "3",
        "ROCR_VISIBLE_DEVICES": "3",
        "HIP_VISIBLE_DEVICES": "3",
        "ZE_AFFINITY_MASK": "3",
        "SLURM_CONF": "/c",
        "SBATCH_ACCOUNT": "a",
    }
    kept = client_environment(inherited, {"SLURM_CONF": "/d"})
    assert kept == {
        "PATH": "/bin",
        "SBATCH_ACCOUNT": "a",
        "SLURM_CONF": "/d",
        "SLURM_TIME_FORMAT": "%s",
        "LC_ALL": "C.UTF-8",
    }


def test_a_submission_carries_variables_that_are_named_and_no_secret_but_slurms_own_and_those_of_the_job() -> (
    None
):
    """A name that jobs need, a pattern of the settings, a secret by its full name; nothing else of the submitter."""
    names = "PATH HOME HF_HOME HF_TOKEN_PATH TOKENIZERS_PARALLELISM MODULEPATH EBROOTCUDA https_proxy BASH_FUNC_module%%"
    names += " NCCL_DEBUG LD_LIBRARY_PATH SBATCH_ACCOUNT EVALSPAN_WORK_DIR SITE_FLAG"
    plain = dict.fromkeys(names.split(), "seen")
    secret = dict.fromkeys(
        ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SITE_PASSWORD", "EVALSPAN_KEY", "WANDB_API_KEY"), "s"
    )
    other = {"MAIL": "m", "DATABASE_URL": "postgres://u:p@h/d", "SSH_AUTH_SOCK": "/s", "SLURM_JOB_ID": "1"}
    inherited = {**plain, **secret, **other, "SLURM_JWT": "j", "MINE": "s"}
    own = {"SLURM_JWT": "j", "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8", "SLURM_CONF": "/c"}

    def carried(*export: str, given: tuple[str, ...] = ()) -> dict[str, str]:
        return submission_environment(
            inherited, {"SLURM_CONF": "/c"}, export=export, secrets=("MINE",), given=given
        )

    assert carried("SITE_*") == {**plain, **own}
    assert carried("SITE_*", "WANDB_API_KEY", "MINE") == {**plain, **own, "WANDB_API_KEY": "s"}
    assert carried("SITE_*", given=("MINE", "HF_TOKEN")) == {**plain, **own, "MINE": "s", "HF_TOKEN": "s"}
    assert "unset SLURM_JWT" in batch_script(Job(name="a", argv=("true",), log="/l"))


@pytest.mark.parametrize("option", " ".join(RESERVED.values()).split())
def test_an_option_that_the_coordinator_needs_is_no_extra_argument(option: str) -> None:
    """In each form of sbatch: with a comment of another, all jobs of an evaluation would be lost from its listing."""
    long = [[f"--{option}=x"], [f"--{option}", "x"], [f"--{option[:-1]}=x"], ["--exclusive", f"--{option}"]]
    short = [[f"-{option}x"], [f"-{option}", "x"], [f"-Hs{option}"]]
    for words in long if len(option) > 1 else short:
        with pytest.raises(ValueError, match="options of sbatch but for -"):
            check_extra_args(tuple(words))
        with pytest.raises(ValueError, match="options of sbatch but for -"):
            check_gpu_request(shlex.join(["--gres=gpu:{n}", *words]))


@pytest.mark.parametrize(
    "words",
    [
        (), ("--exclusive",), ("--constraint=a100&ib",), ("-C", "a100"), ("--nice=7",), ("--time=1:00:00", "-t60"),
        ("--begin=now+1hour",), ("--mem=0", "--hint=nomultithread"), ("--account=a", "-Ab", "-qhigh"), ("--wait-all-nodes=1",),
    ],
)  # fmt: skip
def test_other_options_of_sbatch_are_the_sites_own(words: tuple[str, ...]) -> None:
    assert check_extra_args(words) == words
