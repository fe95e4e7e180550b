"""A served model behind lm-eval's `local-completions`: a trial holds no weights, and asks an OpenAI-compatible server.

Rule: the checkpoint's folder gives the tokenizer and the context length, and prompts go as token ids, so the server sees the
tokens that `hf` would see. Likelihoods are sums of the prompt's log-probabilities, which the server must give
(`coordinator.intake.endpoint` asks before anything is submitted). Called from `loading`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from evaljobs.contract.specs import ModelOptions
from evaljobs.errors import OperatorError, one_line
from evaljobs.trial.engines.harness import HarnessEngine
from evaljobs.trial.engines.protocol import Loaded

AT_ONCE = 8  # requests in flight, where `num_concurrent` does not say
LENGTHS = (
    "n_positions",
    "max_position_embeddings",
    "n_ctx",
)  # of config.json, as lm-eval's hf class reads them


def load_endpoint(
    model_class: Any, model_path: str, options: ModelOptions, *, import_seconds: float
) -> EndpointEngine:
    """Make lm-eval's class with the tokenizer in the folder `model_path`."""
    started = time.monotonic()
    config = json.loads((Path(model_path) / "config.json").read_bytes())
    lengths = [config[name] for name in LENGTHS if isinstance(config.get(name), int)]
    arguments = {
        "tokenizer": model_path,
        "tokenizer_backend": "huggingface",
        "num_concurrent": AT_ONCE,
        **({"max_length": lengths[0]} if lengths else {}),
        **options.model_args,
    }
    try:
        lm = model_class.create_from_arg_obj(arguments, {"batch_size": 1})
    except ImportError as error:
        raise OperatorError(
            f"`pip install 'evalspan[endpoint]'` in [trial] python: {one_line(error)}"
        ) from error
    loaded = Loaded(
        devices=f"endpoint {options.model_args.get('base_url')}",
        gpus=0,
        import_seconds=import_seconds,
        load_seconds=time.monotonic() - started,
    )
    return EndpointEngine(lm, options, loaded)


class EndpointEngine(HarnessEngine):
    """See `protocol.Engine`."""

    @property
    def model(self) -> object:
        """None: the weights are the server's."""
        return None

    def fix_batch_size(self, batch_size: int) -> None:
        """Nothing to set: the server chooses its batches."""
