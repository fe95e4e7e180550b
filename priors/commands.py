"""Results of `evalspan priors show | import | export`, as JSON-able values.

Rule: a file that is not a table of observations raises ValueError with file and line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from priors.estimate import Prediction, PriorHistory, rates_of
from priors.table import Observation, Place, merge_observations, parse_observations, read_observations


def show_priors(path: Path) -> dict[str, Any]:
    """Return every observed task by hardware, engine and mode, with the rates and ratio of each of these places."""
    observations = read_observations(path)
    learnt = PriorHistory(observations)
    tasks = []
    last: dict[Place, Observation] = {}
    for (task, place), runs in sorted(learnt.runs.items()):
        ratio, newest = learnt.ratio(task, place), runs[-1]
        seen = newest.model_dump(include={"documents", "inference_seconds", "metric_seconds", "at"})
        tasks.append(
            {
                "task": task,
                **_named(place),
                "observations": len(runs),
                **seen,
                "factor": ratio.factor,
                "sigma": ratio.sigma,
                "p95_over_median": Prediction(seconds=1.0, sigma=ratio.sigma).late,
            }
        )
        last[place] = max(last.get(place, newest), newest, key=lambda one: one.at)
    speeds = [
        {
            **_named(place),
            "model_parameters": one.model_parameters,
            "batch_size": one.batch_size,
            "prefill_tokens_per_second": rates_of(one).prefill_per_second / learnt.places[place],
            "generated_tokens_per_second": rates_of(one).generated_per_second / learnt.places[place],
            "factor": learnt.places[place],
        }
        for place, one in sorted(last.items())
    ]
    return {"schema_version": 1, "observations": len(observations), "tasks": tasks, "speeds": speeds}


def import_observations(path: Path, file: Path) -> dict[str, Any]:
    """Add the new observations of another table, or of `export`'s output, to the table at `path`.

    Raise ValueError, with nothing added, if `file` cannot be read, or contains anything but observations.
    """
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from error
    if text.lstrip().startswith(b"["):
        text = _as_lines(text, str(file))
    observations = parse_observations(text, str(file))
    added = merge_observations(path, observations)
    return {"schema_version": 1, "read": len(observations), "added": added}


def export_observations(path: Path) -> list[dict[str, Any]]:
    """Return every observation, oldest line first. `import` reads this array, or one object per line."""
    return [one.model_dump(mode="json") for one in read_observations(path)]


def _named(place: Place) -> dict[str, str]:
    return dict(zip(("hardware", "engine", "mode"), place, strict=True))


def _as_lines(text: bytes, name: str) -> bytes:
    """Return an array's elements, one per line, so that an error's line is the element's number."""
    try:
        elements = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        place = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "line 1"
        raise ValueError(f"{name}: {place} is not JSON") from error
    return b"".join(json.dumps(element).encode() + b"\n" for element in elements)
