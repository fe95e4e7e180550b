"""Laws of the seam to model classes that tokenise and batch by themselves, as vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evaljobs.contract.outcomes import ShardResponses
from evaljobs.contract.specs import ModelOptions
from evaljobs.contract.storage import FrameWriter
from evaljobs.lmeval.batches import Batch, Piece, RequestsHead
from evaljobs.lmeval.replay_model import collect_answers
from evaljobs.trial.engines.harness import SELF_BATCHING_SIZE, HarnessEngine, run_batch
from evaljobs.trial.engines.protocol import Loaded

pytest.importorskip("lm_eval")
from lm_eval.api.model import TemplateLM


class SelfBatching(TemplateLM):
    """A class that sums its own windows and keeps its batch size as lm-eval's vllm class."""

    def __init__(self, batch_size: int | str = "auto") -> None:
        super().__init__()
        self.batch_size = batch_size

    @property
    def eot_token_id(self) -> int:
        return 0

    def tok_encode(self, string: str, **_more: Any) -> list[int]:
        return list(string.encode())

    def _loglikelihood_tokens(self, requests: Any, **_more: Any) -> list[tuple[float, bool]]:
        return [(-float(len(continuation)), True) for _, _, continuation in requests]

    def loglikelihood_rolling(self, requests: Any, **_more: Any) -> list[float]:
        return [-float(len(request.args[0])) for request in requests]

    def generate_until(self, requests: Any, **_more: Any) -> list[str]:
        return [request.args[0] for request in requests]


def test_rolling_answers_of_an_engine_with_windows_of_its_own_are_scored(tmp_path: Path) -> None:
    """Read back, each text's answer is the sum that the engine gave, an empty text's too."""
    texts = ["three", "", "a longer one"]
    pieces = [
        Piece(kind="loglikelihood_rolling", index=i, document=i, context=text) for i, text in enumerate(texts)
    ]
    batch = Batch(kind="loglikelihood_rolling", text=True, settings=None, pieces=pieces)
    responses = tuple(run_batch(SelfBatching(), batch))
    record = ShardResponses(
        task="t", key="k", shard="t|0|1", trial="x", started_at=0, seconds=1, responses=responses
    )
    with FrameWriter(tmp_path / "x.frames") as file:
        frame = file.append(record)
    head = RequestsHead(
        task="t",
        requests=len(texts),
        digests={"loglikelihood_rolling": "d"},
        order={},
        settings=[],
        max_gen_tokens=[],
        text=True,
        grouped=False,
        max_length=64,
    )
    assert collect_answers(head, "k", tmp_path, [frame]) == [-5.0, 0.0, -12.0]


def test_a_settled_batch_size_reaches_an_engine_that_batches_by_itself() -> None:
    """Loaded with "auto" it is given the number, as an hf class is; its probe costs no forward."""
    lm = SelfBatching()
    loaded = Loaded(devices="cpu", gpus=0, import_seconds=0.0, load_seconds=0.0)
    engine = HarnessEngine(lm, ModelOptions(engine="vllm"), loaded)
    assert engine.probe_batch_size() == SELF_BATCHING_SIZE
    engine.fix_batch_size(32)
    assert lm.batch_size == 32
