"""Spreads a model over the GPUs of its trial by lm-eval's own arguments, and checks where it was loaded.

Rule: a trial that holds k GPUs uses k, or ends at once and says what to set. Importing this module
imports no torch. Called from `loading`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from evaljobs.contract.names import HF_ENGINES
from evaljobs.contract.specs import ModelOptions
from evaljobs.errors import OperatorError

NOT_ON_GPUS = ("cpu", "disk", "meta")  # a parameter that accelerate offloads is on "meta"


def spread(options: ModelOptions, gpus: int, device: str) -> dict[str, Any]:
    """lm-eval's arguments of the model on `gpus` GPUs: `hf` is to spread its layers over several.

    They are those of `lm_eval --model_args parallelize=True`. Where `device_map` alone is given,
    lm-eval would load by it, and then move the whole model to the first GPU.
    """
    arguments = dict(options.model_args)
    if gpus > 1 and options.engine in HF_ENGINES and not device.startswith("cpu"):
        arguments.setdefault("parallelize", True)
    return arguments


def bytes_by_device(model: Any) -> dict[str, int]:
    """Device, such as "cuda:0" -> bytes of the parameters there. Empty for what is no torch module."""
    parameters = getattr(model, "parameters", None)
    found: Counter[str] = Counter()
    for parameter in parameters() if callable(parameters) else ():
        found[str(parameter.device)] += parameter.numel() * parameter.element_size()
    return dict(found)


def check_spread(devices: Mapping[str, int], options: ModelOptions, gpus: int) -> None:
    """OperatorError where a model leaves GPUs of its trial without weights, or weights outside of them.

    `devices`: from `bytes_by_device`; empty where the engine shows no model, which is not checked.
    `gpus`: those that the trial's job holds; 0 on CPU slots.
    """
    if gpus == 0 or not devices:
        return
    outside = sum(size for name, size in devices.items() if name.partition(":")[0] in NOT_ON_GPUS)
    if outside and not _placed_by_hand(options.model_args):
        raise OperatorError(
            f"the weights do not fit the trial's {gpus} GPUs: lm-eval left {outside / 1e9:.1f} of "
            f"{sum(devices.values()) / 1e9:.1f} GB in main memory or on disk; set a larger [trial] gpus_per_trial, "
            "or allow it by model_args = { max_cpu_memory = ... }"
        )
    used = sorted(name for name in devices if name.partition(":")[0] not in NOT_ON_GPUS)
    if len(used) < gpus:
        raise OperatorError(
            f"engine {options.engine!r} loaded the model on {len(used)} of the trial's {gpus} GPUs "
            f"({', '.join(used) or 'none'}): set [trial] gpus_per_trial = {max(1, len(used))}, or model_args "
            "that spread it"
        )


def _placed_by_hand(model_args: Mapping[str, Any]) -> bool:
    """Has the operator chosen weights outside of the GPUs?"""
    return bool(model_args.get("max_cpu_memory")) or isinstance(model_args.get("device_map"), Mapping)
