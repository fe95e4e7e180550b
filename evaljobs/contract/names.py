"""Names of shards and lanes in files, specs and queues, for both sides; of GPU variables and engines.

Rule: names are only parsed and formatted here; on the wire and in the journal they are strings. Called from: the coordinator
(plans, evaluations) and the node side (trials, queues).
"""

from __future__ import annotations

from dataclasses import dataclass

ROCR = "ROCR_VISIBLE_DEVICES"
# Variables that name a job's GPUs: NVIDIA's, AMD's two, Intel's. Slurm sets that of the node's vendor, or several if it does
# not know the vendor. ROCm uses HIP's, otherwise NVIDIA's, to select from ROCR's.
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", ROCR, "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
HF_ENGINES = ("hf", "hf-auto", "huggingface")  # lm-eval's names of its class for transformers
# Arguments of a model that name its adapter's weights, on which no request depends.
ADAPTERS = ("peft", "delta", "lora_local_path")
# Arguments of a model that name a file, a folder or a model of the Hub.
PLACES = (*ADAPTERS, "tokenizer", "tokenizer_path", "chat_template")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a request set is cut into batches: "8" by a batch size, "fast-8192-8" in fast mode, "screen-1a2b3c4d-8" in screen mode.

    In fast mode a batch of likelihoods is a unit of at most `token_budget` tokens (`requests.units`),
    and `batch_size` is that of generation. In other modes the budget is None. In screen mode documents are batched in the
    order in which they are asked, which `order` names by a digest.
    """

    batch_size: int
    token_budget: int | None = None
    order: str = ""

    @classmethod
    def parse(cls, text: str) -> Cut:
        """Parse a cut. Raise ValueError for any other text. A shard's "" means the evaluation's and has no text of its own."""
        fast, dash, numbers = text.partition("-")
        budget, _, size = numbers.partition("-")
        if dash and fast == "screen":
            cut = cls(int(size), order=budget)
        else:
            cut = cls(int(size), int(budget)) if dash and fast == "fast" else cls(int(text))
        if str(cut) != text or cut.batch_size < 1 or cut.token_budget == 0:
            raise ValueError(f"{text!r} is not a cut of a request set")
        return cut

    def __str__(self) -> str:
        if self.order:
            return f"screen-{self.order}-{self.batch_size}"
        if self.token_budget is None:
            return str(self.batch_size)
        return f"fast-{self.token_budget}-{self.batch_size}"


@dataclass(frozen=True, slots=True)
class ShardId:
    """Batches first_batch..end_batch-1 of a leaf task's request set: "task|first|end".

    `task` is "task#2" if two entries of a suite make different requests of one leaf task. `cut` says how the requests are cut
    into batches: "" by the evaluation's batch size, "4" by a batch size of the task's own, "fast-8192-8" in fast mode
    (`Cut`). Unless it is "", the name is "task|cut:first|end". Batches of different cuts have different names, so answers to
    one never count for another.
    """

    task: str
    first_batch: int
    end_batch: int
    cut: str = ""

    @classmethod
    def parse(cls, text: str) -> ShardId:
        """Parse a shard's name. Raise ValueError for any other text."""
        task, first, end = text.rsplit("|", 2)
        cut, _, number = first.rpartition(":")
        return cls(task, int(number), int(end), cut)

    def __str__(self) -> str:
        first = f"{self.cut}:{self.first_batch}" if self.cut else str(self.first_batch)
        return f"{self.task}|{first}|{self.end_batch}"


@dataclass(frozen=True, slots=True)
class LaneId:
    """A place for one trial on a node: "node/number"."""

    node: str
    number: int

    @classmethod
    def parse(cls, text: str) -> LaneId:
        """Parse a lane's name. Raise ValueError for any other text."""
        node, _, number = text.rpartition("/")
        return cls(node, int(number))

    def __str__(self) -> str:
        return f"{self.node}/{self.number}"
