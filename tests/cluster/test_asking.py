"""Laws of what Slurm is asked: scripts, arguments and environment of `sbatch`, nodes that the settings leave, GPU requests."""

import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_cluster import fake_node
from support.slurm_options import slurm_options

from coordinator.site.cluster import Job, RefusedError
from coordinator.site.cluster.daemon_job import daemon_job, sbatch_line
from coordinator.site.cluster.job_environment import client_environment, submission_environment
from coordinator.site.cluster.node_choice import apply_node_settings, in_hostlist, none_left, place_job
from coordinator.site.cluster.sbatch_text import (
    batch_script,
    gpu_arguments,
    log_file,
    log_pattern,
    quote_word,
    sbatch_arguments,
)
from coordinator.site.config.checks import (
    GPU_REQUEST,
    RESERVED,
    check_extra_args,
    check_gpu_request,
    check_hostlist,
)
from coordinator.site.config.schema import Config, NodesConfig, SlurmConfig

JOB = Job(name="a", argv=("true",), log="/l")

# --- the script ----------------------------------------------------------------------------------------------------------

# Any bytes but NUL, as Python holds file names; the odd ones often.
WORDS = st.one_of(
    st.binary(max_size=30).filter(lambda b: b"\0" not in b).map(os.fsdecode),
    st.text(alphabet="'\"\\$`! \n\r\t*?~#&|;<>(){}[]%é\u2028", max_size=20),
)


def run(script, **env):
    env = os.environ | env
    done = subprocess.run(
        ["bash"], input=script.encode(), capture_output=True, check=False, timeout=30, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@settings(max_examples=40)
@given(words=st.lists(WORDS, min_size=1, max_size=6), value=WORDS)
def test_bash_reads_back_every_argument_and_variable(words, value):
    """The script is printable ASCII, whatever the paths: sbatch takes no DOS line breaks, and locales differ."""
    program = 'printf "%s\\0" "$@" "$ODD"'
    script = batch_script(replace(JOB, argv=("bash", "-c", program, "bash", *words), env={"ODD": value}))
    assert all(c.isprintable() or c == "\n" for c in script)
    assert script.isascii()
    assert run(script).split(b"\0")[:-1] == [os.fsencode(w) for w in (*words, value)]
    with pytest.raises(ValueError, match="NUL"):
        quote_word(f"{words[0]}\0")


def test_a_jobs_log_has_the_mode_of_the_settings_whatever_the_umask(tmp_path):
    log = tmp_path / "log"
    with log.open("ab") as out:
        log.chmod(0o666)
        subprocess.run(["bash", "-c", batch_script(JOB, 0o640)], stdout=out, check=True)
    assert log.stat().st_mode & 0o777 == 0o640
    done = subprocess.run(["bash", "-c", batch_script(JOB)], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")  # no file: left alone


def test_the_job_is_our_process_and_knows_its_index():
    """The shell is replaced, so a signal reaches us; outside of an array the index is 0."""
    script = batch_script(replace(JOB, argv=("sh", "-c", "echo $$ $PPID $EVALSPAN_INDEX")))
    own, parent, index = run(script, SLURM_ARRAY_TASK_ID="7").split()
    assert (int(parent), index) == (os.getpid(), b"7")
    assert int(own) != os.getpid()
    assert run(script).split()[2] == b"0"


# --- the arguments -------------------------------------------------------------------------------------------------------

ALL = {"partition": "gpu", "cpu_partition": "cpu", "account": "all", "qos": "q", "extra_args": ("--x",)}
SPARE = {"best_effort": "spare", "best_effort_qos": "low"}
ROLES = {
    "precursor": {"partition": "shared", "qos": "tiny"},
    "trial": {"account": "gpus", "extra_args": ("--constraint=nvlink",)},
    "build": {"partition": "long"},
}
BIG = {"trial": {"partition": "big"}}
ON_GPU = {"node": "n1", "gpus": 1}
TRIAL = "--nodelist=n1 --gres=gpu:1 --partition=gpu --account=gpus --qos=q --x --constraint=nvlink"
SHOWN = re.compile(r"--(array|nodelist|exclude|gres|partition|account|qos|x|constraint)\b")


def test_the_arguments_say_all_that_a_job_needs():
    more = {
        "count": 4,
        "node": "n1",
        "gpus": 2,
        "cpus": 3,
        "memory_mb": 500,
        "time_limit_seconds": 3601,
        "comment": "ev",
    }
    job = Job(name="es-1-trial-n1-a1", argv=("x",), log="/w/100%/l.%i.log", **more)
    said = sbatch_arguments(job, slurm_options(**ALL, nice=5, reservation="r", token="t"))  # noqa: S106
    wanted = """--parsable --job-name=es-1-trial-n1-a1 --comment=t/ev --output=/w/100%%/l.%a.log --no-requeue
        --array=0-3 --nodelist=n1 --gres=gpu:2 --cpus-per-task=3 --mem=500M --time=61 --signal=B:TERM@60
        --partition=gpu --account=all --qos=q --nice=5 --reservation=r"""
    assert set(wanted.split()) <= set(said)
    assert said[-1] == "--x"


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
def test_each_job_asks_for_partition_account_qos_and_node_of_its_role(roles, fields, asked):
    """And a short job is not told to end before it began: `--signal` may come a minute early."""
    job = replace(JOB, **fields)
    said = sbatch_arguments(job, slurm_options(**ALL, slurm=roles, borrow=SPARE))
    assert " ".join(a for a in said if SHOWN.match(a)) == asked
    assert any(a.startswith("--signal") for a in said) == (job.time_limit_seconds > 120)


def test_the_daemons_line_asks_for_partition_account_and_qos_of_all_jobs():
    """Its small job has a name of its work folder: Slurm's singleton is by user and job name. How its time is cut:
    `test_reading.py`."""
    script = Path(__file__).parents[2] / "scripts" / "evalspan-daemon.sbatch"
    for digest, seconds, time in (("1a2b", 86_400, "1-00:00:00"), ("3c4d", 1080, "0:18:00")):
        options = slurm_options(**ALL, slurm=ROLES, token=f"evalspan:work:{digest}")
        job = replace(daemon_job(options), time_limit_seconds=seconds)
        said = sbatch_line(job, options, script, " --config x")
        assert said == f"sbatch -p cpu -A all -q q -t {time} -J evalspan-daemon-{digest} {script} --config x"
        assert (job.cpus, job.memory_mb, job.gpus) == (1, 1024, 0)
    assert {"#SBATCH --cpus-per-task=1", "#SBATCH --mem=1G"} <= set(script.read_text().splitlines())


def test_the_log_is_where_the_job_says():
    """The index counts in the file's name alone; a path that Slurm's pattern cannot say is refused."""
    array = replace(JOB, log="/w%i/l.%i.%a", count=2)
    assert (log_pattern(array), log_file(array, 1)) == ("/w%%i/l.%a.%%a", "/w%i/l.1.%a")
    single = replace(JOB, log="/w/l.%i")
    assert (log_pattern(single), log_file(single, 0)) == ("/w/l.0", "/w/l.0")
    with pytest.raises(RefusedError):
        log_pattern(replace(JOB, log="/w\\x/l"))


@pytest.mark.parametrize("option", " ".join(RESERVED.values()).split())
def test_an_option_that_the_coordinator_needs_is_no_extra_argument(option):
    """In each form of sbatch: with a comment of another, all jobs of an evaluation would be lost from its listing."""
    long = [[f"--{option}=x"], [f"--{option}", "x"], [f"--{option[:-1]}=x"], ["--exclusive", f"--{option}"]]
    short = [[f"-{option}x"], [f"-{option}", "x"], [f"-Hs{option}"]]
    for words in long if len(option) > 1 else short:
        with pytest.raises(ValueError, match="options of sbatch other than -"):
            check_extra_args(tuple(words))
        with pytest.raises(ValueError, match="options of sbatch other than -"):
            check_gpu_request(shlex.join(["--gres=gpu:{n}", *words]))


OTHER_OPTIONS = (
    "", "--exclusive", "--constraint=a100&ib", "-C a100", "--nice=7", "--time=1:00:00 -t60", "--begin=now+1hour",
    "--mem=0 --hint=nomultithread", "--account=a -Ab -qhigh", "--wait-all-nodes=1",
)  # fmt: skip


def test_other_options_of_sbatch_are_the_sites_own():
    for words in OTHER_OPTIONS:
        assert check_extra_args(tuple(words.split())) == tuple(words.split())


# --- the environment -----------------------------------------------------------------------------------------------------


def test_what_belongs_to_another_job_or_habit_is_not_handed_on():
    """A coordinator inside a Slurm job, or a user with SQUEUE_FORMAT, gets the same answers and jobs as any other."""
    others = "SLURM_JOB_ID SLURM_MEM_PER_CPU SQUEUE_FORMAT CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES"
    inherited = dict.fromkeys(f"{others} ZE_AFFINITY_MASK SLURM_CONF".split(), "x")
    own = {"PATH": "/bin", "SBATCH_ACCOUNT": "a"}
    kept = client_environment(inherited | own, {"SLURM_CONF": "/d"})
    assert kept == own | {"SLURM_CONF": "/d", "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}


def test_a_submission_carries_variables_that_are_named_and_no_secret_but_slurms_own_and_those_of_the_job():
    """A name that jobs need, a pattern of the settings, a secret by its full name; nothing else of the submitter."""
    names = "PATH HOME HF_HOME HF_TOKEN_PATH TOKENIZERS_PARALLELISM MODULEPATH EBROOTCUDA https_proxy BASH_FUNC_module%%"
    names += " NCCL_DEBUG LD_LIBRARY_PATH SBATCH_ACCOUNT EVALSPAN_WORK_DIR SITE_FLAG"
    seen = dict.fromkeys(names.split(), "seen")
    secrets = "HF_TOKEN AWS_SECRET_ACCESS_KEY SITE_PASSWORD EVALSPAN_KEY WANDB_API_KEY MINE"
    other = {"MAIL": "m", "DATABASE_URL": "postgres://u:p@h/d", "SSH_AUTH_SOCK": "/s", "SLURM_JOB_ID": "1"}
    inherited = {**seen, **dict.fromkeys(secrets.split(), "s"), **other, "SLURM_JWT": "j"}
    seen |= {"SLURM_JWT": "j", "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8", "SLURM_CONF": "/c"}
    for export, given_, carried in (
        (("SITE_*",), (), ()),
        (("SITE_*", "WANDB_API_KEY", "MINE"), (), ("WANDB_API_KEY",)),
        (("SITE_*",), ("MINE", "HF_TOKEN"), ("MINE", "HF_TOKEN")),
    ):
        found = submission_environment(
            inherited, {"SLURM_CONF": "/c"}, export=export, secrets=("MINE",), given=given_
        )
        assert found == seen | dict.fromkeys(carried, "s")
    assert "unset SLURM_JWT" in batch_script(JOB)


# --- nodes and GPUs ------------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 120)


@st.composite
def entries(draw):
    """An entry of a hostlist, and the names that it stands for by Slurm's rules."""
    text, names = "", {""}
    for _ in range(draw(st.integers(1, 2))):
        word = draw(st.sampled_from(["n", "gpu-", "rack1n", "a.b"]))
        text, names = text + word, {name + word for name in names}
        if draw(st.booleans()):
            first, more = draw(NUMBERS), draw(st.integers(0, 12))
            written = str(first).zfill(draw(st.integers(1, 4)))
            numbers = [str(n).zfill(len(written)) for n in range(first, first + more + 1)]
            text += f"[{written}-{first + more}]" if more else f"[{written}]"
            names = {name + number for name in names for number in numbers}
    return text, names


@given(st.lists(entries(), min_size=1, max_size=3), st.data())
def test_a_hostlist_names_exactly_the_nodes_that_it_stands_for(drawn, data):
    """Without a list of them: there may be a billion."""
    text = check_hostlist(",".join(entry for entry, _ in drawn))
    named = set().union(*(names for _, names in drawn))
    assert all(in_hostlist(name, text) for name in named)
    near = data.draw(st.sampled_from(sorted(named)))
    other = data.draw(st.sampled_from([near + "0", near[:-1], "0" + near, re.sub(r"\d", "7", near, count=1)]))
    assert in_hostlist(other, text) == (other in named)
    assert in_hostlist("n999999999", "n[0-999999999]")


@st.composite
def fleets(draw):
    kinds = st.sampled_from(["", "a100", "H100", "a100+h100"])
    features = st.lists(st.sampled_from(["nvlink", "big"]), unique=True).map(tuple)
    return [
        replace(fake_node(f"n{i}", gpus=draw(st.sampled_from([0, 4, 8]))), gpu_type=draw(kinds), features=draw(features))
        for i in range(draw(st.integers(1, 5)))
    ]  # fmt: skip


CHOICES = st.builds(
    NodesConfig,
    include=st.sampled_from([(), ("n[0-2]",), ("n0", "n4")]),
    exclude=st.sampled_from([(), ("n[1-3]",), ("n0,n9",)]),
    gpu_types=st.sampled_from([(), ("a100",), ("A100", "h100")]),
    features=st.sampled_from([(), ("nvlink",), ("nvlink", "big")]),
)


@given(fleets(), CHOICES, st.sampled_from([GPU_REQUEST, "--gres=gpu:{type}:{n}"]))
def test_a_job_that_names_no_node_avoids_exactly_the_nodes_that_are_not_offered(fleet, choice, request_):
    """One decision for offers and submissions; CPU nodes are subject to `exclude` alone. Where no node is left, one line
    names the settings that leave none."""
    nodes = [
        apply_node_settings(n, Config(nodes=choice, slurm=SlurmConfig(gpu_request=request_))) for n in fleet
    ]
    excluded = {n.name for n in nodes if n.excluded}
    assert set(place_job(JOB, nodes).exclude) == excluded
    assert set(place_job(replace(JOB, exclude=("n0",)), nodes).exclude) == {"n0", *excluded}
    assert place_job(replace(JOB, node="n0"), nodes).exclude == ()
    for node in nodes:
        assert node.usable is not bool(node.excluded)
        named = choice.exclude and any(in_hostlist(node.name, hosts) for hosts in choice.exclude)
        if not node.gpus:
            assert bool(node.excluded) == bool(named)
        elif not node.excluded:
            assert not named
            assert not choice.include or any(in_hostlist(node.name, hosts) for hosts in choice.include)
            assert not choice.gpu_types or node.gpu_type
            assert set(choice.features) <= set(node.features)
            assert "{type}" not in request_ or node.gpu_type in ("a100", "H100")
    said, with_gpus = none_left(nodes), [n for n in nodes if n.gpus]
    assert bool(said) == bool(with_gpus and all(n.excluded for n in with_gpus))
    assert "\n" not in said
    assert all(node.excluded in said for node in with_gpus if said)


REQUESTS = st.lists(
    st.sampled_from(["--gres=gpu:{n}", "--gres=gpu:{type}:{n}", "-G {n}", "--constraint='a b'"]),
    min_size=1,
    max_size=3,
).filter(lambda words: any("{n}" in w for w in words))


@given(n=st.integers(1, 16), kind=st.sampled_from(["a100", "nvidia_a100_1g.5gb", ""]), words=REQUESTS)
def test_a_gpu_request_becomes_arguments_word_by_word(n, kind, words):
    """Every {n} and {type} is filled in; quotation marks are a shell's. A type that no listing names is the node's
    refusal, never "--gres=gpu::2"."""
    template = check_gpu_request(" ".join(words))
    job = replace(JOB, gpus=n, gpu_type=kind, node="n1")
    assert gpu_arguments(replace(job, gpus=0), template) == []
    if not kind and "{type}" in template:
        with pytest.raises(RefusedError, match=r"\[slurm\] gpu_request .* Gres of n1 has none") as caught:
            gpu_arguments(job, template)
        assert caught.value.of_node
        return
    said = gpu_arguments(job, template)
    assert not any(mark in word for word in said for mark in "{}'")
    assert " ".join(said) == " ".join(words).replace("{n}", str(n)).replace("{type}", kind).replace("'", "")
