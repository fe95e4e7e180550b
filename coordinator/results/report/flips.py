"""Documents of one task that two checkpoints answer differently, from lm-eval's samples, read one line at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from coordinator.results.report.stored_documents import sample_file, sample_lines
from evaljobs.contract.columns import MARGIN, choices_of, document_signals
from evaljobs.contract.paths import EvaluationPaths

COLUMNS = (
    *("doc_id", "filter", "question", "right", "before", "after"),
    *("margin_before", "margin_after", "metrics"),
)


def find_flips(
    before: EvaluationPaths, after: EvaluationPaths, task: str, *, scored: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield documents whose answers or 0/1 metrics differ, in the order of the later evaluation; `scored`: only those whose
    metrics differ.

    Each has COLUMNS: `question` is the first request's prompt; an answer is the likeliest choice, or the text; `margin_…` the
    right choice's log-likelihood minus the best other's, None if unknown; `metrics` maps each to [before, after]. Documents
    missing from one, or with changed content, are omitted.
    """
    known = {_key(sample): _answered(sample) for sample in _samples(before, task)}
    for sample in _samples(after, task):
        old, new = known.get(_key(sample)), _answered(sample)
        if old is None:
            continue
        metrics = {name: [old["metrics"].get(name), value] for name, value in new["metrics"].items()}
        changed = [{one, other} for one, other in metrics.values() if one != other]
        # a metric may weigh choices by their length; a rescored answer is unchanged
        flipped = any(values == {0, 1} for values in changed)
        if (scored and not changed) or (old["answer"] == new["answer"] and not flipped):
            continue
        asked = next(iter(sample.get("arguments", {}).values()), None)
        yield {
            "doc_id": sample["doc_id"],
            "filter": sample.get("filter", "none"),
            "question": str(asked.get("arg_0", "")) if isinstance(asked, Mapping) else "",
            "right": new["right"],
            "before": old["answer"],
            "after": new["answer"],
            "margin_before": old["margin"],
            "margin_after": new["margin"],
            "metrics": metrics,
        }


def _samples(paths: EvaluationPaths, task: str) -> Iterable[dict[str, Any]]:
    file = sample_file(paths, task)
    return () if file is None else sample_lines(file)


def _key(sample: Mapping[str, Any]) -> tuple[Any, ...]:
    return sample["doc_id"], sample.get("filter"), sample.get("doc_hash")


def _answered(sample: Mapping[str, Any]) -> dict[str, Any]:
    texts, likelihoods, gold = choices_of(sample)
    found = sample.get("filtered_resps", [])
    answer: Any = found[0] if len(found) == 1 else found
    right = str(sample.get("target", ""))
    if len(texts) == 1:  # a log-likelihood: the answer is whether it is the likeliest
        answer = f"likeliest: {found[0][1]}"
    elif texts:
        chosen = max(range(len(texts)), key=likelihoods.__getitem__)
        apart = len({*texts}) == len(texts)  # otherwise prompts differ by choice
        answer = texts[chosen] if apart else f"choice {chosen}"
        right = texts[gold] if apart and gold is not None else right
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    metrics = {str(name): sample.get(name) for name in sample.get("metrics", ())}
    margin = document_signals(sample).get(MARGIN)
    return {"answer": text.strip(), "right": right.strip(), "margin": margin, "metrics": metrics}
