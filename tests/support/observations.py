"""One observed run of one task."""

from __future__ import annotations

from priors.table import Observation


def observation(number=0, **changes):
    values = {
        "task": f"task{number}",
        "key": "k",
        "model_parameters": 7_000_000_000,
        "hardware": "a100",
        "engine": "hf",
        "batch_size": 8,
        "prefill_tokens": 100_000,
        "generated_tokens": 0,
        "documents": 100,
        "inference_seconds": 12.5,
        "metric_seconds": 1.0,
        "load_seconds": 20.0,
        "at": 1000.0 + number,
    }
    return Observation(**(values | changes))
