"""Digests of what lm-eval built of a leaf task: its instances, request digest and score key.

Rule: responses may be reused under equal request digests, scores under equal score keys. A comment
changes neither. A score refuses answers to instances of another digest. Called from
`requests.build`, `replay_model` and `scoring.collect_programs`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import evaljobs
from evaljobs.contract.names import ADAPTERS
from evaljobs.contract.specs import ModelOptions, SuiteSpec
from evaljobs.errors import OperatorError
from evaljobs.lmeval import shown_inputs
from evaljobs.lmeval.batches import RequestsHead
from evaljobs.lmeval.conversations import messages_of
from evaljobs.lmeval.source_files import Digests

# Keys of a task's configuration that change no score: they belong to requests, documents or the engine.
NOT_SCORED = frozenset(
    [
        "custom_dataset",
        "dataset_kwargs",
        "dataset_name",
        "dataset_path",
        "description",
        "fewshot_config",
        "fewshot_delimiter",
        "fewshot_split",
        "generation_kwargs",
        "gen_prefix",
        "target_delimiter",
        "test_split",
        "training_split",
        "use_prompt",
        "validation_split",
    ]
)
NOT_OF_THE_TASK = frozenset({"pretrained", "config_source"})  # locations that lm-eval adds
PLACES = frozenset({"tokenizer", *ADAPTERS})  # model arguments that are locations; the content counts instead


def instances_digest(instances: Iterable[Any], follow_up: str = "") -> dict[str, str]:
    """Return kind of request -> sha256 over documents, positions, repeats and arguments. Repeats count once.

    `follow_up`: the documents' column with the messages after the first answer, included as well.
    """
    digests: dict[str, Any] = {}
    last: Any = None
    for instance in instances:
        if instance is last:
            continue
        last = instance
        what = [instance.doc_id, instance.idx, instance.repeats, instance.args]
        if follow_up:
            what.append(messages_of(instance.doc, follow_up))
        try:
            line = json.dumps(what, sort_keys=True)
        except TypeError as error:
            raise OperatorError(
                f"task {instance.task_name} has requests with more than text: {error}"
            ) from error
        digests.setdefault(instance.request_type, hashlib.sha256()).update(line.encode() + b"\n")
    return {kind: digest.hexdigest() for kind, digest in digests.items()}


def request_digests(
    lm: Any, suite: SuiteSpec, model: ModelOptions, body: bytes, *, sampled: bool, head: RequestsHead
) -> tuple[str, str]:
    """Return the digest of everything that decides an answer besides the weights, and of what two results must share to be
    compared.

    The second omits versions and the tokenizer, so that a training on an upgraded site stays one curve. `body`: the stored
    requests.
    """
    tokenizer = lm.tokenizer
    asked = {
        "engine": model.engine,
        "args": {key: value for key, value in model.model_args.items() if key not in PLACES},
        "seed": suite.seed if sampled else None,
        "template": getattr(tokenizer, "chat_template", None) if head.follow_up else None,
        "max_length": lm.max_length,
        "add_bos_token": lm.add_bos_token,
        "prefix_token": lm.prefix_token_id,
        "backend": lm.backend,
    }
    answered = {
        "requests": hashlib.sha256(body).hexdigest(),
        "engines": engine_versions(model.engine),
        "tokenizer": _tokenizer_digest(tokenizer),
    }
    return _digest(asked | answered), _digest(asked | {"instances": head.digests})


@functools.lru_cache(maxsize=4)
def engine_versions(engine: str) -> Mapping[str, str]:
    """Return package -> version of all code that makes answers; a package in development has the digest of its modules, too.

    `evalspan` is the code of our own engines.
    """
    own, digests = Path(evaljobs.__file__).parent / "trial" / "engines", Digests()
    found = {"evalspan": _digest({file.name: _code(file) for file in sorted(own.glob("*.py"))})}
    for name in (*shown_inputs.ENGINES, engine):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
            spec = importlib.util.find_spec(name)
            place = Path(spec.origin).parent if spec is not None and spec.origin else None
            if place is not None and not set(shown_inputs.PACKAGES) & set(place.parts):
                modules = sorted(p for p in place.rglob("*.py") if place / "tasks" not in p.parents)
                found[name] += _digest({str(p.relative_to(place)): digests.of(p) for p in modules})
    return found


def score_key(task: Any, groups: Mapping[str, Any], modules: Iterable[str]) -> str:
    """Return the digest of everything that turns answers into a score: documents, filters, metrics, code, versions.

    `modules`: paths of the task's own code, which counts without its comments. YAML counts as parsed by lm-eval.
    """
    config = {key: value for key, value in vars(task.config).items() if key not in NOT_SCORED}
    metadata = config.get("metadata")
    if isinstance(metadata, dict):
        config["metadata"] = {k: v for k, v in metadata.items() if k not in NOT_OF_THE_TASK}
    documents = hashlib.sha256()
    last: Any = None
    for instance in task.instances:
        if instance.doc_id != last:
            last = instance.doc_id
            documents.update(
                json.dumps([last, instance.doc], sort_keys=True, default=_stable).encode() + b"\n"
            )
    what = {
        "documents": documents.hexdigest(),
        "config": config,
        "version": getattr(task, "VERSION", None),
        "lm_eval": importlib.metadata.version("lm_eval"),
        "groups": {  # what decides a group's own score, given its members' scores
            name: {
                "aggregate": getattr(group, "aggregate_metric_list", None),
                "members": sorted(getattr(group, "_children", {})),
            }
            for name, group in groups.items()
        },
        "files": sorted({(Path(module).name, _code(Path(module))) for module in modules}),
    }
    return _digest(what)


def _code(path: Path) -> str:
    """Digest a file's code without comments; for files that are not Python of this version, their bytes."""
    code = path.read_bytes()
    with contextlib.suppress(SyntaxError, ValueError):
        code = ast.dump(ast.parse(code)).encode()
    return hashlib.sha256(code).hexdigest()


def _tokenizer_digest(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    special = json.dumps([tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id])
    return hashlib.sha256((text + special).encode()).hexdigest()


def _digest(what: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=_stable).encode()).hexdigest()


def _stable(value: Any) -> str:
    """Return a value as text without its memory address and without the folder of its code."""
    if callable(value):
        module = str(getattr(value, "__module__", "")).rsplit("/", 1)[-1]
        inner = getattr(value, "func", None)  # functools.partial
        return f"{module}.{getattr(value, '__qualname__', type(value).__name__)}{_stable(inner) if inner else ''}"
    if hasattr(value, "__dict__"):
        return json.dumps(vars(value), sort_keys=True, default=_stable)
    return str(value)
