"""What a training process imports: tell evalspan that a checkpoint was saved. Never raises, never blocks.

Rule: standard library only; `notify` puts a notice on a queue and returns; a background thread delivers it (to the
daemon's Redis stream where that answers, else as a file in the spool folder). Whatever goes wrong is one warning.
Only rank 0 speaks. The daemon's `[watch]` folders see what a lost notice would have told.
It does not know: suites, evaluations, torch. (Trainer callbacks are made on request, from classes the trainer brings.)
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import sys
import threading
import time
import uuid

FLUSH_SECONDS = 5.0  # the most that the end of the training process waits for undelivered notices
REDIS_SECONDS = 2.0
STREAM = "evalspan:checkpoints"
PIN_PREFIX = ".evalspan-pin-"

_notices: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
_thread: threading.Thread | None = None
_lock = threading.Lock()
_warned = False


def notify(
    checkpoint: str | os.PathLike[str],
    step: int | None = None,
    suite: str = "default",
    *,
    work_dir: str | os.PathLike[str] | None = None,
    priority: int = 0,
    rank: int | None = None,
) -> bool:
    """Say that `checkpoint` is durable on shared storage; True where the notice was taken (delivery is later).

    `work_dir`: the daemon's work folder (default: $EVALSPAN_WORK_DIR). `rank`: speak only as 0 (default: $RANK or
    $SLURM_PROCID). Returns in well under 5 ms; never raises.
    """
    try:
        if (rank if rank is not None else _rank()) != 0:
            return False
        folder = os.fspath(work_dir if work_dir is not None else os.environ.get("EVALSPAN_WORK_DIR", ""))
        if not folder:
            _warn("no work folder: give work_dir or set EVALSPAN_WORK_DIR; the checkpoint is not announced")
            return False
        notice: dict[str, object] = {
            "checkpoint": os.path.abspath(os.fspath(checkpoint)),  # noqa: PTH100
            "step": step if step is None else int(step),
            "suite": str(suite),
            "priority": int(priority),
            "noticed_at": time.time(),
            "_work_dir": os.path.abspath(folder),  # noqa: PTH100
        }
        _notices.put(notice)
        _ensure_thread()
    except Exception as error:  # noqa: BLE001 (the training job is sacred)
        _warn(f"the checkpoint is not announced: {error!r}")
        return False
    return True


def pinned(checkpoint: str | os.PathLike[str]) -> bool:
    """Is this checkpoint still needed by an evaluation? Ask before rotation deletes it. Never raises."""
    try:
        with os.scandir(os.fspath(checkpoint)) as entries:
            return any(e.name.startswith(PIN_PREFIX) for e in entries)
    except OSError:
        return False


def flush(seconds: float = FLUSH_SECONDS) -> None:
    """Wait, at most `seconds`, until all notices so far are delivered."""
    with _lock:
        thread = _thread
    if thread is not None and thread.is_alive():
        _notices.put(None)
        thread.join(seconds)


def _rank() -> int:
    for name in ("RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0


def _warn(text: str) -> None:
    global _warned  # noqa: PLW0603 (one warning per process is the promise)
    if not _warned:
        _warned = True
        with contextlib.suppress(Exception):  # a closed stderr must not reach the trainer
            sys.stderr.write(f"evalspan: {text}\n")


def _ensure_thread() -> None:
    global _thread  # noqa: PLW0603
    with _lock:
        if _thread is None or not _thread.is_alive():
            if _thread is None:
                atexit.register(flush)
            _thread = threading.Thread(target=_deliver_all, name="evalspan-hook", daemon=True)
            _thread.start()


def _deliver_all() -> None:
    while True:
        notice = _notices.get()
        if notice is None:
            return
        try:
            _deliver(notice)
        except Exception as error:  # noqa: BLE001 (the training job is sacred)
            _warn(
                f"a notice could not be delivered ({error!r}); the [watch] folders will still see the checkpoint"
            )


def _deliver(notice: dict[str, object]) -> None:
    folder = str(notice.pop("_work_dir"))
    text = json.dumps(notice, sort_keys=True)
    if not _to_redis(folder, text):
        _to_spool(folder, text)


def _to_redis(folder: str, text: str) -> bool:
    """Through the stream, where the daemon's Redis answers and the redis package is there; False otherwise."""
    try:
        import redis  # noqa: PLC0415 (optional, and never at import)

        with open(os.path.join(folder, "redis", "address.json"), encoding="utf-8") as file:  # noqa: PTH118, PTH123
            address = json.load(file)
        where = (
            {"unix_socket_path": address["socket"]}
            if address.get("socket")
            else {"host": address["host"], "port": address["port"], "ssl": bool(address.get("tls"))}
        )
        client = redis.Redis(
            username=address.get("username"),
            password=address.get("password"),
            socket_timeout=REDIS_SECONDS,
            socket_connect_timeout=REDIS_SECONDS,
            **where,
        )
        client.xadd(STREAM, {"notice": text})
    except Exception:  # noqa: BLE001 (Redis away is no error: the spool folder takes it)
        return False
    return True


def _to_spool(folder: str, text: str) -> None:
    spool = os.path.join(folder, "spool")  # noqa: PTH118 (pathlib costs milliseconds at import)
    os.makedirs(spool, exist_ok=True)  # noqa: PTH103
    name = os.path.join(spool, f"{time.time_ns()}-{uuid.uuid4().hex}.json")  # noqa: PTH118
    with open(f"{name}.tmp", "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{name}.tmp", name)  # noqa: PTH105


def transformers_callback(suite: str = "default", work_dir: str | None = None) -> object:
    """A `transformers.TrainerCallback` that announces every saved checkpoint. Imports transformers when called."""
    from transformers import TrainerCallback  # noqa: PLC0415 (the trainer has it loaded)

    class EvalspanCallback(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: object, state: object, _control: object, **_more: object) -> None:
            step = getattr(state, "global_step", None)
            if getattr(state, "is_world_process_zero", True):
                output = getattr(args, "output_dir", ".")
                notify(os.path.join(output, f"checkpoint-{step}"), step, suite, work_dir=work_dir, rank=0)  # noqa: PTH118

    return EvalspanCallback()


def lightning_callback(suite: str = "default", work_dir: str | None = None) -> object:
    """A Lightning `Callback` that announces the folder its checkpoint plug-in exports. Imports lightning when called."""
    try:
        from lightning.pytorch import Callback  # noqa: PLC0415
    except ImportError:
        from pytorch_lightning import Callback  # noqa: PLC0415

    class EvalspanCallback(Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: object, _module: object) -> None:
            saved = getattr(getattr(trainer, "checkpoint_callback", None), "last_model_path", "")
            if saved and getattr(trainer, "is_global_zero", True):
                notify(saved, getattr(trainer, "global_step", None), suite, work_dir=work_dir, rank=0)

    return EvalspanCallback()


def on_dcp_saved(future: object, checkpoint: str, step: int, suite: str = "default", **more: object) -> None:
    """Announce a `dcp.async_save` once it is durable: its future's completion, not its start, fires the notice."""

    def fire(done: object) -> None:
        if getattr(done, "exception", lambda: None)() is None:
            notify(checkpoint, step, suite, **more)  # type: ignore[arg-type]

    try:
        future.add_done_callback(fire)  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001 (the training job is sacred)
        _warn(f"the save of {checkpoint} cannot be followed: {error!r}")
