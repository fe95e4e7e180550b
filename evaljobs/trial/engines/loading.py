"""Loads a checkpoint: imports the engine, checks the job's GPUs, spreads lm-eval's model class over them.

Rule: importing this module imports no torch; loading does. Called from `trial`; `engine_trouble`
from the doctor's jobs.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from evaljobs.contract.engine_traits import ENDPOINT
from evaljobs.contract.names import GPU_VARIABLES, HF_ENGINES
from evaljobs.contract.specs import ModelOptions
from evaljobs.errors import OperatorError, RetryError, one_line
from evaljobs.trial.engines import endpoint, vllm, weights
from evaljobs.trial.engines.harness import HarnessEngine
from evaljobs.trial.engines.protocol import Engine, Loaded

NOT_ON_GPUS = ("cpu", "disk", "meta")  # a parameter that accelerate offloads is on "meta"


class UnfitError(RetryError):
    """This node lacks GPUs that the job requested."""


def import_engine(engine: str) -> Any:
    """Import lm-eval's model class of this name. Raise OperatorError if it or its libraries are missing."""
    from lm_eval.api.registry import get_model  # noqa: PLC0415

    try:
        model_class = get_model(engine)
        if engine in HF_ENGINES:  # imported with the first model, 40 % of all imports would count as loading
            importlib.import_module("transformers.modeling_utils")
    except ImportError as error:
        raise OperatorError(
            f"engine {engine!r} cannot be imported by this interpreter ({one_line(error)}): install it there "
            "or point [trial] python at one that has it"
        ) from error
    except (ValueError, KeyError) as error:
        raise OperatorError(
            f"lm-eval has no model class {engine!r}: choose another engine ({one_line(error)})"
        ) from error
    return model_class


def engine_trouble(engine: str) -> str:
    """Return why this interpreter cannot import lm-eval's class of an engine, or the hf class that builds the requests of
    every engine; "" if it can. Takes as long as importing them.
    """
    try:
        import_engine(engine)
        importlib.import_module("lm_eval.models.huggingface")
    except Exception as error:  # noqa: BLE001 (whatever a library raises while it is imported is the answer)
        return one_line(error)
    return ""


def load_engine(
    model_path: str,
    options: ModelOptions,
    batch_size: int | Literal["auto"],
    *,
    gpus: int = 0,
    seed: int = 1234,
    phase: Callable[[str], None] = lambda _phase: None,
) -> Engine:
    """Import the engine and load the checkpoint; `device=None`: cuda if available, otherwise CPU.

    `seed`: of random values in loading, as lm_eval's torch seed: new rows of a larger tokenizer that comes with an adapter.

    Calls `phase("import")` and `phase("load")` as they begin. Raises UnfitError if fewer than `gpus` GPUs are visible, on a
    device that is not chosen or "cuda"; OperatorError if the model does not use them all, or needs a package that is not
    installed; BrokenWeightsError if its values are not those of a checkpoint.
    """
    started = time.monotonic()
    phase("import")
    import torch  # noqa: PLC0415

    check_gpus(torch, options.device, gpus)
    if options.engine == vllm.NAME:
        vllm.set_vllm_environment()
    model_class = import_engine(options.engine)
    if options.engine == ENDPOINT:
        seconds = time.monotonic() - started
        phase("load")
        return endpoint.load_endpoint(model_class, model_path, options, import_seconds=seconds)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    imported = time.monotonic()
    phase("load")
    if options.engine == vllm.NAME:
        return vllm.load_vllm(model_class, model_path, options, gpus=gpus, import_seconds=imported - started)
    has_gpu = torch.cuda.is_available()
    device = options.device or ("cuda" if has_gpu else "cpu")
    arguments = {**spread_arguments(options, gpus, device), "pretrained": model_path}
    torch.manual_seed(seed)
    try:
        with weights.loaded_whole(model_class):
            lm = model_class.create_from_arg_obj(
                arguments, {"batch_size": batch_size, "max_batch_size": None, "device": device}
            )
    # such as a quantiser's package or an unknown argument: all nodes share the interpreter and the arguments
    except (ImportError, TypeError, AttributeError) as error:
        raise OperatorError(f"the model does not load by [trial] python: {one_line(error)}") from error
    weights.check_module(getattr(lm, "model", None))
    on_gpu = has_gpu and not device.startswith("cpu")
    if on_gpu:
        check_spread(bytes_by_device(getattr(lm, "model", None)), options, gpus)
        torch.cuda.synchronize()
    loaded = Loaded(
        devices=torch.cuda.get_device_name(0) if on_gpu else device,
        gpus=torch.cuda.device_count() if on_gpu else 0,
        import_seconds=imported - started,
        load_seconds=time.monotonic() - imported,
    )
    return HarnessEngine(lm, options, loaded)


def check_gpus(torch: Any, device: str | None, gpus: int) -> None:
    """Raise if a trial on `gpus` GPUs would silently run on the CPU, or on fewer.

    UnfitError: the node is at fault; OperatorError: this torch cannot use GPUs on any node.
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


# --- several GPUs: a trial that holds k uses k, or fails at once and says what to set -----------------------------------


def spread_arguments(options: ModelOptions, gpus: int, device: str) -> dict[str, Any]:
    """Return lm-eval's arguments for the model on `gpus` GPUs: `hf` spreads its layers over several.

    They are those of `lm_eval --model_args parallelize=True`. With only `device_map`, lm-eval would load by it and then move
    the whole model to the first GPU.
    """
    arguments = dict(options.model_args)
    if gpus > 1 and options.engine in HF_ENGINES and not device.startswith("cpu"):
        arguments.setdefault("parallelize", True)
    return arguments


def bytes_by_device(model: Any) -> dict[str, int]:
    """Return device, such as "cuda:0" -> bytes of the parameters there; empty for anything but a torch module."""
    parameters = getattr(model, "parameters", None)
    found: Counter[str] = Counter()
    for parameter in parameters() if callable(parameters) else ():
        found[str(parameter.device)] += parameter.numel() * parameter.element_size()
    return dict(found)


def check_spread(devices: Mapping[str, int], options: ModelOptions, gpus: int) -> None:
    """Raise OperatorError if a model leaves GPUs of its trial without weights, or weights off them.

    `devices`: from `bytes_by_device`; empty if the engine exposes no model, which is not checked. `gpus`: held by the trial's
    job; 0 on CPU slots.
    """
    if gpus == 0 or not devices:
        return
    outside = sum(size for name, size in devices.items() if name.partition(":")[0] in NOT_ON_GPUS)
    device_map = options.model_args.get("device_map")
    by_hand = options.model_args.get("max_cpu_memory") or isinstance(device_map, Mapping)
    if outside and not by_hand:
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
