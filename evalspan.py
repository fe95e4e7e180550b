"""evalspan in one module: the hook for training scripts, and evaluations from Python.

    import evalspan

    evalspan.notify(path, step=1000)                            # in training: needs the standard library alone
    found = evalspan.evaluate("ckpt/step-1000", "quickstart")   # needs the coordinator's packages
    rows = evalspan.series("ckpt")                              # pandas.DataFrame(rows)

Rule: the import costs what the hook costs. The names of `coordinator.api` are imported when they are used.
"""

from __future__ import annotations

from coordinator.hook import (
    fingerprint_logits,
    flush,
    heartbeat,
    lightning_callback,
    notify,
    on_dcp_saved,
    pinned,
    rotate,
    transformers_callback,
)

TYPE_CHECKING = False  # typing costs milliseconds at import
if TYPE_CHECKING:
    from typing import Any

    from coordinator.api import (
        EvalspanError,
        OperatorError,
        Progress,
        Results,
        Submission,
        dataframe,
        evaluate,
        evaluate_async,
        pause,
        prioritize,
        rescore,
        results,
        resume,
        series,
        submit,
        wait,
        wait_async,
    )

__all__ = [
    "EvalspanError",
    "OperatorError",
    "Progress",
    "Results",
    "Submission",
    "dataframe",
    "evaluate",
    "evaluate_async",
    "fingerprint_logits",
    "flush",
    "heartbeat",
    "lightning_callback",
    "notify",
    "on_dcp_saved",
    "pause",
    "pinned",
    "prioritize",
    "rescore",
    "results",
    "resume",
    "rotate",
    "series",
    "submit",
    "transformers_callback",
    "wait",
    "wait_async",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from coordinator import api  # noqa: PLC0415 (training imports the hook alone)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"evalspan.{name} needs the package {error.name}, which is not installed here: "
            "`pip install evalspan` brings it (`--no-deps` is enough for the hook alone)"
        ) from error
    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__


if __name__ == "__main__":
    from coordinator.__main__ import main

    main()
