"""vLLM behind lm-eval's class: a shard's requests in one submission, and nothing left when it ends.

Rule: lm-eval's class makes token ids, sampling parameters and answers. With one GPU vLLM runs inside the trial's process;
with k, by tensor parallelism, in k processes that end with the trial. As in `lm_eval --model vllm`, answers depend slightly
on which requests vLLM computes together: they are equal within a tolerance (docs/evaluating/vllm.md), and sampling is seeded
per request. Called from `loading`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import multiprocessing.process
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evaljobs.contract.specs import ModelOptions
from evaljobs.errors import OperatorError
from evaljobs.lmeval.batches import Batch, Piece
from evaljobs.lmeval.conversations import answer_conversations
from evaljobs.staging import segments
from evaljobs.trial.engines import weights
from evaljobs.trial.engines.harness import HarnessEngine, run_batch
from evaljobs.trial.engines.protocol import Loaded
from evaljobs.trial.engines.tied import tie_processes
from evaljobs.trial.trained_values import stored_tensors

log = logging.getLogger(__name__)

NAME = "vllm"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the trial's process
    # workers of tensor parallelism: a fork after threads have started may hang, and would not be tied
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
}
PARALLEL = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
ORDERED_SETTINGS = (
    "vLLM's likelihoods depend on the order of requests if it caches prefixes: omit enable_prefix_caching from "
    "[trial] model_args, or evaluate only generation tasks"
)
# lm-eval's batch size: the maximum number of requests that its class submits to vLLM at once
ALL_AT_ONCE = 1 << 30


def set_vllm_environment() -> None:
    """Set unset variables that vLLM reads when it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def load_vllm(
    model_class: Any, model_path: str, options: ModelOptions, *, gpus: int, import_seconds: float
) -> VllmEngine:
    """Create lm-eval's vLLM class for the checkpoint in the folder `model_path`.

    `gpus`: held by the trial; 0 on CPU slots. Raise OperatorError if vLLM would use fewer.
    """
    started = time.monotonic()
    # with vLLM's prefix cache likelihoods depend on the order of requests (vLLM 42019)
    arguments = {"enable_prefix_caching": False, **parallel_arguments(options.model_args, gpus)}
    # from the files, since vLLM's processes keep their tensors, and before any process has to be ended
    weights.check_finite(stored_tensors(model_path).items())
    segments.sweep_segments()
    with tie_processes(), segments.named_segments(), _from_inside(model_path) as place:
        lm = model_class.create_from_arg_obj({**arguments, "pretrained": place}, {"batch_size": ALL_AT_ONCE})
    segments.unlink_mapped()
    loaded = Loaded(
        devices=_device(),
        gpus=gpus,
        import_seconds=import_seconds,
        load_seconds=time.monotonic() - started,
    )
    return VllmEngine(lm, options, loaded)


def parallel_arguments(model_args: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Return lm-eval's arguments for the model on `gpus` GPUs: tensor parallel over all, unless they say otherwise."""
    given = {name: int(model_args[name]) for name in PARALLEL if model_args.get(name)}
    used = math.prod(given.values())
    if gpus > 1 and given and used != gpus:
        raise OperatorError(
            f"the trial holds {gpus} GPUs and vLLM would use {used} ({', '.join(f'{n} = {v}' for n, v in given.items())}): "
            f"omit that from [trial] model_args, or set gpus_per_trial = {used}"
        )
    return {**model_args, **({"tensor_parallel_size": gpus} if gpus > 1 and not given else {})}


@contextlib.contextmanager
def _from_inside(folder: str) -> Iterator[str]:
    """Provide the path "." for a checkpoint while it is loaded.

    vLLM keys its compiled code by the path, and a staged path contains the checkpoint's digest. With one path for all, a
    checkpoint reuses what an earlier one of the same shape has compiled.
    """
    before = multiprocessing.process.ORIGINAL_DIR  # type: ignore[attr-defined]  # where spawned processes begin
    with contextlib.chdir(folder):
        multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
        try:
            yield "."
        finally:
            multiprocessing.process.ORIGINAL_DIR = before  # type: ignore[attr-defined]


def _device() -> str:
    """Return the name of the device, from vLLM, since torch would create a CUDA context in this process."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found]  # noqa: PLC0415

    return "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())


class VllmEngine(HarnessEngine):
    """`lm`: lm-eval's class of vLLM, loaded; see `protocol.Engine`."""

    def __init__(self, lm: Any, options: ModelOptions, loaded: Loaded) -> None:
        super().__init__(lm, options, loaded)
        self._engine = lm.model.llm_engine
        self._step = self._engine.step
        self._engine.step = self._stepped
        self._tick: Callable[[int], None] = lambda _done: None
        # requests of this shard that vLLM has answered, batches that each stands for, and the last batch
        self._finished, self._batches_each, self._most = 0, 0.0, 0

    def warm_up(self) -> float:
        """Return 0.0: vLLM warms up while it is loaded."""
        return 0.0

    def fix_batch_size(self, batch_size: int) -> None:
        """Do nothing: vLLM chooses its batches."""

    def answers(
        self, batches: Sequence[Batch], seeds: Sequence[int], tick: Callable[[int], None]
    ) -> list[tuple[int, Any]]:
        """Submit all requests of one kind and settings at once. Calls `tick` before each of vLLM's steps."""
        seed_of = {
            piece.index: seed for batch, seed in zip(batches, seeds, strict=True) for piece in batch.pieces
        }
        self._tick, self._finished = tick, 0
        self._most, self._batches_each = len(batches) - 1, len(batches) / len(seed_of)
        tick(0)
        pairs: list[tuple[int, Any]] = []
        try:
            for members in _alike(batches):
                pieces = [piece for batch in members for piece in batch.pieces]
                whole = replace(members[0], pieces=pieces)
                if whole.kind == "generate_until":
                    generate = partial(self._generated, whole.settings or {}, seed_of)
                    answers = answer_conversations(self.lm, pieces, generate)
                    pairs += [(p.index, answer) for p, answer in zip(pieces, answers, strict=True)]
                else:
                    pairs += self._likelihoods(whole)
        except Exception:
            # drop all requests in vLLM
            self._engine.abort_request(list(self._engine.output_processor.request_states), internal=True)
            raise
        return pairs

    def _likelihoods(self, batch: Batch) -> list[tuple[int, Any]]:
        if self._options.model_args.get("enable_prefix_caching"):
            raise OperatorError(ORDERED_SETTINGS)
        found = run_batch(self.lm, batch)
        weights.check_answers(batch, [answer for _, answer in found], lambda: True)
        return found

    def _generated(
        self, settings: dict[str, Any], seed_of: dict[int, int], prompts: list[str], pieces: list[Piece]
    ) -> list[str]:
        own = [
            _seeded(settings, seed_of[p.index], p.index, prompt)
            for p, prompt in zip(pieces, prompts, strict=True)
        ]
        asked = [SimpleNamespace(args=pair) for pair in zip(prompts, own, strict=True)]
        return [str(answer) for answer in self.lm.generate_until(asked, disable_tqdm=True)]

    def _stepped(self) -> Any:
        self._tick(min(self._most, int(self._finished * self._batches_each)))
        before = self._engine.get_num_unfinished_requests()
        outputs = self._step()
        self._finished += before - self._engine.get_num_unfinished_requests()
        return outputs

    def close(self) -> None:
        """Shut down vLLM's processes."""
        try:
            self._engine.engine_core.shutdown()
        except Exception:
            log.warning("vLLM did not shut down", exc_info=True)


def _alike(batches: Sequence[Batch]) -> list[list[Batch]]:
    """Group batches by kind and settings, in order of first appearance."""
    groups: dict[str, list[Batch]] = {}
    for batch in batches:
        key = json.dumps([batch.kind, batch.text, batch.settings], sort_keys=True, default=str)
        groups.setdefault(key, []).append(batch)
    return list(groups.values())


def _seeded(settings: dict[str, Any], seed: int, index: int, prompt: str) -> dict[str, Any]:
    """Return one prompt's settings, with a seed if it is sampled, so that it does not depend on other requests.

    `seed`: of its batch; `index`: its request's. A seed set by the task is kept.
    """
    sampled = settings.get("do_sample") or float(settings.get("temperature") or 0) > 0
    if not sampled or "seed" in settings:
        return dict(settings)
    digest = hashlib.sha256(f"{seed}|{index}|{prompt}".encode()).digest()
    return {**settings, "seed": int.from_bytes(digest[:4], "little")}
