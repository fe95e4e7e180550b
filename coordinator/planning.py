"""From request sets on disk and priors to a plan: reads the indexes, asks the pure planner.

Rule: whatever is read here ends up in the `Planned` event, so that replaying the journal needs none of these files.
It does not know: how batches are placed (packing) or how rates are learnt (priors).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from coordinator.messages import MakePlan, Planned
from coordinator.records import EvaluationRecord
from evaljobs.contract import BatchIndex, RequestSetManifest, batch_index_file, request_set_manifest


class PlanningError(Exception):
    """What is on disk does not make a plan; says which file."""


def read_sets(
    folders: Mapping[str, str], batch_size: int
) -> dict[str, tuple[RequestSetManifest, BatchIndex]]:
    """Manifest and batches of every leaf task; PlanningError names what cannot be read."""
    sets = {}
    for task, folder in folders.items():
        try:
            manifest = RequestSetManifest.model_validate_json(request_set_manifest(folder).read_bytes())
            index = BatchIndex.model_validate_json(batch_index_file(folder, batch_size).read_bytes())
        except (OSError, ValidationError) as error:
            raise PlanningError(f"the request set of {task} in {folder} cannot be read: {error}") from error
        if index.key != manifest.key:
            raise PlanningError(
                f"the batches of {task} in {folder} are of other requests: remove that folder"
            )
        sets[task] = (manifest, index)
    return sets


def make_plan(record: EvaluationRecord, wanted: MakePlan, observations: Path, now: float) -> Planned:
    raise NotImplementedError
