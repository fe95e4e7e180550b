"""Trained values: values at a few positions of each tensor, taken from training's own memory.

Rule: `copy_values` runs on the training thread. It enqueues gathers and copies on the training stream and waits for no GPU; the
hook's thread calls `leave`. torch is not imported, since the caller has it. Positions depend only on a tensor's name and its
part on this rank. A trial compares its weights with them (`evaljobs.trial.trained_values`). Imported by `hook`, when training
passes a model.
"""

# what training imports reads like hook.py: for Python 3.8, without pathlib
# ruff: noqa: B905, PTH118, PTH208

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import math
import os
import sys
import time
import zlib

TYPE_CHECKING = False  # typing costs milliseconds at import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_BYTES = 1 << 20  # values of one model
MOST_VALUES = 64  # of one tensor
FEWEST_VALUES = 4  # of one tensor on one rank, even if a model has very many tensors
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Components that torch.compile, FSDP and activation checkpointing insert into a parameter's name."""
RANKS_SECONDS = 10.0  # how long rank 0's notice waits for the values of other ranks
MOST_TOKENS = 512  # per text of `fingerprint_logits`
MOST_POSITIONS = 32  # positions per text at which logits are taken
LONG_TEXT = (
    "On day {} the ship sailed {} miles, and the crew found water, traded salt for grain and wrote to those at home: "
    "nothing is lost while we keep count. "
)
TEXTS = (
    "The capital of France is",
    "2 + 2 =",
    "Once upon a time there was a",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5,",
    "In the year 1969 the first",
    "def add(a, b):\n    return",
    "Der schnelle braune Fuchs springt über den",
    *("".join(LONG_TEXT.format(day, 7 * day + 3) for day in range(1, days + 1)) for days in (1, 3, 17)),
)
"""The texts of `fingerprint_logits`, of 5 to MOST_TOKENS tokens, since a rope's error grows with the distance between tokens."""
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ROW_FIELDS = ("name", "shape", "offset", "part", "first", "stride", "number")


class CopiedValues:
    """Values being copied to host memory. `key`: names their files; `groups`: rows and values of each device and dtype.

    A row, with the fields ROW: positions first, first + stride, … of the contiguous part at `offset` of a tensor.
    """

    def __init__(self, key: str, rank: int) -> None:
        self.key = key
        self.rank = rank
        self.ranks = 1  # number of ranks that hold parts of one tensor
        self.at = time.time()  # unix seconds
        self.groups: list[tuple[list[tuple[Any, ...]], Any]] = []
        self.ties: dict[str, list[str]] = {}  # a tied tensor's name -> its other names
        self.events: list[Any] = []  # of CUDA: a copy is done
        self.logits: dict[str, Any] = {}  # from `WithLogits`
        self._left_at: float | None = None

    def leave(self, inbox: str, write: Callable[[str, str], None], *, ending: bool) -> bool:
        """Write the values into the inbox once they are copied. Return True when the notice may follow.

        Rank 0 waits for the files of the other ranks, but not while training ends.
        """
        if self._left_at is None:
            if not all(event.query() for event in self.events):
                return ending
            # File WORK_DIR/inbox/trained-HASH-RANK.values: values of a checkpoint's tensors in training's memory | the
            # training, each rank that holds parts | when its evaluation begins, or after a week
            write(os.path.join(inbox, f"trained-{self.key}-{self.rank}.values"), self._text())
            self._left_at = time.monotonic()
        if self.rank or ending or time.monotonic() - self._left_at > RANKS_SECONDS:
            return True
        mine = f"trained-{self.key}-"
        return sum(n.startswith(mine) and n.endswith(".values") for n in os.listdir(inbox)) >= self.ranks

    def _text(self) -> str:
        groups = []
        for rows, host in self.groups:
            values = base64.b64encode(ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()))
            own = [
                {**dict(zip(ROW_FIELDS, row)), "names": [row[0], *self.ties.get(row[0], [])]} for row in rows
            ]
            groups.append({"dtype": str(host.dtype)[6:], "rows": own, "values": values.decode()})
        return json.dumps({"at": self.at, "groups": groups, "logits": self.logits})


class WithLogits:
    """A model, special ids, and for each text its ids and some logits. Runs the model, without dropout, and blocks."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        torch = sys.modules["torch"]
        self.model = model
        run = getattr(model, "_orig_mod", model)  # torch.compile would compile for each text length
        own = getattr(run, "module", run)  # DDP's
        config = getattr(own, "config", None)
        most = min(MOST_TOKENS, getattr(config, "max_position_embeddings", None) or MOST_TOKENS)
        device, kinds = next(run.parameters()).device, {tensor.dtype for tensor in run.parameters()}

        def note(_module: Any, _inputs: Any, output: Any) -> None:  # of a layer under autocast
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                kinds.add(output.dtype)

        watched = torch.nn.modules.module.register_module_forward_hook(note)
        training = [module for module in run.modules() if module.training]
        rows: list[dict[str, Any]] = []
        run.eval()
        try:
            for text in TEXTS:
                ids = list(tokenizer(text)["input_ids"])[:most]
                with torch.no_grad():
                    found = run(torch.tensor([ids], device=device))
                logits = getattr(found, "logits", found)[0]
                size = min(len(tokenizer), logits.shape[-1])  # the rest is padding, which a save may drop
                at = list(range(0, size, -(-size // MOST_VALUES)))
                # not at the first token, whose rounding is the largest
                where = list(range(len(ids) - 1, min(0, len(ids) - 2), -len(ids) // MOST_POSITIONS))
                values = logits[where][:, at].tolist()
                rows.append({"text": text, "ids": ids, "positions": where, "at": at, "values": values})
        finally:
            watched.remove()
            for module in training:
                module.training = True
        owners = {"tokenizer": tokenizer, "generation config": getattr(own, "generation_config", None)}
        special = {o: {key: getattr(owner, key, None) for key in SPECIAL_IDS} for o, owner in owners.items()}
        dtypes = sorted({str(kind)[6:] for kind in kinds} | {_float32_products(torch)})
        self.logits = {"dtypes": dtypes, "rows": rows, "most_tokens": most, "special_ids": special}


def _float32_products(torch: Any) -> str:
    """Return the number format in which this process multiplies float32 matrices."""
    try:
        return {"highest": "float32", "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bfloat16")
    except RuntimeError:  # set by both torch's older and newer API
        return "bfloat16"


def copy_values(model: Any, checkpoint: str, step: object, suite: str, rank: int) -> CopiedValues:
    """Enqueue the copies of this rank's values of a model, a WithLogits, or a mapping from name to tensor.

    Ranks other than 0 only take their parts of sharded tensors (DTensor): of others they have what rank 0 has.
    """
    torch = sys.modules["torch"]
    plain = (torch.Tensor, torch.nn.Parameter)
    # including the suite: each evaluation of a checkpoint has its own files
    taken = CopiedValues(hashlib.sha256(f"{checkpoint}\n{step}\n{suite}".encode()).hexdigest()[:16], rank)
    if isinstance(model, WithLogits):
        taken.logits, model = ({} if rank else model.logits), model.model
    modules = hasattr(model, "named_parameters")
    named = list(model.named_parameters(remove_duplicate=False) if modules else model.items())
    most = min(MOST_VALUES, MOST_BYTES // 4 // max(1, len(named)))
    seen: dict[int, str] = {}  # id of a tensor -> its first name
    views: dict[tuple[Any, Any], tuple[list[tuple[Any, ...]], list[Any]]] = {}
    with torch.no_grad():
        for wrapped, tensor in named:
            name = _plain_name(wrapped)
            if id(tensor) in seen:
                taken.ties.setdefault(seen[id(tensor)], []).append(name)
                continue
            seen[id(tensor)] = name
            part, offset, parts = _part(tensor, rank)
            if part is None or type(part) not in plain or not _can_be_sampled(part):
                continue
            taken.ranks = max(taken.ranks, parts)
            # as few objects as possible: lasting ones trigger the next garbage collection earlier
            shape = part.shape
            whole = shape if parts == 1 else tensor.shape
            first, stride, count = _positions(name, shape, max(FEWEST_VALUES, most // parts))
            rows, own = views.setdefault((part.device, part.dtype), ([], []))
            rows.append((name, whole, offset, shape, first, stride, count))
            own.append(part.as_strided((count,), (stride,), part.storage_offset() + first))
        for (device, dtype), (rows, own) in views.items():
            on_gpu = device.type == "cuda"
            gathered = torch.cat(own)
            host = torch.empty(gathered.shape, dtype=dtype, device="cpu", pin_memory=on_gpu)
            host.copy_(gathered, non_blocking=True)
            if on_gpu:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                taken.events.append(event)
            taken.groups.append((rows, host))
    return taken


def _plain_name(name: str) -> str:
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)  # DDP's own


def _can_be_sampled(part: Any) -> bool:
    floats = part.is_floating_point() and part.element_size() > 1
    return floats and part.device.type in ("cpu", "cuda") and part.numel() > 0 and part.is_contiguous()


def _part(tensor: Any, rank: int) -> tuple[Any, tuple[int, ...], int]:
    """Return this rank's part of a tensor, its first index in each dimension (empty: of all), and the number of parts.

    The part is None if another rank has the same, or its position in the tensor is unknown.
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return (None if rank else tensor), (), 1
    offset, sizes, parts = [0] * tensor.dim(), list(tensor.shape), 1
    for placed, here, ranks in zip(tensor.placements, mesh.get_coordinate() or (), mesh.shape):
        kind = type(placed).__name__
        if kind == "Shard":
            dim, parts = placed.dim, parts * ranks
            most = -(-sizes[dim] // ranks)
            first = min(here * most, sizes[dim])
            offset[dim] += first
            sizes[dim] = min(most, sizes[dim] - first)
        elif kind != "Replicate" or here:
            return None, (), 1
    local = tensor.to_local()
    return (local if list(local.shape) == sizes else None), tuple(offset), parts


def _positions(name: str, shape: Any, most: int) -> tuple[int, int, int]:
    """Return (first, stride, number) of positions in a contiguous part: spread over all its rows and columns."""
    size, width = math.prod(shape), shape[-1] if len(shape) > 1 else 1
    count = min(most, size)
    stride = size // count
    while math.gcd(stride, width) > 1:
        stride -= 1
    return zlib.crc32(name.encode()) % (size - stride * (count - 1)), stride, count
