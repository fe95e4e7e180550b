"""Memory that a checkpoint takes: of a trial's GPUs, and of the host for a precursor and a trial. Pure.

Rule: from safetensors headers, the config and lm-eval's arguments. Where these do not say how large the loaded weights
are, or a GPU's memory is unknown, nothing is refused. Called from `job_specs`, the offers of nodes, and the checks
before submission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from coordinator.base.words import first_of
from coordinator.cluster import NodeState
from coordinator.evaluation.records import EvaluationRecord
from evaljobs.contract.names import HF_ENGINES
from evaljobs.contract.specs import CheckpointSpec, ModelOptions, Weights
from priors.hardware import memory_bytes

MIB = 1 << 20
GB = 10**9
GPU_RESERVE_BYTES = GB
"""Of each GPU, for the context of CUDA and the smallest batch: weights may take the rest."""
SERVERS = ("vllm", "sglang")  # engines that split each layer over a power of two of GPUs
WIDTHS = {"float64": 8, "double": 8, "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
"""Bytes of a weight by torch's name of its dtype."""
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a stored weight by safetensors' name of its dtype; loading converts these alone."""
SMALLER = (
    *("load_in_4bit", "load_in_8bit", "quantization_config", "autogptq", "gptqmodel", "gguf_file"),
    *("max_cpu_memory", "quantization", "cpu_offload_gb", "load_format"),
)
"""Arguments with which an engine quantises weights while it loads them, or keeps some outside of the GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Host memory: bytes of the checkpoint's files, and MiB of a trial beside its base."""

    files: int = 0
    own_mb: int = 0


NO_CHECKPOINT = Footprint()


def footprint(record: EvaluationRecord) -> Footprint:
    """What jobs of this evaluation ask for by its checkpoint."""
    own = own_bytes(record.checkpoint, record.model)
    return Footprint(files=record.checkpoint.bytes, own_mb=ceil(own / MIB))


def own_bytes(checkpoint: CheckpointSpec, model: ModelOptions) -> int:
    """Bytes of weights that count for a trial's own memory.

    Files in node memory are mapped, and count for the precursor. On a GPU the tensors that are being
    converted and copied count, on a CPU all of the weights, which conversion and merging copy.
    """
    stored, cpu = checkpoint.weights, (model.device or "").startswith("cpu")
    if stored is None:
        return checkpoint.bytes if cpu else max((f.size for f in checkpoint.files), default=0)
    loaded = loaded_bytes(stored, model)
    loaded = stored.bytes if loaded is None else loaded
    return loaded if cpu else ceil(stored.largest * max(1.0, loaded / max(1, stored.bytes)))


def loaded_bytes(stored: Weights, model: ModelOptions) -> int | None:
    """Bytes of the weights as the engine loads them; None where its arguments or the engine's name do not say."""
    given, by_hand = model.model_args, isinstance(model.model_args.get("device_map"), Mapping)
    if model.engine not in (*HF_ENGINES, *SERVERS) or by_hand or any(given.get(name) for name in SMALLER):
        return None
    dtype = str(given.get("dtype", "auto")).removeprefix("torch.")
    if stored.quantized or (dtype == "auto" and stored.dtype is None):
        return stored.bytes
    if dtype == "auto":
        dtype = str(stored.dtype)
        if model.engine in SERVERS and dtype == "float32":
            dtype = "float16"
    width = WIDTHS.get(dtype)
    if width is None:
        return None
    return sum(size // FLOATS[d] * width if d in FLOATS else size for d, size in stored.sizes.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """What a trial's GPUs are to hold: bytes of `weights` on `gpus` of them. `weights` 0: unknown."""

    weights: int = 0
    stored: int = 0  # bytes of them in the checkpoint
    gpus: int = 1
    doubling: bool = False  # the engine takes powers of two of GPUs alone
    gpu_gb: Mapping[str, float] = field(default_factory=dict)  # [nodes] gpu_memory_gb: (part of) a type -> GB

    def memory(self, node: NodeState) -> int | None:
        """Bytes of one GPU of the node, of the largest where it has several types; None where that is unknown."""
        sizes = [self._memory_of(name) for name in node.gpu_type.lower().split("+")]
        return None if None in sizes else max(filter(None, sizes))

    def _memory_of(self, gpu_type: str) -> int | None:
        named = max((key for key in self.gpu_gb if key.lower() in gpu_type), key=len, default=None)
        return memory_bytes(gpu_type) if named is None else int(self.gpu_gb[named] * GB)

    def holds(self, node: NodeState) -> bool:
        """False where the GPUs of a trial on this node are too small for the weights for certain."""
        memory = self.memory(node)
        return memory is None or self.weights <= self.gpus * (memory - GPU_RESERVE_BYTES)

    def least(self, node: NodeState) -> int | None:
        """The fewest GPUs of this node that hold the weights; None where all of them do not, or it is unknown."""
        memory = self.memory(node)
        if memory is None or memory <= GPU_RESERVE_BYTES:
            return None
        count = max(1, ceil(self.weights / (memory - GPU_RESERVE_BYTES)))
        count = 1 << (count - 1).bit_length() if self.doubling else count
        return count if count <= node.gpus else None

    def refusal(self, nodes: Sequence[NodeState]) -> str:
        """Why no trial could load the weights, and what would do; "" where the GPUs of a node may hold them."""
        nodes = [n for n in nodes if n.gpus and not n.excluded]
        able = [n for n in nodes if n.gpus >= self.gpus]
        if not able or any(self.holds(n) for n in able):
            return ""
        nodes = [n for n in nodes if self.memory(n) is not None]  # of others nothing can be said
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
        """The nodes with GPUs that get no trials since these are too small; "" where there is none."""
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
    """What this evaluation's trials need of GPUs: nothing that is known where they run on CPUs."""
    options, model, stored = record.options, record.model, record.checkpoint.weights
    on_cpu = (model.device or "").startswith("cpu")
    weights = None if stored is None or on_cpu else loaded_bytes(stored, model)
    return GpuNeed(
        weights=weights or 0,
        stored=0 if stored is None else stored.bytes,
        gpus=options.trial.gpus_per_trial,
        doubling=model.engine in SERVERS,
        gpu_gb=options.gpu_memory_gb,
    )
