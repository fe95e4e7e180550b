"""What jobs request from the cluster: memory based on the checkpoint's size, time limits based on predictions. Pure.

Rule: memory follows from safetensors headers, the config and lm-eval's arguments. If these do not determine the size of the
loaded weights, or a GPU's memory is unknown, nothing is refused. After an out-of-memory kill, jobs of the same kind request
twice as much, up to three times per setting and at most what the largest node has beside the weights. Until then the kill
counts against no node, shard or task, and not as one of a job's tries. Time limits fit jobs into gaps of the cluster's queue.
They never exceed the settings, which apply where nothing was predicted. Called from: `job_specs`, the subjects that see jobs
end, node offers, and the checks before submission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TypedDict

from coordinator.base.words import first_of
from coordinator.decide.evaluation.records import EvaluationRecord, RunOptions
from coordinator.decide.evaluation.state import JobInfo, State
from coordinator.site.cluster import NodeState, Purpose
from evaljobs.contract.engine_traits import ENDPOINT
from evaljobs.contract.names import HF_ENGINES
from evaljobs.contract.specs import CheckpointSpec, ModelOptions, Weights
from priors.hardware import memory_bytes

MIB = 1 << 20
GB = 10**9
GPU_RESERVE_BYTES = GB
"""Reserved on each GPU for the CUDA context and the smallest batch; weights may take the rest."""
POWER_OF_TWO_ENGINES = ("vllm", "sglang")  # engines that split each layer over a power of two of GPUs
DTYPE_BYTES = {"float64": 8, "double": 8, "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
"""Bytes of a weight by torch's name of its dtype."""
STORED_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a stored weight by safetensors' dtype name; loading converts only these."""
SHRINKING_ARGUMENTS = (
    *("load_in_4bit", "load_in_8bit", "quantization_config", "autogptq", "gptqmodel", "gguf_file"),
    *("max_cpu_memory", "quantization", "cpu_offload_gb", "load_format"),
)
"""Arguments that make an engine quantise weights while loading, or keep some of them off the GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Host memory: bytes of the checkpoint's files, and MiB of a trial on top of its base."""

    files: int = 0
    own_mb: int = 0


NO_CHECKPOINT = Footprint()


def footprint_of(record: EvaluationRecord) -> Footprint:
    """Return what this evaluation's jobs request because of its checkpoint."""
    own = own_bytes(record.checkpoint, record.model)
    return Footprint(files=record.checkpoint.bytes, own_mb=ceil(own / MIB))


def own_bytes(checkpoint: CheckpointSpec, model: ModelOptions) -> int:
    """Return the bytes of weights that count towards a trial's own memory.

    Files in node memory are mapped, and count towards the precursor. On a GPU only tensors being converted and copied count;
    on a CPU all weights do, since conversion and merging copy them.
    """
    if model.engine == ENDPOINT:
        return 0
    stored, cpu = checkpoint.weights, (model.device or "").startswith("cpu")
    if stored is None:
        return checkpoint.bytes if cpu else max((f.size for f in checkpoint.files), default=0)
    loaded = loaded_bytes(stored, model)
    loaded = stored.bytes if loaded is None else loaded
    return loaded if cpu else ceil(stored.largest * max(1.0, loaded / max(1, stored.bytes)))


def loaded_bytes(stored: Weights, model: ModelOptions) -> int | None:
    """Return the bytes of the weights as the engine loads them; None if its arguments or name do not determine that."""
    given, by_hand = model.model_args, isinstance(model.model_args.get("device_map"), Mapping)
    if (
        model.engine not in (*HF_ENGINES, *POWER_OF_TWO_ENGINES)
        or by_hand
        or any(given.get(name) for name in SHRINKING_ARGUMENTS)
    ):
        return None
    dtype = str(given.get("dtype", "auto")).removeprefix("torch.")
    if stored.quantized or (dtype == "auto" and stored.dtype is None):
        return stored.bytes
    if dtype == "auto":
        dtype = str(stored.dtype)
        if model.engine in POWER_OF_TWO_ENGINES and dtype == "float32":
            dtype = "float16"
    width = DTYPE_BYTES.get(dtype)
    if width is None:
        return None
    return sum(
        size // STORED_DTYPE_BYTES[d] * width if d in STORED_DTYPE_BYTES else size
        for d, size in stored.sizes.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """What a trial's GPUs must hold: `weights` bytes on `gpus` GPUs. `weights` 0: unknown."""

    weights: int = 0
    stored: int = 0  # bytes of the weights in the checkpoint
    gpus: int = 1
    doubling: bool = False  # the engine only takes powers of two of GPUs
    gpu_gb: Mapping[str, float] = field(default_factory=dict)  # [nodes] gpu_memory_gb: (part of) a type -> GB

    def memory(self, node: NodeState) -> int | None:
        """Return the bytes of one GPU of the node (the largest type), or None if unknown."""
        sizes = [self._memory_of(name) for name in node.gpu_type.lower().split("+")]
        return None if None in sizes else max(filter(None, sizes))

    def _memory_of(self, gpu_type: str) -> int | None:
        named = max((key for key in self.gpu_gb if key.lower() in gpu_type), key=len, default=None)
        return memory_bytes(gpu_type) if named is None else int(self.gpu_gb[named] * GB)

    def holds(self, node: NodeState) -> bool:
        """Return False only if the GPUs of a trial on this node are certainly too small for the weights."""
        memory = self.memory(node)
        return memory is None or self.weights <= self.gpus * (memory - GPU_RESERVE_BYTES)

    def least(self, node: NodeState) -> int | None:
        """Return the fewest GPUs of this node that hold the weights; None if all of them do not, or it is unknown."""
        memory = self.memory(node)
        if memory is None or memory <= GPU_RESERVE_BYTES:
            return None
        count = max(1, ceil(self.weights / (memory - GPU_RESERVE_BYTES)))
        count = 1 << (count - 1).bit_length() if self.doubling else count
        return count if count <= node.gpus else None

    def refusal(self, nodes: Sequence[NodeState]) -> str:
        """Return why no trial could load the weights and what to change; "" if some node's GPUs may hold them."""
        nodes = [n for n in nodes if n.gpus and not n.excluded]
        able = [n for n in nodes if n.gpus >= self.gpus]
        if not able or any(self.holds(n) for n in able):
            return ""
        nodes = [n for n in nodes if self.memory(n) is not None]  # the others are unknown
        has = first_of(list(dict.fromkeys(f"{n.gpus} x {self._kind(n)}" for n in nodes)), 3)
        enough = [(least, n.name) for n in nodes if (least := self.least(n)) is not None]
        wider = f" ({self.stored / GB:.1f} GB in the checkpoint)" if self.weights > self.stored > 0 else ""
        said = f"the weights take {self.weights / GB:.1f} GB of GPU memory{wider}, and"
        wrong = "where a GPU has more memory, say so by [nodes] gpu_memory_gb"
        if not enough:
            return (
                f"{said} all GPUs of a node together do not hold them (nodes have {has}): choose a partition with larger GPUs, "
                f"or a smaller dtype in [trial] model_args; {wrong}"
            )
        return (
            f"{said} a trial's {self.gpus} GPU{'s do' if self.gpus > 1 else ' does'} not hold them (nodes have {has}): "
            f"set [trial] gpus_per_trial = {min(enough)[0]}, which {min(enough)[1]} has; {wrong}"
        )

    def left_out(self, nodes: Sequence[NodeState]) -> str:
        """Return a warning that names nodes whose GPUs are too small to get trials; "" if there are none."""
        small = [n for n in nodes if n.gpus >= self.gpus and not n.excluded and not self.holds(n)]
        if not small:
            return ""
        named = first_of([f"{n.name} ({self._kind(n)})" for n in small], 3)
        more = [least for n in small if (least := self.least(n)) is not None]
        hint = f"; [trial] gpus_per_trial = {max(more)} would use them" if more else ""
        return f"without {named}: GPUs too small for weights of {self.weights / GB:.1f} GB{hint}"

    def _kind(self, node: NodeState) -> str:
        return f"{node.gpu_type} of {(self.memory(node) or 0) / GB:.0f} GB"


UNKNOWN_NEED = GpuNeed()


def gpu_need(record: EvaluationRecord) -> GpuNeed:
    """Return what this evaluation's trials need of GPUs; unknown if they run on CPUs."""
    options, model, stored = record.options, record.model, record.checkpoint.weights
    on_cpu = (model.device or "").startswith("cpu")
    weights = None if stored is None or on_cpu else loaded_bytes(stored, model)
    return GpuNeed(
        weights=weights or 0,
        stored=0 if stored is None else stored.bytes,
        gpus=options.trial.gpus_per_trial,
        doubling=model.engine in POWER_OF_TWO_ENGINES,
        gpu_gb=options.gpu_memory_gb,
    )


# --- what jobs ask for -------------------------------------------------------------------------------------------------

BASE_MEMORY_MB = (
    4096  # MiB of a build, or of a trial without weights: Python, torch, lm-eval, the requests of a task
)
PRECURSOR_SLACK = 1.25  # memory of a precursor, as a multiple of the checkpoint's bytes


class JobResources(TypedDict):
    """What each member of a job requests from the cluster."""

    gpus: int
    cpus: int
    memory_mb: int
    time_limit_seconds: int


def job_resources(
    purpose: Purpose, options: RunOptions, size: Footprint = NO_CHECKPOINT, lanes: int = 1
) -> JobResources:
    """Return the most that a job of this purpose requests; predictions may lower the time. `size`: of the checkpoint that it
    converts, stages or loads; `lanes`: trials that a host runs. Submission lowers times beyond a partition's MaxTime.
    """
    own = options.trial.memory_mb or BASE_MEMORY_MB
    trial = (options.trial.memory_mb or BASE_MEMORY_MB + size.own_mb) + options.engine_memory_mb
    precursor = max(int(size.files * PRECURSOR_SLACK / MIB) + 512, options.stage_memory_mb)
    convert = options.convert_memory_mb or size.files * 2 // MIB + 4096
    gpus, cpus, seconds = options.trial.gpus_per_trial, options.trial.cpus, options.trial.time_limit_seconds
    what: dict[Purpose, tuple[int, int, int, int]] = {
        "build": (0, cpus, own, 4 * 3600),
        "convert": (0, cpus, convert, 4 * 3600),
        "stage": (0, 1, precursor, seconds + 1800),
        "host": (gpus * lanes, cpus * lanes, trial * lanes + precursor, seconds),
        "trial": (gpus, cpus, trial, seconds),
        "metric": (0, options.metric.cpus, options.metric.memory_mb, seconds + 3600),
    }
    gpus, cpus, memory_mb, seconds = what[purpose]
    return JobResources(gpus=gpus, cpus=cpus, memory_mb=memory_mb, time_limit_seconds=seconds)


def precursor_memory_mb(record: EvaluationRecord) -> int:
    """Return what a precursor requests of a node."""
    return job_resources("stage", record.options, footprint_of(record))["memory_mb"]


def trial_memory_mb(record: EvaluationRecord) -> int:
    """Return what a trial requests of a node on top of its precursor."""
    return job_resources("trial", record.options, footprint_of(record))["memory_mb"]


# --- more memory -------------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = "OUT_OF_MEMORY"  # Slurm's state of a job with a process killed for lack of memory
MAX_DOUBLINGS = 3  # per setting, until the evaluation ends or is retried
LEAST_MORE = 1.1  # smallest increase worth a retry
# purpose -> the setting that decides its memory; "": none
_SETTINGS: Mapping[Purpose, str] = {
    "build": "[trial] memory_mb",
    "trial": "[trial] memory_mb",
    "host": "[trial] memory_mb",
    "metric": "[metric] memory_mb",
    "convert": "[checkpoint] convert_memory_mb",
    "stage": "",
}


def out_of_memory_words(state: State, purpose: Purpose, who: str) -> str:
    """Return an error that names the setting to raise, for a job that cannot request more."""
    setting = _SETTINGS[purpose]
    has, more = _now(state, purpose), _more(state, purpose)
    said = f"the kernel ended {who} for lack of memory: it had {has} MB"
    if more <= LEAST_MORE * has:
        largest = f"no node has more than {state.nodes.largest_mb} MB for it and the weights"
        return f"{said}, and {largest}: choose larger nodes by [cluster] partition, or a smaller batch_size"
    return f"{said}; set {setting} = {more}" if setting else said


def job_gets_more(state: State, info: JobInfo) -> bool:
    """Return whether the next job of this kind requests more memory, after the kernel killed this one."""
    lanes = len(info.lanes) if info.job.purpose == "host" else 1
    return gets_more(state, info.job.purpose, info.job.name, had_mb=info.job.memory_mb, lanes=max(1, lanes))


def gets_more(state: State, purpose: Purpose, who: str, *, had_mb: int, lanes: int = 1) -> bool:
    """Return whether the next job of this purpose requests more, after the kernel killed one that had `had_mb` MiB."""
    options, size = state.record.options, footprint_of(state.record)
    if 2 * job_resources(purpose, options, size, lanes)["memory_mb"] > 3 * had_mb:
        return True  # raised since by another job's end; a site may grant somewhat more than requested
    setting = _SETTINGS[purpose]
    has, more = _now(state, purpose), _more(state, purpose, lanes)
    if more <= LEAST_MORE * has:
        return False
    if state.jobs.doublings.get(setting, 0) >= MAX_DOUBLINGS:
        return False
    state.jobs.doublings[setting] = state.jobs.doublings.get(setting, 0) + 1
    state.record = state.record.model_copy(update={"options": _raised(options, purpose, more)})
    advice = f": set {setting} = {more} for later evaluations" if setting else ""
    state.warnings.append(
        f"the kernel ended {who} for lack of memory: it had {has} MB, and the next asks for {more} MB{advice}"
    )
    return True


def _raised(options: RunOptions, purpose: Purpose, memory_mb: int) -> RunOptions:
    update: dict[str, object]
    match purpose:
        case "metric":
            update = {"metric": options.metric.model_copy(update={"memory_mb": memory_mb})}
        case "stage" | "convert":
            update = {f"{purpose}_memory_mb": memory_mb}
        case _:
            update = {"trial": options.trial.model_copy(update={"memory_mb": memory_mb})}
    return options.model_copy(update=update)


def _now(state: State, purpose: Purpose) -> int:
    """Return the MiB that a job of this purpose requests now; of a host, per trial."""
    kind: Purpose = "trial" if purpose == "host" else purpose
    return job_resources(kind, state.record.options, footprint_of(state.record))["memory_mb"]


def _more(state: State, purpose: Purpose, lanes: int = 1) -> int:
    """Return the MiB of the next request: twice as much, or what the largest node has beside the weights.

    Builds and trials share a setting, and neither lowers it.
    """
    twice, largest = 2 * _now(state, purpose), state.nodes.largest_mb
    if purpose == "build":
        return max(twice, _now(state, "trial"))
    if purpose not in ("stage", "trial", "host") or not largest:
        return twice
    options = state.record.options
    weights = 0 if purpose == "stage" else precursor_memory_mb(state.record)
    if purpose == "trial" and not options.stage.enabled:
        weights = 0
    return min(twice, (largest - weights) // lanes - (options.engine_memory_mb if weights else 0))


# --- time limits -------------------------------------------------------------------------------------------------------

SHORTEST_LIMIT_SECONDS = 900
"""No trial requests less: schedulers gain nothing below it, and a cold prior may be off several-fold."""
ENDING_SECONDS = 120
"""A trial gets SIGTERM a minute before its limit, and Slurm may be a minute early."""
STAGING_SLACK_SECONDS = 300  # of a host, on top of the copy
METRIC_SPREAD = 2.0  # factor by which metrics may exceed their prediction
SLOW_STORAGE = 100e6  # bytes/s at which a checkpoint certainly loads from shared storage


def _staging_seconds(state: State) -> int:
    return ceil(state.record.checkpoint.bytes / SLOW_STORAGE) + STAGING_SLACK_SECONDS


def trial_limit_seconds(state: State, lanes: Sequence[str], more: int = 0) -> int:
    """Return the time limit of trials: the load and an even share of the work at the 95th percentile.

    A short limit fits gaps that a long one does not. One that proves too short costs a load: the trial returns its shard at
    SIGTERM, and the next trial on its lane requests twice as long. Never above the settings' limit, which applies where
    nothing was predicted (a trial that probes the batch size). `more`: as in `_work_limit_seconds`.
    """
    most = state.record.options.trial.time_limit_seconds
    attempt = max(state.trials.on_lane.get(lane, 0) for lane in lanes)
    return min(most, (_work_limit_seconds(state, more) or most) << min(attempt, 20))


def host_limit_seconds(state: State, lanes: Sequence[str]) -> int:
    """Return the same for a job that stages and then hosts the trials of these lanes, none of them in use yet."""
    most = state.record.options.trial.time_limit_seconds
    return min(most, trial_limit_seconds(state, lanes, len(lanes)) + _staging_seconds(state))


def _work_limit_seconds(state: State, more: int = 0) -> int:
    """Return the seconds in which a lane certainly loads and does its even share; 0 before the plan.

    `more`: lanes added to those in use.
    """
    plan = state.plan
    if not plan.work_seconds_95:
        return 0
    share = plan.work_seconds_95 / max(1, state.lanes_in_use + more)
    return ceil(max(SHORTEST_LIMIT_SECONDS, plan.load_seconds_95 + share + ENDING_SECONDS))


def worker_limit_seconds(state: State, count: int, most: int) -> int:
    """Return the predicted time of the trials and then the metrics; workers that reach their limit are replaced.

    Workers that follow ones that finished no metric job request twice as long.
    """
    work = _work_limit_seconds(state)
    if not work:
        return most
    metrics = [leaf.planned.metric_seconds for leaf in state.shards.leaves.values()]
    tail = METRIC_SPREAD * (sum(metrics) / count + max(metrics, default=0.0))
    return min(most, ceil(work + tail) << min(state.scoring.fruitless.failures, 20))
