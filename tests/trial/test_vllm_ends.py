"""However a trial with vLLM ends, none of its processes and no byte of its shared memory is left.

Two workers of tensor parallelism of the fake (support/fake_vllm), which by themselves outlive a trial that is killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dev_cluster import procs
from dev_cluster.testing import wait_until

from evaljobs.contract.outcomes import TrialEnded
from evaljobs.contract.specs import LaneSpec, ModelOptions, TrialSpec
from evaljobs.contract.storage import read_record, write_record
from evaljobs.queue.redis_client import Link
from evaljobs.queue.work_queue import WorkQueue
from evaljobs.staging import segments

FAKE = Path(__file__).resolve().parents[1] / "support" / "fake_vllm"
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.model


class Running:
    """A trial on two "GPUs" that has loaded its model, or hangs while it does; its queue has not been filled."""

    def __init__(self, work, model, name, folder, *, hangs=False):
        self.paths = work.evaluation(name)
        self.queue = WorkQueue(Link(work.redis_address), name)
        options = ModelOptions(engine="vllm", model_args={"tensor_parallel_size": 2}, threads=1)
        spec = TrialSpec(
            name="trial",
            evaluation_dir=str(self.paths.root),
            evaluation_id=name,
            node="here",
            model_path=str(model),
            model=options,
            batch_size=2,
            request_sets={},
            redis_file=str(work.redis_address),
            lanes=(LaneSpec(lane="lane0", trial="trial.0"),),
        )
        write_record(self.paths.spec("trial"), spec)
        self._log = folder / "fake.jsonl"
        more = {"FAKE_VLLM_LOG": str(self._log), "PYTHONPATH": f"{FAKE}{os.pathsep}{ROOT}"}
        more |= {"FAKE_VLLM_HANGS": "1"} if hangs else {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "evaljobs", "trial", str(self.paths.spec("trial"))],
            env={**os.environ, **more},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until(lambda: self.loaded() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()[1]
        if not hangs:
            # it waits for its first shard
            wait_until(lambda: self.queue.snapshot().trials["trial.0"].phase == "infer")
        self.family = segments.process_family(self.process.pid)
        assert len(self.loaded()["workers"]) == 2
        assert set(self.loaded()["workers"]) < set(self.family)

    def loaded(self):
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return next((line for line in map(json.loads, lines) if "loaded" in line), {})

    def names(self):
        """Its segments that have a name in /dev/shm."""
        return [name for name in self.loaded()["segments"] if (segments.FOLDER / name).exists()]

    def end(self):
        """Of the test, should a law not hold."""
        for pid in self.family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def gone(self):
        self.process.poll()
        return not any(map(procs.identify, self.family))


@pytest.fixture
def running(shared_work, tiny_model_dir, tmp_path, request):
    made = Running(shared_work, tiny_model_dir, request.node.name, tmp_path)
    yield made
    made.end()


def test_a_killed_trials_workers_end_with_it_and_its_memory_has_no_name(running):
    """SIGKILL of the trial alone: the kernel kills its workers, and frees what no process has mapped any more."""
    assert len(running.loaded()["segments"]) == 4
    assert not running.names()
    running.process.kill()
    wait_until(running.gone)
    assert not running.names()


def test_a_terminated_trial_ends_its_workers_and_writes_its_outcome(running):
    running.process.send_signal(signal.SIGTERM)
    log = running.process.communicate(timeout=60)[1]
    assert running.process.returncode == 0, log
    assert "Traceback" not in log
    assert read_record(running.paths.outcome("trial-ended", "trial.0"), TrialEnded).reason == "terminated"
    wait_until(running.gone)
    assert not running.names()


def test_memory_of_a_trial_that_was_killed_while_it_loaded_is_swept(shared_work, tiny_model_dir, tmp_path):
    """All of its processes get SIGKILL at once, as from Slurm, before its segments lose their names."""
    running = Running(shared_work, tiny_model_dir, "loads", tmp_path, hangs=True)
    assert len(running.names()) == 4
    segments.sweep_segments()
    assert len(running.names()) == 4  # they are in use
    for pid in running.family:
        os.kill(pid, signal.SIGKILL)
    wait_until(running.gone)
    segments.sweep_segments()  # another job's may have come first
    assert not running.names()
