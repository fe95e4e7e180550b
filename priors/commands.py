"""Results of `evalspan priors show | fit | import | export`, as JSON-able values.

Rule: a file that is no table of observations raises ValueError with file and line.
"""

from __future__ import annotations

import json
from math import exp
from pathlib import Path
from typing import Any

from priors.estimate import percentile_95
from priors.fit import Learnt
from priors.hardware import cold_rates
from priors.table import merge, parse, read


def show(path: Path) -> dict[str, Any]:
    """Every observed task by hardware, engine and mode: runs, the last run's seconds, the learnt residual."""
    learnt = Learnt(read(path))
    history = learnt.timed
    rows = []
    for task, place in sorted({(one.task, one.place) for one in history}):
        own = [one for one in history if (one.task, one.place) == (task, place)]
        own_residual = learnt.residual(task, place)
        hardware, engine, mode = place
        rows.append(
            {
                "task": task,
                "hardware": hardware,
                "engine": engine,
                "mode": mode,
                "observations": len(own),
                "documents": own[-1].documents,
                "inference_seconds": own[-1].inference_seconds,
                "metric_seconds": own[-1].metric_seconds,
                "factor": exp(own_residual.mean),
                "sigma": own_residual.sigma,
                "p95_over_median": percentile_95(1.0, own_residual.sigma),
                "at": own[-1].at,
            }
        )
    return {"schema_version": 1, "observations": len(history), "tasks": rows}


def fit(path: Path) -> dict[str, Any]:
    """Rates learnt per hardware, engine and mode, for the model size and batch size seen last."""
    learnt = Learnt(read(path))
    history = learnt.timed
    rows = []
    for place in sorted({one.place for one in history}):
        last = [one for one in history if one.place == place][-1]
        speed = learnt.speed(place)
        hardware, engine, mode = place
        cold = cold_rates(
            model_parameters=last.model_parameters,
            hardware=hardware,
            engine=engine,
            batch_size=last.batch_size,
        )
        rows.append(
            {
                "hardware": hardware,
                "engine": engine,
                "mode": mode,
                "observations": speed.observations,
                "model_parameters": last.model_parameters,
                "batch_size": last.batch_size,
                "prefill_tokens_per_second": cold.prefill_per_second / exp(speed.prefill),
                "generated_tokens_per_second": cold.generated_per_second / exp(speed.generated),
                "prefill_factor": exp(speed.prefill),
                "generated_factor": exp(speed.generated),
            }
        )
    return {"schema_version": 1, "speeds": rows}


def import_file(path: Path, file: Path) -> dict[str, Any]:
    """Add the new observations of another table, or of `export`'s output, to the table at `path`.

    ValueError, with nothing added: `file` cannot be read, or a line of it is no observation.
    """
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from error
    if text.lstrip().startswith(b"["):
        text = _as_lines(text, str(file))
    if text and not text.endswith(b"\n"):
        text += b"\n"  # an imported file is whole, so its last line is not torn
    observations = parse(text, str(file))
    added = merge(path, observations)
    return {"schema_version": 1, "read": len(observations), "added": added}


def export(path: Path) -> list[dict[str, Any]]:
    """Every observation, oldest line first. `import` reads this array, or one object per line."""
    return [one.model_dump(mode="json") for one in read(path)]


def _as_lines(text: bytes, name: str) -> bytes:
    """An array's elements, one per line, so that an error's line is the element's number."""
    try:
        elements = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        place = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "line 1"
        raise ValueError(f"{name}: {place} is no JSON") from error
    return b"".join(json.dumps(element).encode() + b"\n" for element in elements)
