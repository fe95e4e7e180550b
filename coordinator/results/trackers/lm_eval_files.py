"""An evaluation in lm_eval's own layout: MODEL/results_DATE.json and MODEL/samples_TASK_DATE.jsonl.

Rule: names, keys and hashes are those of lm_eval's EvaluationTracker (lm_eval/loggers/evaluation_tracker.py, 0.4.13), so that
its readers can read these files. The date is that of the evaluation's end, so a second export writes the same files. Chat
template and special tokens are read from the checkpoint, if it still exists. lm_eval's facts about machine and git are
omitted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.errors import OperatorError
from coordinator.results.report.load_series import read_document
from coordinator.results.report.stored_documents import sample_file
from evaljobs.contract.archived_files import read_bytes
from evaljobs.contract.paths import EvaluationPaths, slug
from evaljobs.contract.storage import FrameError, read_plain, write_atomic
from evaljobs.staging.fingerprint import HEADER_LIMIT


def model_folder(model: str) -> str:
    """Return lm_eval's `sanitize_model_name`."""
    return re.sub(r'["<>:/|\\?*\[\]]+', "__", model)


def plain_name(task: str) -> str:
    """Return the task's name as lm_eval writes it; one that points to another folder as a plain file name."""
    return slug(task) if "/" in task or "\0" in task else task


def write_lm_eval_files(evaluation: Path, out: Path) -> list[Path]:
    """Write samples, then results, of the evaluation's folder below `out`; `out` names the results if it ends in .json."""
    paths = EvaluationPaths(evaluation)
    try:
        results: dict[str, Any] = json.loads(paths.results.read_bytes())
        document = read_document(paths)
        record = EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
    except (OSError, ValueError) as error:
        raise OperatorError(f"{evaluation} has no results to export: {error}") from error
    if record.screening is not None:
        raise OperatorError(
            f"{record.evaluation_id} is a screen evaluation, which has no score of lm-eval's to export"
        )
    alone = out.suffix == ".json"
    folder, begin = (out.parent, out.stem) if alone else (out / model_folder(document.checkpoint), "results")
    folder.mkdir(parents=True, exist_ok=True)
    # lm_eval writes local time without a zone; UTC is the same everywhere.
    date = (
        datetime.fromtimestamp(document.ended_at, UTC)
        .replace(tzinfo=None)
        .isoformat(timespec="microseconds")
        .replace(":", "-")
    )
    hashes, written = {}, []
    for task in sorted(results.get("configs", {})):
        if (source := sample_file(paths, task)) is not None:
            text = read_bytes(source)
            hashes[task] = _task_hash(text)
            written.append(folder / f"samples_{plain_name(task)}_{date}.jsonl")
            write_atomic(written[-1], text)
    model = str(results.get("config", {}).get("model", "hf"))
    suite, checkpoint = record.suite, Path(record.checkpoint.source)
    template = chat_template(checkpoint) if suite.apply_chat_template else None
    results |= {
        **tokenizer_facts(checkpoint),
        "task_hashes": hashes,
        "model_source": model,
        "model_name": document.checkpoint,
        "model_name_sanitized": model_folder(document.checkpoint),
        "system_instruction": suite.system_instruction,
        "system_instruction_sha": _sha(suite.system_instruction),
        "chat_template": template,
        "chat_template_sha": _sha(template),
        "fewshot_as_multiturn": suite.fewshot_as_multiturn,
        "date": document.accepted_at,
        "total_evaluation_time_seconds": str(document.makespan_seconds),
    }
    written.append(folder / f"{begin}_{date}.json")
    write_atomic(written[-1], json.dumps(results, indent=2, ensure_ascii=False).encode())
    return written


def chat_template(checkpoint: Path) -> str | None:
    """Return the chat template as transformers finds it; None if there is none, or several."""
    with contextlib.suppress(OSError, FrameError, UnicodeError):
        return _read(checkpoint / "chat_template.jinja").decode()
    found = _json(checkpoint / "tokenizer_config.json").get("chat_template")
    return found if isinstance(found, str) else None


def tokenizer_facts(checkpoint: Path) -> dict[str, Any]:
    """Return lm_eval's `add_tokenizer_info` (lm_eval/loggers/utils.py) from the checkpoint's files; empty for invalid ones."""
    with contextlib.suppress(TypeError, KeyError, ValueError, AttributeError):
        return _tokenizer_facts(checkpoint)
    return {}


def _tokenizer_facts(checkpoint: Path) -> dict[str, Any]:
    known = _json(checkpoint / "tokenizer_config.json")
    ids = {t["content"]: t["id"] for t in _json(checkpoint / "tokenizer.json").get("added_tokens", [])}
    facts: dict[str, Any] = {}
    for name in ("pad", "eos", "bos"):
        token = known.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text in ids:
            facts[f"tokenizer_{name}_token"] = [text, str(ids[text])]
    if "tokenizer_eos_token" in facts:
        facts["eot_token_id"] = int(facts["tokenizer_eos_token"][1])
    config = _json(checkpoint / "config.json")
    lengths = [config[k] for k in ("n_positions", "max_position_embeddings", "n_ctx") if k in config]
    return {**facts, "max_length": lengths[0]} if lengths else facts


def _json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(_read(file))
    except (OSError, ValueError, FrameError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _read(file: Path) -> bytes:
    """Read a file of the checkpoint, which may have changed since it was evaluated. Raise OSError or FrameError."""
    return read_plain(file.resolve(), HEADER_LIMIT)


def _task_hash(samples: bytes) -> str:
    """Return lm_eval's hash of all samples of a task: over each one's document, prompt and target hash."""
    rows = [
        json.loads(line) for line in samples.splitlines() if line
    ]  # bytes, since text lines would also end at U+2028
    return _sha("".join(r["doc_hash"] + r["prompt_hash"] + r["target_hash"] for r in rows)) or ""


def _sha(text: str | None) -> str | None:
    """Return lm_eval's `hash_string`; None for no text."""
    return hashlib.sha256(text.encode()).hexdigest() if text is not None else None
