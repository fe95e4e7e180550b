"""Rates without observations, from nominal figures of the hardware and the model's size. For `estimate`.

Rule: figures are for dense bf16 and one GPU (one core for `cpu`). They only need to be right within the spread of a first
prediction; the first run corrects them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFILL_EFFICIENCY = 0.4
"""Fraction of nominal FLOP/s in prefill: 9,000 tokens/s of a 7B model on an A100 (shipped portfolio)."""
BATCH_SECONDS = 0.005
"""Seconds per batch of any size: tokenising, padding, launching."""
HOST_STEP_SECONDS = {"hf": 0.0225, "": 0.004}
"""Seconds per generated token of a batch besides the GPU's memory reads: transformers' Python, otherwise (vLLM, SGLang) CUDA
graphs. With hf a 7B model on an A100 at batch size 8 generates 270 tokens/s (shipped portfolio).
"""
CPU_PREFILL_FLOPS = 2 * 135e6 * 250
"""Rate of one core: a 135M model measured at 150 to 400 prefill tokens/s."""
CPU_GENERATED = 13.0 * 135e6
"""Rate of one core: a 135M model measured at 11 to 16 generated tokens/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens per second of one model in one trial, and fixed seconds per batch."""

    prefill_per_second: float
    generated_per_second: float
    batch_seconds: float


NOMINAL_RATES: dict[str, tuple[float, float, int]] = {
    # name: (dense bf16 or fp16 FLOP/s, memory bytes/s, GB), from the vendors' data sheets; of a type sold with
    # several sizes the largest, unless its name says another
    "gb200": (2.5e15, 8.0e12, 186),
    "gh200": (989e12, 4.0e12, 96),
    "b200": (2.25e15, 8.0e12, 180),
    "b100": (1.75e15, 8.0e12, 180),
    "h200": (989e12, 4.8e12, 141),
    "h100": (989e12, 3.35e12, 80),
    "h800": (989e12, 3.35e12, 80),
    "h20": (148e12, 4.0e12, 96),
    "a100": (312e12, 2.0e12, 80),
    "a800": (312e12, 2.0e12, 80),
    "a40": (150e12, 0.696e12, 48),
    "a30": (165e12, 0.933e12, 24),
    "a10": (125e12, 0.6e12, 24),
    "l40": (362e12, 0.864e12, 48),
    "l4": (121e12, 0.3e12, 24),
    "v100": (125e12, 0.9e12, 32),
    "t4": (65e12, 0.32e12, 16),
    "4090": (165e12, 1.0e12, 24),
    "3090": (71e12, 0.936e12, 24),
    "mi300": (1307e12, 5.3e12, 192),
    "mi250": (383e12, 3.2e12, 128),
}


def nominal_rates(hardware: str) -> tuple[float, float] | None:
    """Return (FLOP/s, bytes/s) by Slurm's or the driver's name, e.g. `nvidia_h100_80gb_hbm3`, or None."""
    known = _known(hardware)
    return None if known is None else NOMINAL_RATES[known][:2]


def memory_bytes(hardware: str) -> int | None:
    """Return the memory of one GPU by such a name; None for an unknown type, and for `cpu`."""
    known = _known(hardware)
    if known is None:
        return None
    said = [int(number) for number in re.findall(r"(\d+)gb?(?![a-z0-9])", hardware.lower())]
    # The first is the whole GPU's and the last a MIG slice's; a superchip's name includes its CPU's memory ("GH200 480GB").
    largest = NOMINAL_RATES[known][2]
    sizes = [gb for gb in said if gb <= 2 * largest]
    return 10**9 * (sizes[-1] if sizes else largest)


def _known(hardware: str) -> str | None:
    name = hardware.lower()
    return max((key for key in NOMINAL_RATES if key in name), key=len, default=None)


def cold_rates(*, model_parameters: int, hardware: str, engine: str, batch_size: int) -> Rates:
    """Return rates by size and hardware only; unknown hardware counts as an A100."""
    parameters = max(1, model_parameters)
    if hardware == "cpu":
        return Rates(
            prefill_per_second=CPU_PREFILL_FLOPS / (2 * parameters),
            generated_per_second=CPU_GENERATED / parameters,
            batch_seconds=BATCH_SECONDS,
        )
    flops, memory = nominal_rates(hardware) or NOMINAL_RATES["a100"][:2]
    step = 2 * parameters / memory + HOST_STEP_SECONDS.get(engine, HOST_STEP_SECONDS[""])
    return Rates(
        prefill_per_second=flops * PREFILL_EFFICIENCY / (2 * parameters),
        generated_per_second=batch_size / step,
        batch_seconds=BATCH_SECONDS,
    )
