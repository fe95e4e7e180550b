"""The `host` job: stages into its own memory, runs the node's trials as its children, then clears.

Rule: it serves nodes whose /dev/shm is private to a job, or that run one job at a time. Each trial is a process with its
share of the job's GPUs. SIGTERM is passed on; a trial that does not exit in time is killed. A trial that died without an
outcome is reported at once, so that its shard goes to another. The weights are cleared when all trials have ended. The exit
status is the worst of theirs. Called from `python -m evaljobs host`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from evaljobs.contract.names import GPU_VARIABLES, ROCR
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import HostSpec, TrialSpec
from evaljobs.contract.storage import make_file, write_outcome, write_record
from evaljobs.errors import JobError, OperatorError
from evaljobs.staging import precursor
from evaljobs.staging.capacity import short_of_memory
from evaljobs.staging.coordinator_lease import is_there

POLL_SECONDS = 0.2
STOP_SECONDS = 20.0  # seconds for trials to end; Slurm's KillWait of 30 s leaves the rest to clear


def gpus_of(environment: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the variables that name a trial's GPUs, and the job's GPUs.

    ROCm applies HIP's variable, or CUDA's if that is unset, to what ROCR's leaves, so restricting both would leave no GPU.
    """
    named = [n for n in GPU_VARIABLES if environment.get(n)]
    above = [n for n in named if n != ROCR] or named
    if not above:
        return (), ()
    gpus = environment[above[0]]
    return tuple(n for n in above if environment[n] == gpus), tuple(g for g in gpus.split(",") if g)


def share_gpus(gpus: Sequence[str], members: int, per_trial: int) -> list[str | None]:
    """Return the GPUs of each trial, `per_trial` of them; None if one trial has all of the job's.

    Raise OperatorError if there are too few: two trials on one GPU would run out of memory.
    """
    if per_trial == 0 or (not gpus and members == 1):
        return [None] * members
    if not gpus:
        raise OperatorError(
            f"no variable names the GPUs of this job ({', '.join(GPU_VARIABLES)}), so that its {members} trials "
            "cannot share them: have Slurm's gres.conf set one, or pass --slots 1 to `evalspan eval`"
        )
    if len(gpus) < members * per_trial:
        raise OperatorError(
            f"{members} trials of {per_trial} GPUs do not fit on the {len(gpus)} of this job: set gpus_per_trial"
        )
    return [",".join(gpus[i * per_trial : (i + 1) * per_trial]) for i in range(members)]


def main(spec: HostSpec) -> int:
    """Stage, run all trials, clear. Exit status 0, or 1 where a step failed."""
    paths = EvaluationPaths(spec.stage.evaluation_dir)
    with precursor.stopping_on_signals() as stop:
        try:
            variables, gpus = gpus_of(os.environ)
            shares = [
                {} if one is None else dict.fromkeys(variables, one)
                for one in share_gpus(gpus, len(spec.trial.lanes), spec.gpus_per_trial)
            ]
            holding = precursor.stage_only(spec.stage, stop=stop)
        except (JobError, OSError) as error:
            failed = precursor.staging_failure(error, name=spec.name, node=spec.stage.node, job="host")
            precursor.log_line(failed.error)
            write_outcome(paths, failed)
            return 1
        status, reason = 1, "the host failed"
        try:
            write_outcome(paths, holding.staged)
            status = _run_trials(spec, holding, shares, stop)
            reason = "terminated" if stop.is_set() else "its trials ended"
        finally:
            cleared = precursor.clear_weights(holding, reason)
        write_outcome(paths, cleared)
    return status


def _run_trials(
    spec: HostSpec,
    holding: precursor.StagedCheckpoint,
    shares: Sequence[Mapping[str, str]],
    stop: threading.Event,
) -> int:
    """Run the trials to completion and return the worst exit status."""
    paths = EvaluationPaths(spec.stage.evaluation_dir)
    place = paths.spec(f"{spec.name}.trial")
    write_record(place, spec.trial.model_copy(update={"model_path": holding.staged.path}))
    children: list[subprocess.Popen[bytes]] = []
    try:
        for index, devices in enumerate(shares):
            with os.fdopen(make_file(paths.logs / f"{spec.name}.{index}.log"), "ab") as output:
                child = subprocess.Popen(
                    [sys.executable, "-m", "evaljobs", "trial", str(place)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "EVALSPAN_INDEX": str(index), **devices},
                )
            children.append(child)
            gpus = next(iter(devices.values()), "-")
            precursor.log_line(f"trial {spec.trial.lanes[index].trial} is pid {child.pid}, GPUs {gpus}")
        reported: set[int] = set()
        while not stop.wait(POLL_SECONDS) and any(child.poll() is None for child in children):
            _report_dead(spec.trial, children, reported)
    finally:
        _end(children)
    _report_dead(spec.trial, children, set())
    return int(any(child.returncode for child in children))


def _report_dead(trial: TrialSpec, children: Sequence[subprocess.Popen[bytes]], reported: set[int]) -> None:
    """Write `Failed` for trials that died without an outcome; `reported`: indexes already done.

    A child that got SIGKILL in a job with out-of-memory kills died of that.
    """
    paths = EvaluationPaths(trial.evaluation_dir)
    for index, (lane, child) in enumerate(zip(trial.lanes, children, strict=False)):
        if index in reported or child.poll() is None:
            continue
        left = [is_there(paths.outcome(kind, lane.trial)) for kind in ("trial-ended", "failed")]
        if None in left and not any(left):
            continue  # storage does not answer: try again next time
        reported.add(index)
        if any(left):
            continue
        code = child.returncode
        killed, memory_mb = short_of_memory()
        short = bool(killed) and code == -signal.SIGKILL
        how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        how += " (lack of memory)" if short else ""
        error = f"{lane.trial} {how} without an outcome; see its log"
        precursor.log_line(error)
        write_outcome(
            paths,
            Failed(
                name=lane.trial,
                job="trial",
                blame="retry",
                error=error,
                node=trial.node,
                memory_mb=memory_mb if short else None,
            ),
        )


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate the trials that still run, and kill those that do not end in time."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
