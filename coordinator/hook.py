"""The module that a training process imports to announce saved checkpoints. Never raises, never blocks.

Rule: standard library only. `notify` puts a notice on a list and returns. A background thread
leaves it as a file in the inbox of the work folder, and keeps it until the folder takes it. Each
kind of fault is one warning. Only rank 0 sends notices. The daemon's `[watch]` folders make up for a lost
notice. Trainer callbacks are made on request, from the trainer's classes. All of it is one file, which trainings may copy.
"""

# pathlib costs milliseconds at import:
# ruff: noqa: PTH100, PTH102, PTH105, PTH108, PTH110, PTH116, PTH118, PTH123, PTH208

from __future__ import annotations

import _thread
import atexit
import contextlib
import gc
import itertools
import json
import os
import sys
import threading
import time
from collections import deque

TYPE_CHECKING = False  # typing costs milliseconds at import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LOOK_SECONDS = 0.2  # interval at which the thread looks for new notices, and retries undelivered ones
FLUSH_SECONDS = 5.0  # longest wait for undelivered notices at the end of the training process
PIN_GRACE_SECONDS = 120.0  # an announced checkpoint counts as pinned this long before the daemon's pin
MOST_NOTICES = 10_000  # undelivered notices to keep; any further one is refused
# File CHECKPOINT/.evalspan-pin-ID: an evaluation needs the checkpoint: rotation leaves it | the coordinator | at the
# evaluation's end
PIN_PREFIX = ".evalspan-pin-"
MOST_PIN = 1 << 14  # characters of a pin: an inode and a path
# File CHECKPOINT/evalspan.sums.json: hashes of the files, with `notify(sums=True)` | the training | with the checkpoint
SUMS_FILE = "evalspan.sums.json"  # staging checks its copies against it (`staging.fingerprint.SAVE_SUMS`)
SUMMED_SUFFIXES = (".safetensors", ".bin", ".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
UNSUMMED_FILES = ("optimizer", "scheduler", "rng_state", "random_states", "training_args", "trainer_state")
SUM_BLOCK = 8 << 20  # bytes read at once; after each block the thread checks whether training ends

HEARTBEATS_VARIABLE = "EVALSPAN_HEARTBEATS"  # names the file read by `evalspan supervise`
BEAT_SECONDS = 2.0  # between two writes of heartbeats
MOST_BEATS = 1000  # steps kept between two writes

_numbers = itertools.count()
_warned: set[str] = set()  # kinds of faults: texts before their values are filled in
_announced: dict[str, float] = {}  # checkpoint -> time.monotonic() of its notice; expires


class _Courier:
    """Undelivered notices, and the thread that delivers them.

    `take` does not wake the thread: on a busy machine that costs the caller up to 10 ms, since it may lose the GIL and its
    core. The thread polls instead. A notice stays listed until delivered.
    """

    def __init__(self) -> None:
        self.notices: deque[dict[str, object]] = deque()
        self.beats: deque[str] = deque(maxlen=MOST_BEATS)
        self.beaten = float("-inf")  # time.monotonic() of the last write
        self.hurry = threading.Event()
        self.starting = threading.Lock()
        self.started = False
        self.ending = False
        self.gave_up = False

    def take(self, notice: dict[str, object]) -> None:
        if len(self.notices) >= MOST_NOTICES:
            raise OverflowError(f"{MOST_NOTICES} notices are already waiting")
        self.notices.append(notice)
        self.start()

    def start(self) -> None:
        if not self.started:
            with self.starting:
                if not self.started:
                    _flush_in_multiprocessing()
                    _thread.start_new_thread(self._run, ())  # threading.Thread.start would wait for it
                    self.started = True

    def flush(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        self.hurry.set()
        while self.notices and self.started and time.monotonic() < deadline:
            time.sleep(0.005)
        self.hurry.clear()
        return not self.notices

    def _run(self) -> None:
        while True:
            while not self.notices:
                self.hurry.wait(LOOK_SECONDS)
                self._leave_beats()
            if not self._round():
                time.sleep(LOOK_SECONDS)
            self._leave_beats()

    def _leave_beats(self) -> None:
        if not self.beats or time.monotonic() - self.beaten < BEAT_SECONDS:
            return
        self.beaten = time.monotonic()
        text = "".join(self.beats.popleft() for _ in range(len(self.beats)))
        try:
            with open(os.environ[HEARTBEATS_VARIABLE], "a", encoding="utf-8") as file:
                file.write(text)
        except (OSError, KeyError) as error:
            _warn("heartbeats cannot be written: {!r}", error)

    def _round(self) -> bool:
        """Deliver what can be delivered, oldest first. Return False if no work folder accepted any."""
        away: set[str] = set()
        at, before = 0, len(self.notices)
        while at < len(self.notices):
            notice = self.notices[at]
            folder = str(notice["_work_dir"])
            if folder not in away and self._is_dealt_with(folder, notice):
                del self.notices[at]  # still its index: `take` appends
                continue
            away.add(folder)  # keep the order of its notices
            at += 1
        return at < before

    def _is_dealt_with(self, folder: str, notice: dict[str, object]) -> bool:
        try:
            if not os.path.exists(folder):  # mistyped, or its storage is unavailable: do not create it here
                _warn(
                    "the work folder {} does not exist: notices wait for it until training ends; fix work_dir or create the folder",
                    folder,
                )
                return False
            if not self._left_values(folder, notice):
                return False
            if notice["_rank"]:
                return True
            if notice["_sums"]:
                notice["_sums"] = False  # once, even if the folder accepts the notice later
                self._sum(str(notice["checkpoint"]))
            write_notice(
                folder, json.dumps({key: notice[key] for key in notice if key[0] != "_"}, sort_keys=True)
            )
        except OSError as error:
            _warn("no notice can be written to {}, and they wait until training ends: {!r}", folder, error)
            return False
        except Exception as error:  # noqa: BLE001 (training must go on)
            _warn(
                "a notice is lost ({!r}): the daemon finds the checkpoint if [watch] folders names its place",
                error,
            )
        return True

    def _left_values(self, folder: str, notice: dict[str, object]) -> bool:
        """Leave trained values before the notice. Return True when it may follow. A failure does not stop it."""
        taken: Any = notice["_taken"]
        try:
            if taken is None:
                return True
            inbox, mode = _inbox(folder)
            return bool(taken.leave(inbox, lambda place, text: _write(place, text, mode), ending=self.ending))
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 (training must go on)
            _warn("{} is announced without trained values: {!r}", notice["checkpoint"], error)
            return True

    def _sum(self, checkpoint: str) -> None:
        """Write the files' hashes before the notice is sent; a failure does not stop the notice."""
        try:
            _write_sums(checkpoint, lambda: self.ending)
        except Exception as error:  # noqa: BLE001 (training must go on)
            _warn("{} is announced without sums: {!r}", checkpoint, error)


_courier = _Courier()


def notify(
    checkpoint: str | os.PathLike[str],
    step: int | None = None,
    suite: str = "default",
    *,
    work_dir: str | os.PathLike[str] | None = None,
    priority: int = 0,
    rank: int | None = None,
    sums: bool = False,
    fingerprint: object = None,
    final: bool = False,
) -> bool:
    """Announce that `checkpoint` is durable on shared storage. Return True if the notice was queued.

    `suite`: a shipped suite, or one that the daemon's `[watch] suites` list; "default" is `[watch] suite`. `work_dir`: the
    daemon's work folder, which is not created here (default: $EVALSPAN_WORK_DIR). `rank`: only 0 announces (default: $RANK,
    $SLURM_PROCID, $PMI_RANK or $OMPI_COMM_WORLD_RANK). `sums`: the thread first hashes the files (needs xxhash) and writes
    evalspan.sums.json beside them, so that staging detects later corruption. `fingerprint`: the model that was saved, a
    mapping from name to tensor, or `fingerprint_logits`: trials compare the weights they load with values at a few positions
    of each tensor. In that case call it on each rank, before the model changes. `final`: the training's last checkpoint,
    evaluated on every task regardless of `every`. Returns in well under 5 ms; never raises.
    """
    collects = gc.isenabled()
    try:
        rank = rank if rank is not None else _rank()
        if rank != 0 and fingerprint is None:
            return False
        if fingerprint is not None:
            gc.disable()  # a full collection takes 100 ms, and would often begin while values are taken
        folder = os.fsdecode(work_dir if work_dir is not None else os.environ.get("EVALSPAN_WORK_DIR", ""))
        if not folder:
            _warn("no work folder: pass work_dir or set EVALSPAN_WORK_DIR; the checkpoint is not announced")
            return False
        where = os.path.abspath(os.fsdecode(checkpoint))
        taken = _taken(fingerprint, where, step, suite, rank)
        notice: dict[str, object] = {
            "checkpoint": where,
            "step": step if step is None else int(step),
            "suite": str(suite),
            "priority": int(priority),
            "noticed_at": time.time(),
            **({"final": True} if final else {}),  # daemons of before know no such field
            "_work_dir": os.path.abspath(folder),
            "_sums": bool(sums),
            "_taken": taken,
            "_rank": rank,
        }
        if taken is not None:
            notice["trained_values"] = taken.key
        if rank != 0:
            if taken is not None and taken.groups:
                _courier.take(notice)
            return False
        now = time.monotonic()
        for old in [place for place, at in list(_announced.items()) if now - at >= PIN_GRACE_SECONDS]:
            _announced.pop(old, None)
        _announced[where] = now
        _courier.take(notice)
    except Exception as error:  # noqa: BLE001 (training must go on)
        _warn("checkpoint {!r} of step {!r} is not announced: {!r}", checkpoint, step, error)
        return False
    finally:
        if collects:
            gc.enable()
    return True


def fingerprint_logits(model: object, tokenizer: object) -> object:
    """Return the model with token ids and logits of eleven fixed texts, for `notify(…, fingerprint=…)`. Never raises, but
    blocks.

    Trials compare ids exactly, and logits within what dtypes and kernels explain: this also detects another tokenizer, end
    token, rope or activation, and renamed or fused tensors. It runs the model eleven times without dropout or gradients; call
    it on each rank of a sharded model. If it fails, one line says so, and only the model is returned.
    """
    try:
        from coordinator import trained_values  # noqa: PLC0415 (for trainings that pass a model)

        return trained_values.WithLogits(model, tokenizer)
    except Exception as error:  # noqa: BLE001 (training must go on)
        _warn("the fingerprint has no logits: {!r}", error)
        return model


def _taken(model: object, checkpoint: str, step: object, suite: str, rank: int) -> Any:
    """Return trained values of a model, in transit; None without a model, or on failure. Values taken earlier are kept."""
    if model is None:
        return None
    try:
        from coordinator import trained_values  # noqa: PLC0415 (for trainings that pass a model)

        if isinstance(model, trained_values.CopiedValues):
            return model
        return trained_values.copy_values(model, checkpoint, step, suite, rank)
    except Exception as error:  # noqa: BLE001 (training must go on)
        _warn("{} is announced without trained values: {!r}", checkpoint, error)
        return None


def heartbeat(step: int, loss: float | None = None, *, rank: int | None = None) -> None:
    """Tell `evalspan supervise` that a step is done, so that a silent training is not mistaken for a hanging one. Never
    raises.

    `loss`: a number that the loop has on the host, for the alert of a loss spike; a tensor on a GPU would block. `rank`: as
    in `notify`. Without supervision it does nothing.
    """
    try:
        if HEARTBEATS_VARIABLE in os.environ and (rank if rank is not None else _rank()) == 0:
            _courier.beats.append(
                json.dumps({"step": int(step), "loss": loss if loss is None else float(loss)}) + "\n"
            )
            _courier.start()
    except Exception as error:  # noqa: BLE001 (training must go on)
        _warn("no heartbeat of step {!r}: {!r}", step, error)


def pinned(checkpoint: str | os.PathLike[str]) -> bool:
    """Return whether an evaluation still needs this checkpoint. Call it before rotation deletes one. Never raises.

    The daemon leaves a pin in each accepted checkpoint and removes it at the evaluation's end. A pin that was copied with its
    folder does not pin the copy. A checkpoint announced by this process counts as pinned until the daemon's pin has been
    seen, for at most two minutes (PIN_GRACE_SECONDS).
    """
    try:
        where = os.path.abspath(os.fspath(checkpoint))
        with os.scandir(where) as entries:
            if any(e.name.startswith(PIN_PREFIX) and _is_of(e.path, where) for e in entries):
                _announced.pop(where, None)
                return True
    except (OSError, TypeError, ValueError):
        return False
    at = _announced.get(where)
    return at is not None and time.monotonic() - at < PIN_GRACE_SECONDS


def pin_text(folder: str | os.PathLike[str]) -> str:
    """Return a pin's contents: the inode and the path of the checkpoint's folder. Raise OSError."""
    return f"{os.stat(folder).st_ino} {os.path.realpath(folder)}"


def _is_of(pin: str, folder: str) -> bool:
    """Return whether the pin names this folder. One that is empty or unreadable counts where it is."""
    try:
        # others may write to the folder, so links are not followed and pipes not waited for
        descriptor = os.open(pin, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8") as file:
            inode, _, place = file.read(MOST_PIN).partition(" ")
        return inode in ("", str(os.stat(folder).st_ino)) or place == os.path.realpath(folder)
    except (OSError, ValueError):
        return True


def rotate(folder: str | os.PathLike[str], keep: int, prefix: str = "checkpoint-") -> list[str]:
    """Delete the oldest unpinned `prefix<step>` folders of `folder` beyond `keep`, and return those deleted.

    Keeps the newest. A pinned checkpoint counts towards `keep`; a later call deletes it. Never raises.
    """
    gone = []
    try:
        import shutil  # noqa: PLC0415 (milliseconds at import)

        root = os.fspath(folder)
        names = (name for name in os.listdir(root) if name.startswith(prefix))
        saved = sorted((int(name[len(prefix) :]), name) for name in names if name[len(prefix) :].isdecimal())
        left = len(saved)
        for _step, name in saved[:-1]:
            path = os.path.join(root, name)
            if left <= keep:
                break
            if not pinned(path):
                shutil.rmtree(path, ignore_errors=True)
                if not os.path.lexists(path):
                    gone.append(path)
                    left -= 1
    except Exception as error:  # noqa: BLE001 (training must go on)
        _warn("checkpoints in {!r} are not rotated: {!r}", folder, error)
    return gone


def flush(seconds: float = FLUSH_SECONDS) -> bool:
    """Wait at most `seconds` for delivery of all notices. Return False if some remain. Never raises."""
    return _courier.flush(seconds)


def _flush_at_exit() -> None:
    if _courier.gave_up:  # atexit, after the same call by multiprocessing
        return
    _courier.ending = True  # a notice without sums is better than none
    if not _courier.flush(FLUSH_SECONDS):
        _courier.gave_up = True
        left = list(_courier.notices)
        _warn(
            "training ends with undelivered notices: {} for work folder {}; the daemon finds the checkpoints if "
            "[watch] folders names their place",
            len(left),
            ", ".join(sorted({str(notice["_work_dir"]) for notice in left})),
        )


def _flush_in_multiprocessing() -> None:
    """Flush in children forked by multiprocessing (Lightning's ddp_fork), which skip atexit."""
    try:
        finalize = getattr(sys.modules.get("multiprocessing.util"), "Finalize", None)
        if finalize is not None:
            finalize(None, _flush_at_exit, exitpriority=0)
    except Exception as error:  # noqa: BLE001 (training must go on)
        _warn("the end of this process may lose notices: {!r}", error)


def _forget_after_fork() -> None:
    """Reset after a fork: the child has no courier thread, and the lock may be held."""
    global _courier  # noqa: PLW0603 (the child's own)
    _courier = _Courier()


atexit.register(_flush_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def _rank() -> int:
    for name in ("RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return 0


def _warn(text: str, *values: object) -> None:
    """Write `text` with its `values` to standard error, once per text."""
    if text not in _warned:
        _warned.add(text)
        with contextlib.suppress(
            Exception
        ):  # neither a closed stderr nor a faulty repr may reach the trainer
            sys.stderr.write(f"evalspan: {text.format(*values)}\n")


def _write_sums(checkpoint: str, ending: Callable[[], bool]) -> None:
    """Hash the files that a trial may read, by reading them back (mostly from the page cache)."""
    import xxhash  # noqa: PLC0415 (optional, and never at import)

    table = {}
    block = memoryview(bytearray(SUM_BLOCK))
    with os.scandir(checkpoint) as entries:
        names = sorted(e.name for e in entries if e.is_file() and e.name.endswith(SUMMED_SUFFIXES))
    names = [name for name in names if not name.startswith((*UNSUMMED_FILES, SUMS_FILE))]
    for name in names:
        digest = xxhash.xxh3_128()
        with open(os.path.join(checkpoint, name), "rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(block[:count])
                if ending():
                    return
        table[name] = digest.hexdigest()
    _write(os.path.join(checkpoint, SUMS_FILE), json.dumps({"xxh3_128": table}))


def write_notice(work_dir: str, text: str) -> str:
    """Write a notice (JSON) into the inbox of this work folder, and return its file. Raise OSError.

    Everything in an inbox is written here (`coordinator.intake.inbox` reads it). Names sort by time.
    """
    inbox, mode = _inbox(work_dir)
    name = f"{time.time_ns()}-{os.uname().nodename}-{os.getpid()}-{next(_numbers)}.json"
    _write(os.path.join(inbox, name), text, mode)
    return os.path.join(inbox, name)


def _inbox(work_dir: str) -> tuple[str, int]:
    """Return the inbox of a work folder, created if missing, and the mode of its files. Raise OSError."""
    inbox = os.path.join(work_dir, "inbox")
    with contextlib.suppress(FileExistsError):
        os.mkdir(inbox, 0o700)
    # the daemon must be able to read it whatever the umask, even if root wrote it; the folder's mode excludes others
    shown = 0o044 if os.geteuid() == 0 else os.stat(inbox).st_mode & 0o044
    return inbox, shown | 0o600


def _write(place: str, text: str, mode: int | None = None) -> None:
    """Write a file atomically. `mode` None: by the umask."""
    try:
        with open(f"{place}.tmp", "w", encoding="utf-8") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{place}.tmp", place)
    except OSError as error:
        error.filename = error.filename or place  # a full disk names none
        with contextlib.suppress(OSError):
            os.unlink(f"{place}.tmp")
        raise


def transformers_callback(
    suite: str = "default",
    work_dir: str | os.PathLike[str] | None = None,
    *,
    keep: int | None = None,
    sums: bool = False,
    fingerprint: bool = False,
) -> object:
    """Return a `transformers.TrainerCallback` that announces saved checkpoints. Imports transformers.

    `keep`: rotate here and honour pins; leave `save_total_limit` unset then, since Trainer's rotation ignores pins. `sums`,
    `fingerprint` (of the trained model): as in `notify`. The tokenizer must be saved with the model: pass it to Trainer as
    `processing_class`.
    """
    from transformers import TrainerCallback  # noqa: PLC0415 (the trainer has it loaded)

    class EvalspanCallback(TrainerCallback):  # type: ignore[misc]
        def on_log(
            self, _args: object, state: Any, *_more: object, logs: Any = None, **_others: object
        ) -> None:
            heartbeat(state.global_step, (logs or {}).get("loss"))

        def on_step_end(self, _args: object, state: Any, *_more: object, **_others: object) -> None:
            heartbeat(state.global_step)

        def on_save(self, args: object, state: object, _control: object, **more: object) -> None:
            rank = 0 if getattr(state, "is_world_process_zero", True) else max(1, _rank())
            output, step = getattr(args, "output_dir", "."), getattr(state, "global_step", None)
            saved = os.path.join(output, f"checkpoint-{step}")
            model = more.get("model") if fingerprint else None
            notify(saved, step, suite, work_dir=work_dir, rank=rank, sums=sums, fingerprint=model)
            if keep is not None and rank == 0:
                rotate(output, keep)

    return EvalspanCallback()


def lightning_callback(
    export: object,
    suite: str = "default",
    work_dir: str | os.PathLike[str] | None = None,
    *,
    fingerprint: Callable[[Any], object] | None = None,
) -> object:
    """Return a Lightning `Callback` that exports and announces whenever Lightning saves. Imports lightning.

    lm-eval cannot load Lightning's file: `export(module, step) -> folder` writes the Hugging Face folder to announce. It runs
    on rank 0 before the next optimizer step, with the checkpoint's weights. `fingerprint(module)`: what `notify` accepts,
    such as `lambda module: module.model`.
    """
    try:
        from lightning.pytorch import Callback  # noqa: PLC0415
    except ImportError:
        from pytorch_lightning import Callback  # noqa: PLC0415

    def _model_in(module: object) -> object:
        try:
            return None if fingerprint is None else fingerprint(module)
        except Exception as error:  # noqa: BLE001 (training must go on)
            _warn("the callback's `fingerprint` failed, and nothing is compared with training: {!r}", error)
            return None

    class EvalspanCallback(Callback):  # type: ignore[misc]
        saved: int | None = None

        def on_save_checkpoint(self, trainer: object, _module: object, _checkpoint: object) -> None:
            self.saved = getattr(trainer, "global_step", 0)

        def on_train_batch_start(self, trainer: object, module: object, *_more: object) -> None:
            heartbeat(getattr(trainer, "global_step", 0))
            step, self.saved = self.saved, None
            if step is not None and getattr(trainer, "is_global_zero", True):
                more = {"work_dir": work_dir, "rank": 0, "fingerprint": _model_in(module)}
                _export_and_notify("", step, suite, export, (module, step), **more)

        on_fit_end = on_train_batch_start

    return EvalspanCallback()


def on_dcp_saved(
    saving: object,
    checkpoint: str,
    step: int,
    suite: str = "default",
    *,
    export: object = None,
    **more: object,
) -> None:
    """Announce a `dcp.async_save` once it is durable: at its future's completion, not its start.

    `saving`: the return value of async_save (a Future, or an AsyncSaveResponse). `export(checkpoint) -> folder` writes the
    Hugging Face folder to announce; it runs on rank 0 in the thread that completed the save. `more`: arguments of `notify`;
    `fingerprint` is taken now, and on each rank.
    """

    def fire(done: object) -> None:
        failed = getattr(done, "exception", lambda: None)()
        if failed is not None:
            _warn("the save of {} failed and is not announced: {!r}", checkpoint, failed)
            return
        _export_and_notify(checkpoint, step, suite, export, (checkpoint,), **more)

    try:
        if more.get("fingerprint") is not None:
            rank: Any = more.get("rank")
            rank = _rank() if rank is None else rank
            taken = _taken(more["fingerprint"], os.path.abspath(checkpoint), step, suite, rank)
            more["fingerprint"] = taken
            if rank != 0:
                notify(checkpoint, step, suite, **more)  # type: ignore[arg-type]  # leaves the values alone
        getattr(saving, "upload_completion", saving).add_done_callback(fire)  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001 (training must go on)
        _warn("the save of {} cannot be followed: {!r}", checkpoint, error)


def _export_and_notify(
    checkpoint: str,
    step: int | None,
    suite: str,
    export: object,
    arguments: tuple[object, ...],
    **more: object,
) -> None:
    """Call the user's `export`, if any, on rank 0 and announce the folder."""
    try:
        rank = more.get("rank")
        if (rank if rank is not None else _rank()) != 0:
            return
        folder = export(*arguments) if callable(export) else checkpoint
    except Exception as error:  # noqa: BLE001 (training must go on)
        _warn("the checkpoint of step {} could not be exported and is not announced: {!r}", step, error)
        return
    notify(folder, step, suite, **more)  # type: ignore[arg-type]
