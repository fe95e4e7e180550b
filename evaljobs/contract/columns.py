"""Columns of a scored task: its documents' ids, values of metrics, and signals from likelihoods, as arrays in one file.

Rule: made of lm-eval's samples when a task is scored, so that a comparison of two checkpoints reads no samples. Of an
evaluation without such files they are made of its samples. A signal of a document is NaN where its samples do not say it.
Written by `evaljobs.scoring.score`; read by `coordinator.report.columns`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from evaljobs.errors import OperatorError

if TYPE_CHECKING:
    import numpy as np

    Columns = dict[str, np.ndarray[Any, np.dtype[Any]]]

DOCUMENT, HASH, CLUSTER = "doc_id", "doc_hash", "cluster"
# of the right answer: bits a byte, its share of all choices' likelihoods, its log-likelihood less the best other's
BITS, SHARE, MARGIN = "gold_bits_per_byte", "gold_probability", "margin"
SIGNALS = (BITS, SHARE, MARGIN)
"""Signals of likelihood tasks, by their column."""
DENSE = "dense"  # stands for a filter in the names of signals among scores: "margin,dense"
SUITE_MEAN = (
    "mean,none"  # metric of a suite's own group: the mean of its tasks' scores, of whatever metrics they are
)


def columns_of(samples: Iterable[Mapping[str, Any]], cluster: str | None = None) -> Columns:
    """Arrays of one length: a row a document, in order of ids.

    `samples`: lm-eval's, a mapping for each document and filter. `cluster`: the field of a document whose value names its
    cluster; OperatorError where a document lacks it. Columns "METRIC,FILTER" are float64, NaN where a
    document has no number; a metric without any number has no column.
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
        for name, value in {**found, **signals(sample)}.items():
            if isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(name, {})[document] = float(value)
    order = sorted(hashes)
    columns: Columns = {DOCUMENT: np.array(order, dtype=np.int64), HASH: np.array([hashes[d] for d in order])}
    if groups:
        columns[CLUSTER] = np.array([groups[d] for d in order])
    for name, known in values.items():
        columns[name] = np.array([known.get(d, math.nan) for d in order])
    return columns


def means(columns: Columns) -> dict[str, float]:
    """Means of the signals over documents that have them, named as lm-eval's results name scores; `n`: their number."""
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
    return hashlib.sha256(json.dumps(document[field], sort_keys=True, default=str).encode()).hexdigest()[:16]


def choices_of(sample: Mapping[str, Any]) -> tuple[list[str], list[float], int | None]:
    """(continuations, their natural log-likelihoods, the right one's number); empty for generated answers.

    A single continuation is the right answer. Of several choices it is the one that `target` names, by its number or
    text. None where several are right, or where prompts differ by choice and the number cannot be known.
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


def signals(sample: Mapping[str, Any]) -> dict[str, float]:
    """What a document's log-likelihoods say of its right answer; empty where it is not known."""
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
    """Of (log-likelihood, is greedy), as lm-eval has it or as its samples say it in texts."""
    if not isinstance(answer, list | tuple) or len(answer) != 2 or str(answer[1]) not in ("True", "False"):
        return None
    try:
        value = float(answer[0])
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _gold(sample: Mapping[str, Any], texts: list[Any], likelihoods: list[float]) -> int | None:
    """The right choice, named by `target` as text or number; where it may mean two, `acc` tells them apart."""
    said = str(sample.get("target")).strip()
    named = {i for i, text in enumerate(texts) if str(text).strip() == said}
    if said.isdecimal() and int(said) < len(texts):
        named.add(int(said))
    if len(named) > 1 and sample.get("acc") in (0, 1):
        chosen = max(range(len(texts)), key=likelihoods.__getitem__)
        named = {i for i in named if (i == chosen) == bool(sample["acc"])}
    return named.pop() if len(named) == 1 else None


def packed(columns: Columns) -> bytes:
    """The file's bytes: numpy's compressed archive, the same for the same columns."""
    import numpy as np  # noqa: PLC0415

    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **columns)
    return file.getvalue()


def unpacked(content: bytes, name: str) -> Columns:
    """The columns of a file's bytes; OperatorError, with `name`, where it is damaged."""
    import numpy as np  # noqa: PLC0415

    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise OperatorError(f"{name} is damaged ({error}): move it away, and it is made again") from error
