"""Documents of several evaluations as one Parquet file: a row per document and task, with its metrics.

Rule: one evaluation is in memory at a time. The columns are determined before the first row is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.errors import OperatorError
from coordinator.results.report.scores import Evaluation
from coordinator.results.report.stored_documents import read_documents
from evaljobs.contract.columns import pack_columns
from evaljobs.contract.paths import EvaluationPaths

if TYPE_CHECKING:
    import pyarrow as pa


def write_documents(work_dir: Path, points: Sequence[Evaluation], file: Path) -> Path:
    """Write the documents of these evaluations. Raise OperatorError if there are none."""
    import pyarrow as pa  # noqa: PLC0415 (other commands start without it)
    from pyarrow import parquet  # noqa: PLC0415

    known = [
        point for point in points if read_documents(EvaluationPaths(work_dir / point.evaluation_id)).rows
    ]
    if not known:
        raise OperatorError("these evaluations have no documents: their samples were pruned")
    schema = pa.unify_schemas([_table(work_dir, point).schema for point in known])
    partial = file.with_name(f".{file.name}.partial")
    with parquet.ParquetWriter(partial, schema, compression="zstd") as out:
        for point in known:
            table = pa.concat_tables(
                [schema.empty_table(), _table(work_dir, point)], promote_options="default"
            )
            out.write_table(table)
    return partial.replace(file)


def _table(work_dir: Path, point: Evaluation) -> pa.Table:
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    content = pack_columns(read_documents(EvaluationPaths(work_dir / point.evaluation_id)).parts())
    table = parquet.read_table(pa.BufferReader(content)).combine_chunks()
    table = table.set_column(1, "task", table["task"].cast(pa.string()))
    table = table.add_column(0, "step", pa.array([point.step] * len(table), pa.int64()))
    return table.add_column(0, "evaluation_id", pa.array([point.evaluation_id] * len(table)))
