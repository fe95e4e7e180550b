"""Laws of a Slurm that fails: commands of the user's PATH that do what was seen to go wrong, run for real.

The wrappers stand before the true commands, and pass on to them where there is a Slurm to pass on to.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dev_cluster.api import Cluster
from support.slurm_options import slurm_options

from coordinator.cluster import ClusterError, Job, JobState, LimitError, RefusedError
from coordinator.cluster.slurm_cli import SlurmCli
from coordinator.cluster.slurm_parse import NODE_FIELDS
from coordinator.cluster.slurm_rules import refusing, request_taken

# the header alone of what `sinfo` is asked for
NO_NODES = "\\037".join(NODE_FIELDS) + "\\036\\n"
JOB = Job(name="es-fault", argv=("true",), log="/dev/null", memory_mb=50, time_limit_seconds=600)


def wrapped(folder: Path, **more: object) -> SlurmCli:
    """A SlurmCli whose commands are those of `folder` where they are there."""
    path = f"{folder}:/usr/bin:/bin"
    if not (folder / "sinfo").exists():
        command(folder, "sinfo", f"printf '{NO_NODES}'")
    if not (folder / "scontrol").exists():
        command(folder, "scontrol", "echo AccountingStorageType = accounting_storage/none")
    return SlurmCli(
        slurm_options(**{"env": {"PATH": path}, "command_prefix": ("env", f"PATH={path}"), **more})
    )  # type: ignore[arg-type]


def command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def raised(call: Callable[[], object]) -> ClusterError:
    with pytest.raises(ClusterError) as caught:
        call()
    return caught.value


def test_a_command_that_hangs_is_ended_and_is_a_cluster_error(tmp_path: Path) -> None:
    """With the whole of its process group; no caller waits longer than the time limit for it."""
    place = tmp_path / "pid"
    place.touch()
    command(tmp_path, "sbatch", f"sh -c 'echo $$ > {place}; exec sleep 600'")
    for seconds in (0.5, 5.0, 50.0):  # longer where this machine was too slow to let it begin
        slurm = wrapped(tmp_path, timeout_seconds=seconds)
        error = raised(lambda slurm=slurm: slurm.submit(JOB))
        assert type(error) is ClusterError
        assert "timed out" in str(error)
        if place.read_text():
            break
    pid = int(place.read_text())
    end = time.monotonic() + 60
    while _runs(pid):
        assert time.monotonic() < end
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1", ClusterError),
        ("echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)' >&2; exit 1", ClusterError),
        ("echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1", RefusedError),
        ("echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; echo 'sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, ...)' >&2; exit 1", LimitError),
        ("exit 1", ClusterError),
        ("kill -9 $$", ClusterError),
        ("echo what is this", ClusterError),
        ("true", ClusterError),
    ],
)  # fmt: skip
def test_only_slurms_own_words_refuse_a_submission_or_name_a_limit(
    tmp_path: Path, script: str, kind: type[ClusterError]
) -> None:
    """Any other failure is a ClusterError: the job is looked up by its name before it is submitted again."""
    command(tmp_path, "sbatch", script)
    error = raised(lambda: wrapped(tmp_path).submit(JOB))
    assert type(error) is kind


@pytest.mark.parametrize(
    "script",
    [
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
        "exit 1",
        "true",
        "echo what is this",
        "head -c 4096 /dev/urandom",
        "printf 'ARRAY_JOB_ID\\037ARRAY'",
        "exec sleep 600",
    ],
)
def test_a_listing_that_fails_is_no_news(tmp_path: Path, script: str) -> None:
    """Whether it says so, prints garbage, half of an answer or nothing, or hangs: never "no jobs", never "no nodes"."""
    for name in ("squeue", "sinfo", "scancel"):
        command(tmp_path, name, script)
    slurm = wrapped(tmp_path, timeout_seconds=1.0)
    assert type(raised(slurm.jobs)) is ClusterError
    assert type(raised(slurm.nodes)) is ClusterError


def test_a_missing_command_is_told_by_name(tmp_path: Path) -> None:
    slurm = SlurmCli(slurm_options(command_prefix=(str(tmp_path / "missing"),)))
    for call in (slurm.jobs, slurm.nodes, lambda: slurm.cancel(["1"]), lambda: slurm.check(JOB)):
        assert "missing cannot be run" in str(raised(call))


def test_cancelling_that_fails_says_so(tmp_path: Path) -> None:
    """Ids that are gone are no failure; a thousand ids are one command."""
    command(
        tmp_path,
        "scancel",
        f"echo x >> {tmp_path}/calls; echo 'scancel: error: Kill job error on job id 1: Invalid job id specified' >&2; exit 1",
    )
    slurm = wrapped(tmp_path)
    slurm.cancel([str(i) for i in range(1000)])
    assert (tmp_path / "calls").read_text() == "x\n"
    slurm.cancel([])
    command(
        tmp_path,
        "scancel",
        "echo 'scancel: error: Kill job error on job id 1: Unable to contact slurm controller' >&2; exit 1",
    )
    assert "contact" in str(raised(lambda: slurm.cancel(["1"])))


def test_limits_are_asked_for_once_in_a_while_and_hold_while_accounting_is_away(tmp_path: Path) -> None:
    """MaxTime cuts a job though sacctmgr fails, and the next job asks neither again. Nothing is submitted before MaxTime
    is known: unknown is no freedom.
    """
    command(tmp_path, "scontrol", "echo 'slurm_load_partitions error: Socket timed out' >&2; exit 1")
    slurm = wrapped(tmp_path)
    assert "Socket timed out" in str(raised(lambda: slurm.within_limits(JOB)))
    shown = "*config) echo AccountingStorageType = accounting_storage/slurmdbd;; *) echo PartitionName=gpu Default=YES MaxTime=05:00;;"
    command(tmp_path, "scontrol", f'echo x >> {tmp_path}/calls; case "$*" in {shown} esac')
    command(tmp_path, "sacctmgr", f"echo x >> {tmp_path}/calls; echo 'error: Connection refused' >&2; exit 1")
    assert [slurm.within_limits(JOB).time_limit_seconds for _ in range(2)] == [300, 300]
    assert (tmp_path / "calls").read_text() == "x\n" * 4


# --- with a real Slurm behind the wrapper ------------------------------------------------------------------------------


@pytest.fixture
def faulty(slurm_site: Cluster) -> tuple[Path, SlurmCli, Path]:
    """A folder for wrappers before the user's PATH, the cluster seen through it, and a folder for logs."""
    folder = Path(slurm_site.user_dir) / uuid.uuid4().hex[:8]
    slurm_site.run_as_user(["mkdir", "-p", str(folder)], check=True)
    env = dict(slurm_site.user_env)
    env["PATH"] = f"{folder}:{env['PATH']}"
    prefix = (*slurm_site.user_argv(["env"]), f"PATH={env['PATH']}")
    options = slurm_options(
        partition="gpu", token=f"t-{folder.name}", command_prefix=prefix, env=env, timeout_seconds=60.0
    )
    return folder, SlurmCli(options), folder


def found(slurm: SlurmCli, name: str) -> list[JobState]:
    return [job for job in slurm.jobs() if job.name == name]


def true_path(name: str) -> str:
    path = shutil.which(name)
    assert path is not None
    return path


@pytest.mark.slurm
def test_a_submission_that_happened_and_timed_out_is_found_by_its_name(
    faulty: tuple[Path, SlurmCli, Path],
) -> None:
    """Fault 7: it is in the next listing, once, and with its id."""
    folder, slurm, logs = faulty
    command(folder, "sbatch", f'{true_path("sbatch")} "$@" > {folder}/id && exec sleep 600')
    for seconds in (3.0, 15.0, 75.0):  # longer where this machine was too slow to let it happen
        late = SlurmCli(replace(slurm.options, timeout_seconds=seconds))
        name = f"es-late-{seconds:g}"
        job = Job(name=name, argv=("sleep", "600"), log=str(logs / "l"), memory_mb=50, time_limit_seconds=600)
        assert type(raised(lambda late=late, job=job: late.submit(job))) is ClusterError
        if (folder / "id").read_text():
            break
    (state,) = found(slurm, name)
    assert state.job_id == (folder / "id").read_text().strip()
    assert state.phase in ("pending", "running")
    slurm.cancel([state.job_id])
    end = time.monotonic() + 60
    while any(j.phase != "ended" for j in found(slurm, name)):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slurm
def test_a_submission_works_after_three_that_failed(faulty: tuple[Path, SlurmCli, Path]) -> None:
    """Fault 7: none of the three left a job behind."""
    folder, slurm, logs = faulty
    fails = f"n=$(cat {folder}/n 2> /dev/null || echo 0); echo $((n + 1)) > {folder}/n"
    away = "echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    command(folder, "sbatch", f'{fails}\n[ "$n" -lt 3 ] && {{ {away}; }}\nexec {true_path("sbatch")} "$@"')
    folder.chmod(0o777)
    job = Job(name="es-3", argv=("true",), log=str(logs / "l"), memory_mb=50, time_limit_seconds=600)
    for _ in range(3):
        assert type(raised(lambda: slurm.submit(job))) is ClusterError
        assert found(slurm, "es-3") == []
    job_id = slurm.submit(job)
    assert [j.job_id for j in found(slurm, "es-3")] == [job_id]


@pytest.mark.slurm
def test_an_unknown_state_is_still_there(faulty: tuple[Path, SlurmCli, Path]) -> None:
    """Fault 8: a word that Slurm may learn tomorrow ends no job."""
    folder, slurm, logs = faulty
    job = Job(name="es-odd", argv=("true",), log=str(logs / "l"), memory_mb=50, time_limit_seconds=600)
    slurm.submit(job)
    command(
        folder,
        "squeue",
        f"{true_path('squeue')} \"$@\" | sed -E 's/(PENDING|RUNNING|COMPLET[A-Z]+|CONFIGURING)/HIBERNATING/'",
    )
    (state,) = found(slurm, "es-odd")
    assert (state.phase, state.state) == ("unknown", "HIBERNATING")


@pytest.mark.slurm
def test_a_frozen_controller_is_no_news_and_its_thaw_is_news(
    slurm_site: Cluster, faulty: tuple[Path, SlurmCli, Path]
) -> None:
    """Fault 3: every call comes back within its time limit; afterwards the jobs are as they were."""
    _, slurm, logs = faulty
    job = Job(name="es-ice", argv=("sleep", "600"), log=str(logs / "l"), memory_mb=50, time_limit_seconds=600)
    job_id = slurm.submit(job)
    quick = SlurmCli(replace(slurm.options, timeout_seconds=1.0))
    slurm_site.freeze_controller()
    try:
        for call in (
            quick.jobs,
            quick.nodes,
            lambda: quick.submit(job),
            lambda: quick.cancel([job_id]),
            lambda: quick.check(job),
        ):
            assert type(raised(call)) is ClusterError
    finally:
        slurm_site.thaw_controller()
    end = time.monotonic() + 60
    while True:  # the thawed controller may first work off what was cancelled, or submitted, when we gave up
        try:
            states = found(slurm, "es-ice")
            break
        except ClusterError:
            assert time.monotonic() < end
            time.sleep(0.2)
    assert job_id in {s.job_id for s in states}
    slurm.cancel([s.job_id for s in states])


def test_init_finds_the_form_of_request_that_a_site_takes(
    slurm_site: Cluster, faulty: tuple[Path, SlurmCli, Path]
) -> None:
    """The default one where the site takes it; none where the user may not use the partition at all."""
    _, slurm, _ = faulty

    def asking(form: str) -> SlurmCli:
        return SlurmCli(slurm_options(slurm.options, partition="gpu", slurm={"gpu_request": form}))

    def strict(form: str) -> SlurmCli:  # a site that wants a type: Slurm refuses what no node has
        return asking(form if "{type}" in form else form.replace("gpu:", "gpu:none:"))

    assert request_taken(asking) == "--gres=gpu:{n}"
    assert request_taken(strict) == "--gres=gpu:{type}:{n}"
    slurm_site.update("PartitionName=gpu", "AllowGroups=root")
    try:
        assert request_taken(asking) is None
    finally:
        slurm_site.update("PartitionName=gpu", "AllowGroups=ALL")


def test_a_partition_of_another_group_is_one_that_refuses(
    slurm_site: Cluster, faulty: tuple[Path, SlurmCli, Path]
) -> None:
    """Though listings with --all show its nodes, and its jobs would fit.

    Slurm 25.11 takes the job with EnforcePartLimits=NO and never starts it: such a partition counts
    as hidden.
    """
    _, slurm, _ = faulty
    ask = "from coordinator.cluster.slurm_rules import ask_rules; print([p.name for p in ask_rules().partitions if p.hidden])"
    version = slurm_site.run_as_user(["sinfo", "--version"]).stdout.split()[1]
    each = {n: SlurmCli(slurm_options(slurm.options, partition=n)) for n in ("gpu", "cpu")}
    assert refusing(each) == {}
    slurm_site.update("PartitionName=gpu", "AllowGroups=root")
    try:
        assert refusing(each).keys() == ({"gpu"} if version < "25.11" else set())
        done = slurm_site.run_as_user([slurm_site.python, "-c", ask], cwd=slurm_site.repo, check=True)
        assert "'gpu'" in done.stdout
    finally:
        slurm_site.update("PartitionName=gpu", "AllowGroups=ALL")
