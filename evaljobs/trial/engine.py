"""Loads a checkpoint with lm-eval's model class, and runs batches and shards through it.

Rule: the class is lm-eval's own, made with the arguments of lm-eval's command. A batch goes through
its methods, so lm-eval's code groups, pads and decodes it. Sampling is seeded per batch from (seed,
request set, batch number), so draws do not depend on where or in which order batches run. Importing
this module imports no torch; loading does. Called from `trial`.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from evaljobs.contract.names import GPU_VARIABLES, ShardId
from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.paths import batch_file, batch_index_file
from evaljobs.contract.specs import BatchIndex, ModelOptions
from evaljobs.contract.storage import read_record
from evaljobs.errors import OperatorError, RetryError, one_line
from evaljobs.lmeval.batches import Batch, decode_batch
from evaljobs.lmeval.conversations import converse

log = logging.getLogger(__name__)

# An engine that batches by itself is given as many requests at once as it will take.
SELF_BATCHING_SIZE = 256


class UnfitError(RetryError):
    """This node lacks GPUs that the job asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to infer; seconds to import its libraries and to read its weights."""

    lm: Any
    devices: str
    gpus: int
    import_seconds: float
    load_seconds: float


def import_engine(engine: str) -> Any:
    """lm-eval's model class of this name. OperatorError where it or its libraries are missing."""
    from lm_eval.api.registry import get_model  # noqa: PLC0415

    try:
        return get_model(engine)
    except ImportError as error:
        raise OperatorError(
            f"engine {engine!r} cannot be imported by this interpreter ({one_line(error)}): install it there "
            "or point [trial] python at one that has it"
        ) from error
    except (ValueError, KeyError) as error:
        raise OperatorError(
            f"lm-eval has no model class {engine!r}: choose another engine ({one_line(error)})"
        ) from error


def engine_trouble(engine: str) -> str:
    """Why this interpreter cannot import lm-eval's class of an engine, or the hf class that builds the requests of every
    engine; empty where it can. Takes as long as importing them.
    """
    try:
        import_engine(engine)
        importlib.import_module("lm_eval.models.huggingface")
    except Exception as error:  # noqa: BLE001 (whatever a library raises while it is imported is the answer)
        return one_line(error)
    return ""


def load(
    model_path: str,
    options: ModelOptions,
    batch_size: int | Literal["auto"],
    *,
    gpus: int = 0,
    phase: Callable[[str], None] = lambda _phase: None,
) -> Loaded:
    """Import the engine and load the checkpoint; `device=None`: cuda where there is one, else CPU.

    Calls `phase("import")` and `phase("load")` as they begin. Raises UnfitError where fewer than
    `gpus` GPUs are seen, on a device that is not chosen or "cuda".
    """
    started = time.monotonic()
    phase("import")
    import torch  # noqa: PLC0415

    check_gpus(torch, options.device, gpus)
    model_class = import_engine(options.engine)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    imported = time.monotonic()
    phase("load")
    has_gpu = torch.cuda.is_available()
    device = options.device or ("cuda" if has_gpu else "cpu")
    arguments = {**options.model_args, "pretrained": model_path}
    lm = model_class.create_from_arg_obj(
        arguments, {"batch_size": batch_size, "max_batch_size": None, "device": device}
    )
    on_gpu = has_gpu and not device.startswith("cpu")
    if on_gpu:
        torch.cuda.synchronize()
    return Loaded(
        lm=lm,
        devices=torch.cuda.get_device_name(0) if on_gpu else device,
        gpus=torch.cuda.device_count() if on_gpu else 0,
        import_seconds=imported - started,
        load_seconds=time.monotonic() - imported,
    )


def check_gpus(torch: Any, device: str | None, gpus: int) -> None:
    """Raise where a trial on `gpus` GPUs would silently run on the CPU, or on fewer.

    UnfitError: the node is at fault; OperatorError: this torch uses no GPU on any node.
    """
    if gpus == 0 or not (device or "cuda").startswith("cuda"):
        return
    if torch.version.cuda is None and torch.version.hip is None:
        raise OperatorError(
            f"the trial asked for {gpus} GPUs, and this interpreter's torch {torch.__version__} is built without "
            'CUDA and ROCm: point [trial] python at one that has it, or set [trial] device = "cpu"'
        )
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < gpus:
        named = [f"{n}={os.environ[n]}" for n in GPU_VARIABLES if n in os.environ]
        raise UnfitError(
            f"{socket.gethostname()}: torch sees {seen} of the {gpus} GPUs that the job asked for "
            f"({', '.join(named) or 'no variable names them'}); look at `nvidia-smi` or `rocm-smi` there"
        )


def warm_up(lm: Any, options: ModelOptions) -> float:
    """Seconds of a first forward pass of one token: its loading does not count as inference.

    It draws no random number and keeps nothing. 0.0 without a pass for compiled models, which
    specialise on the first shape, and for classes other than lm-eval's causal `hf`. If it fails,
    the first batch reports the error.
    """
    call, kind = getattr(lm, "_model_call", None), getattr(lm, "AUTO_MODEL_CLASS", None)
    if (
        call is None
        or getattr(kind, "__name__", "") != "AutoModelForCausalLM"
        or options.model_args.get("compile")
    ):
        return 0.0
    import torch  # noqa: PLC0415

    started = time.monotonic()
    try:
        token = torch.zeros((1, 1), dtype=torch.long, device=lm.device)
        call(token)[0, -1, 0].item()  # `item` waits for the GPU
    except Exception:
        log.warning("the warm-up forward failed", exc_info=True)
        return 0.0
    return time.monotonic() - started


def probe_batch_size(lm: Any) -> int:
    """The batch size that lm-eval's own detection finds for inputs of the model's full length."""
    detect = getattr(lm, "_detect_batch_size", None)
    if detect is None:
        return SELF_BATCHING_SIZE
    return max(1, int(detect()))


def fix_batch_size(lm: Any, batch_size: int) -> None:
    """Set the evaluation's batch size on a model loaded with "auto".

    lm-eval's hf classes keep it in `batch_size_per_gpu` (there `batch_size` is read-only), classes
    of engines that batch by themselves in `batch_size`.
    """
    name = "batch_size_per_gpu" if hasattr(lm, "batch_size_per_gpu") else "batch_size"
    setattr(lm, name, batch_size)


def seed_batch(seed: int, key: str, number: int) -> None:
    """Seed every generator that sampling may draw from."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    digest = hashlib.sha256(f"{seed}|{key}|{number}".encode()).digest()
    value = int.from_bytes(digest[:4], "little")
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002 (the generator that others' code draws from)
    torch.manual_seed(value)  # every CUDA device too


def _request(*arguments: Any) -> SimpleNamespace:
    """The part of lm-eval's Instance that its model classes use."""
    return SimpleNamespace(args=arguments, task_name=None, doc_id=None, request_type="", doc={})


def run_batch(lm: Any, batch: Batch) -> list[tuple[int, Any]]:
    """(request index, answer) for every piece of a batch, as in `ShardResponses.responses`."""
    answers = _ask(lm, batch)
    if len(answers) != len(batch.pieces):
        raise RuntimeError(f"the model gave {len(answers)} answers to {len(batch.pieces)} requests")
    pairs: list[tuple[int, Any]] = []
    for piece, answer in zip(batch.pieces, answers, strict=True):
        if batch.kind == "loglikelihood":
            pairs.append((piece.index, [float(answer[0]), bool(answer[1])]))
        elif batch.kind == "loglikelihood_rolling" and not batch.text:
            pairs.append((piece.index, [piece.window, float(answer[0])]))
        elif batch.kind == "loglikelihood_rolling":
            # the only term: the engine cut the text into windows of its own and added them up
            pairs.append((piece.index, [0, float(answer)]))
        else:
            pairs.append((piece.index, answer))
    return pairs


def _ask(lm: Any, batch: Batch) -> list[Any]:
    if batch.kind == "generate_until":
        return list(converse(lm, batch.pieces, lambda prompts: _generated(lm, batch, prompts)))
    if batch.text:
        if batch.kind == "loglikelihood":
            pairs = [_request(p.context, p.continuation) for p in batch.pieces]
            return list(lm.loglikelihood(pairs, disable_tqdm=True))
        whole = [_request(p.context) for p in batch.pieces]
        return list(lm.loglikelihood_rolling(whole, disable_tqdm=True))
    if batch.kind == "loglikelihood":
        requests = [(("", ""), p.context, p.continuation) for p in batch.pieces]
        return list(lm._loglikelihood_tokens(requests, disable_tqdm=True))  # noqa: SLF001
    windows = [(None, p.context, p.continuation) for p in batch.pieces]
    return list(lm._loglikelihood_tokens(windows, disable_tqdm=True, override_bs=len(windows)))  # noqa: SLF001


def _generated(lm: Any, batch: Batch, prompts: list[str]) -> list[str]:
    asked = [_request(prompt, dict(batch.settings or {})) for prompt in prompts]
    return [str(answer) for answer in lm.generate_until(asked, disable_tqdm=True)]


# --- a shard ---------------------------------------------------------------------------------------------------------


class RequestSet:
    """The batches of one leaf task on disk, at one batch size."""

    def __init__(self, folder: str | Path, batch_size: int) -> None:
        self._file = batch_file(folder, batch_size)
        self.index = read_record(batch_index_file(folder, batch_size), BatchIndex)

    def batches(self, first: int, end: int) -> Iterator[Batch]:
        """Batches first..end-1, all read at once: storage does not delay inference."""
        start, stop = self.index.offsets[first], self.index.offsets[end]
        with self._file.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        if len(data) != stop - start:
            raise OSError(f"{self._file} ends before byte {stop}: build its request set again")
        return map(decode_batch, data.splitlines())


def run_shard(
    lm: Any,
    requests: RequestSet,
    shard: str,
    *,
    trial: str,
    seed: int,
    tick: Callable[[int, int], None] = lambda _done, _of: None,
) -> ShardResponses:
    """All answers of a shard. Calls `tick(batches done, batches in all)` before each batch."""
    name = ShardId.parse(shard)
    task, first, end = name.task, name.first_batch, name.end_batch
    started_at, started = time.time(), time.monotonic()
    answers: list[tuple[int, Any]] = []
    for offset, batch in enumerate(requests.batches(first, end)):
        tick(offset, end - first)
        seed_batch(seed, requests.index.key, first + offset)
        answers += run_batch(lm, batch)
    return ShardResponses(
        task=task,
        key=requests.index.key,
        shard=shard,
        trial=trial,
        started_at=started_at,
        seconds=time.monotonic() - started,
        responses=tuple(answers),
    )
