"""Pickles that others wrote, read without any of their code. Called by `supervise.checkpoints` and `diagnosis.verdict`.

Rule: a stub stands for every class and function, so that no pickle can run anything.
"""

from __future__ import annotations

import pickle
from typing import IO, Any


class Stub(dict[Any, Any]):
    """Stands for every class and function of a pickle: keeps its state, and runs nothing."""

    def __init__(self, *_args: object, **_more: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)

    def append(self, *_items: object) -> None:
        """Of a class that derives from list or set: its items are not kept."""

    extend = add = append
    __hash__ = object.__hash__  # type: ignore[assignment]


class _Reader(pickle.Unpickler):
    def find_class(self, _module: str, _name: str) -> type[Stub]:
        return Stub

    def persistent_load(self, _id: object) -> None:
        return None


def read_pickle(file: IO[bytes]) -> Any:
    """Return what a pickle holds, without its tensors; None where it is no pickle, or cut off. OSError."""
    try:
        return _Reader(file).load()
    except OSError:
        raise
    except Exception:  # noqa: BLE001 (bytes that others wrote can raise anything)
        return None
