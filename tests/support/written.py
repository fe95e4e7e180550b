"""Records as they lie on disk: a frame of a response file, and one observed run of one task."""

import json
import struct

import xxhash

from evaljobs.contract.storage import MAGIC
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


def framed(head, body):
    """A frame of these bytes, whatever they are, with all of its checksums right."""
    sizes = struct.pack("<II", len(head), len(body))
    sums = struct.pack("<QQ", xxhash.xxh3_64_intdigest(sizes + head), xxhash.xxh3_64_intdigest(body))
    return MAGIC + sizes + sums + head + body


def head_of(**changed):
    sound = {
        "task": "t",
        "key": "k",
        "shard": "t|0|1",
        "trial": "x",
        "started_at": 0,
        "seconds": 1,
        "responses": 1,
    }
    return json.dumps({**sound, **changed}).encode()
