"""Locates an error in a task: the task, its field or function, the document and its columns.

Rule: the traceback tells, so a healthy run costs nothing. Errors from a task's code and data are the operator's to fix,
including `sys.exit` in a metric; errors of the system (OSError, MemoryError) may go away. Called from `run` and `scoring`.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from evaljobs.errors import JobError, OperatorError, RetryError, one_line

TASK_EXCEPTIONS: Final = (Exception, SystemExit, KeyboardInterrupt)  # what the code of a task may raise
MOST_COLUMNS: Final = 8  # columns of a document named in a message
# methods of lm-eval's tasks -> their descriptions; those that begin with doc_to_ by their names
METHOD_WORDS: Final = {"download": "loading its data", "apply_filters": "its filters"}
METHOD_WORDS.update(
    (f"{split}_docs", "its split or process_docs") for split in ("training", "validation", "test", "fewshot")
)
METHOD_WORDS.update((name, name) for name in ("fewshot_context", "construct_requests", "process_results"))
# prefixes of code that is not a task's
NOT_OWN: Final = ("<", sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))


@contextlib.contextmanager
def locate_errors() -> Iterator[None]:
    """Raise an exception of a task within the context as a JobError that names its location. Others pass unchanged."""
    try:
        yield
    except JobError:
        raise
    except TASK_EXCEPTIONS as error:
        if not (message := _message(error)):
            raise
        raise (RetryError if isinstance(error, OSError | MemoryError) else OperatorError)(message) from error


def _message(error: BaseException) -> str:
    """Describe an error; "" if its traceback passes through no task of lm-eval."""
    from lm_eval.api.task import Task  # noqa: PLC0415

    task, field, row, seen = None, "", None, dict[str, Any]()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        method, values = frame.f_code.co_name, frame.f_locals
        seen |= values
        if method == "_compute_task_aggregations":
            task, field, row = values["task"], f"the aggregation of {values['metric']}", None
        elif isinstance(values.get("self"), Task):
            task = values["self"]
            if method in METHOD_WORDS or method.startswith("doc_to_"):
                field, row = METHOD_WORDS.get(method, method), values.get("doc")
            elif "check_choices" in values:  # of the first document, when lm-eval loads the task
                field, row = "doc_to_choice", values["test_doc"]
    if task is None:
        return ""
    config = getattr(task, "_config", None)
    name = f"task {getattr(config, 'task', None) or seen.get('cfg', {}).get('task')}"
    documents = seen.get("doc_id_docs", getattr(task, "task_docs", None))
    if not field and documents is not None and not len(documents):
        return f"{name} has no documents" + " after process_docs" * bool(
            getattr(config, "process_docs", None)
        )
    if row is not None:
        number = 0 if row is seen.get("test_doc") else seen.get("doc_id")
        field += f" of {'a few-shot example of ' if row is seen.get('fs_doc') else ''}document {number}"
    if isinstance(row, Mapping):
        field += f" (columns {', '.join(map(str, list(row)[:MOST_COLUMNS]))})"
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(NOT_OWN)][-1:]
    return ": ".join(filter(None, (name, field, one_line(error)))) + "".join(
        f" ({f.filename}:{f.lineno})" for f in own
    )
