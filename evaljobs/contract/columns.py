"""Columns of scored tasks: their documents' ids, values of metrics, and signals from likelihoods, in one Parquet file.

Rule: derived from lm-eval's samples when a task is scored, so that a comparison of two checkpoints reads no samples. A job of
`evaljobs.scoring.score` leaves the file of its entry; `coordinator.results.report.stored_documents` merges them into the evaluation's. Missing
values are null in the file, and NaN in an array.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from evaljobs.errors import OperatorError

if TYPE_CHECKING:
    import numpy as np

    Columns = dict[str, np.ndarray[Any, np.dtype[Any]]]

Part = tuple[int, str]
"""A leaf task of one entry of the suite: number of the entry, name of the task."""
ENTRY, TASK = "entry", "task"
DOCUMENT, HASH, CLUSTER = "doc_id", "doc_hash", "cluster"  # 64-bit integers; the last two are digests
# of the right answer: bits per byte, its share of all choices' likelihoods, its log-likelihood minus the best other's
BITS, SHARE, MARGIN = "gold_bits_per_byte", "gold_probability", "margin"
SIGNALS = (BITS, SHARE, MARGIN)
"""Signals of likelihood tasks, by their column."""
DENSE = "dense"  # replaces a filter in the names of signals among scores: "margin,dense"
SUITE_MEAN = (
    "mean,none"  # metric of a suite's own group: the mean of its tasks' scores, whatever their metrics
)


def columns_of(samples: Iterable[Mapping[str, Any]], cluster: str | None = None) -> Columns:
    """Return arrays of one length: a row per document, in order of ids.

    `samples`: lm-eval's, a mapping for each document and filter. `cluster`: the field of a document whose value names its
    cluster; raise OperatorError if a document lacks it. Columns "METRIC,FILTER" are float64, NaN if a document has no number;
    a metric without any number has no column.
    """
    import numpy as np  # noqa: PLC0415 (records of jobs are read without it)

    hashes: dict[int, str] = {}
    groups: dict[int, str] = {}
    values: dict[str, dict[int, float]] = {}
    for sample in samples:
        document = int(sample["doc_id"])
        hashes[document] = str(sample.get("doc_hash", ""))
        if cluster is not None:
            groups[document] = _cluster(sample, cluster)
        found = {f"{m},{sample.get('filter', 'none')}": sample.get(m) for m in sample.get("metrics", ())}
        for name, value in {**found, **document_signals(sample)}.items():
            if isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(name, {})[document] = float(value)
    order = sorted(hashes)
    columns: Columns = {
        DOCUMENT: np.array(order, dtype=np.int64),
        HASH: text_digests(hashes[d] for d in order),
    }
    if groups:
        columns[CLUSTER] = text_digests(groups[d] for d in order)
    for name, known in values.items():
        columns[name] = np.array([known.get(d, math.nan) for d in order])
    return columns


def signal_means(columns: Columns) -> dict[str, float]:
    """Return means of the signals over documents that have them, named like scores in lm-eval's results; `n`: their number."""
    import numpy as np  # noqa: PLC0415

    found: dict[str, float] = {}
    for name in columns.keys() & set(SIGNALS):
        known = columns[name][~np.isnan(columns[name])]
        found |= {f"{name},{DENSE}": float(known.mean()), "n": len(known)}
        if len(known) > 1:
            found[f"{name}_stderr,{DENSE}"] = float(known.std(ddof=1)) / len(known) ** 0.5
    return dict(sorted(found.items()))


def _cluster(sample: Mapping[str, Any], field: str) -> str:
    document = sample.get("doc")
    if not isinstance(document, Mapping) or field not in document:
        has = ", ".join(map(str, document)) if isinstance(document, Mapping) else "none"
        raise OperatorError(
            f"cluster = {field!r}: document {sample['doc_id']} has no such field, but {has}: name one of these"
        )
    return json.dumps(document[field], sort_keys=True, default=str)


def text_digests(texts: Iterable[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return 8 bytes of each text's digest as an integer."""
    import numpy as np  # noqa: PLC0415

    joined = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    found: np.ndarray[Any, np.dtype[np.int64]] = np.frombuffer(joined, dtype=np.int64)
    return found


def choices_of(sample: Mapping[str, Any]) -> tuple[list[str], list[float], int | None]:
    """Return (continuations, their natural log-likelihoods, the right one's number); empty for generated answers.

    A single continuation is the right answer. Of several choices it is the one that `target` names, by its number or text.
    None if several are right, or if prompts differ by choice and the number is unknown.
    """
    asked = [a for a in sample.get("arguments", {}).values() if isinstance(a, Mapping)]
    answers = [_log_likelihood(r) for r in sample.get("filtered_resps", ())]
    texts = [a.get("arg_1") for a in asked][: len(answers)]
    if (
        not answers
        or None in answers
        or len(texts) < len(answers)
        or not all(isinstance(t, str) for t in texts)
    ):
        return [], [], None
    likelihoods = [float(a) for a in answers if a is not None]
    return [str(t) for t in texts], likelihoods, 0 if len(texts) == 1 else _gold(sample, texts, likelihoods)


def chance_of(samples: Iterable[Mapping[str, Any]]) -> float:
    """Return the share of right answers that guessing among the choices of a document would give; 0 for generated ones."""
    counts = {int(sample["doc_id"]): len(choices_of(sample)[0]) for sample in samples}
    return sum(1 / count for count in counts.values() if count > 1) / max(1, len(counts))


def document_signals(sample: Mapping[str, Any]) -> dict[str, float]:
    """Return the signals of a document's log-likelihoods for its right answer; empty if it is unknown."""
    texts, likelihoods, gold = choices_of(sample)
    if gold is None:
        return {}
    size = len(texts[gold].encode())
    found = {BITS: -likelihoods[gold] / (math.log(2) * size)} if size else {}
    others = [x for i, x in enumerate(likelihoods) if i != gold]
    if others:
        best = max(likelihoods)
        total = sum(math.exp(x - best) for x in likelihoods)
        found |= {SHARE: math.exp(likelihoods[gold] - best) / total, MARGIN: likelihoods[gold] - max(others)}
    return found


def _log_likelihood(answer: Any) -> float | None:
    """Parse (log-likelihood, is greedy), as numbers from lm-eval or texts from its samples."""
    if not isinstance(answer, list | tuple) or len(answer) != 2 or str(answer[1]) not in ("True", "False"):
        return None
    try:
        value = float(answer[0])
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _gold(sample: Mapping[str, Any], texts: list[Any], likelihoods: list[float]) -> int | None:
    """Return the right choice, named by `target` as text or number; if ambiguous, `acc` decides."""
    said = str(sample.get("target")).strip()
    named = {i for i, text in enumerate(texts) if str(text).strip() == said}
    if said.isdecimal() and int(said) < len(texts):
        named.add(int(said))
    if len(named) > 1 and sample.get("acc") in (0, 1):
        chosen = max(range(len(texts)), key=likelihoods.__getitem__)
        named = {i for i in named if (i == chosen) == bool(sample["acc"])}
    return named.pop() if len(named) == 1 else None


@dataclass(frozen=True)
class Documents:
    """Documents of several tasks: arrays of one length, in which the rows of a task are a slice."""

    rows: Mapping[Part, slice]
    columns: Columns  # NaN in a metric, 0 in clusters: the task has none

    @cached_property
    def tasks(self) -> dict[str, slice]:
        """Rows by task: "task#2" is the same task of a later entry, as in merged results."""
        seen: Counter[str] = Counter()
        found = {}
        for (_, task), rows in sorted(self.rows.items()):
            seen[task] += 1
            found[task if seen[task] == 1 else f"{task}#{seen[task]}"] = rows
        return found

    def of(self, task: str) -> Columns | None:
        """Return the columns of a task; None if there is no such task."""
        return None if task not in self.tasks else self._cut(self.tasks[task])

    def parts(self) -> dict[Part, Columns]:
        """Return the columns of each task by its entry."""
        return {part: self._cut(rows) for part, rows in self.rows.items()}

    def _cut(self, rows: slice) -> Columns:
        import numpy as np  # noqa: PLC0415

        cut = {name: column[rows] for name, column in self.columns.items()}
        return {name: c for name, c in cut.items() if not (c == 0 if name == CLUSTER else np.isnan(c)).all()}


def pack_columns(parts: Mapping[Part, Columns]) -> bytes:
    """Return the Parquet file's bytes: a row per document, `entry` and `task` before the columns; equal for equal columns."""
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    sizes = [len(columns[DOCUMENT]) for columns in parts.values()]
    names = list(dict.fromkeys(task for _, task in parts))
    codes: Any = np.repeat(np.array([names.index(task) for _, task in parts], dtype=np.int32), sizes)
    found = {
        ENTRY: pa.array(np.repeat(np.array([entry for entry, _ in parts], dtype=np.int16), sizes)),
        TASK: pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string())),
    }
    for name in dict.fromkeys((DOCUMENT, HASH, *(n for columns in parts.values() for n in columns))):
        lack = 0 if name == CLUSTER else math.nan
        column = np.concatenate(
            [
                columns.get(name, np.full(size, lack))
                for columns, size in zip(parts.values(), sizes, strict=True)
            ]
        )
        if name == CLUSTER:
            column = column.astype(np.int64)
        found[name] = pa.array(column, mask=column == 0 if name == CLUSTER else np.isnan(column))
    file = io.BytesIO()
    floats = [name for name, column in found.items() if "," in name or name == TASK]
    parquet.write_table(
        pa.table(found), file, compression="zstd", use_dictionary=floats, row_group_size=2**26
    )
    return file.getvalue()


def unpack_columns(content: bytes, name: str) -> Documents:
    """Return the documents of a file's bytes. Raise OperatorError, with `name`, if it is damaged."""
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    try:
        file = parquet.ParquetFile(pa.BufferReader(content), read_dictionary=[TASK])
        table = file.read(use_threads=False).unify_dictionaries().combine_chunks()
        entries, tasks = table[ENTRY].to_numpy(), table[TASK].chunk(0) if len(table) else None
        columns = {
            n: (table[n].fill_null(0) if n == CLUSTER else table[n]).to_numpy()
            for n in table.column_names
            if n not in (ENTRY, TASK)
        }
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise _damaged(name, error) from error
    if tasks is None:
        return Documents({}, columns)
    codes, texts = tasks.indices.to_numpy(), tasks.dictionary.to_pylist()
    starts = [0, *(np.flatnonzero((np.diff(codes) != 0) | (np.diff(entries) != 0)) + 1), len(codes)]
    found = {(int(entries[a]), texts[codes[a]]): slice(int(a), int(b)) for a, b in pairwise(starts)}
    return Documents(found, columns)


def _damaged(name: str, error: Exception) -> OperatorError:
    return OperatorError(f"{name} is damaged ({error}): move it away to have it rebuilt from the samples")
