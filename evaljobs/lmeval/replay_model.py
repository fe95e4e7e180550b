"""A model for lm-eval that returns dumped responses.

Rule: an answer is returned only for the request that it was made for. lm-eval rebuilds the task; the digest of its requests
must equal the request set's, and every request must have all of its answers. So no score is partial or of other prompts.
Imports no torch. Called from `scoring.score` and `scoring.collect_programs`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evaljobs.contract.specs import FrameRef, ModelOptions
from evaljobs.contract.storage import FrameError, read_frame
from evaljobs.errors import JobError, OperatorError
from evaljobs.lmeval.batches import Piece, RequestsHead
from evaljobs.lmeval.deadline import LateError, task_deadline
from evaljobs.lmeval.result_keys import instances_digest
from evaljobs.lmeval.run import RequestsBuiltError

_MISSING: Final = object()
TEMPLATE_SECONDS = 60.0  # of one conversation; a template takes milliseconds


class ReplayError(JobError):
    """The responses do not match the requests."""


class OtherPromptsError(ReplayError):
    """lm-eval builds prompts that differ from the request set: an input that no key covers has changed."""

    def __init__(self, task: str, what: str) -> None:
        super().__init__(
            f"task {task}: {what} (its data, its code or its settings changed since the request set was built): "
            "run the same command again to rebuild its requests"
        )


def collect_answers(head: RequestsHead, key: str, responses: Path, frames: Sequence[FrameRef]) -> list[Any]:
    """Return answers by request index, `_MISSING` if the records contain none.

    Rolling windows are summed in window order; a conversation's answer is a tuple, one per turn.
    """
    answers: list[Any] = [_MISSING] * head.requests
    windows: dict[int, dict[int, float]] = {index: {} for index in head.unasked}
    rolling = "loglikelihood_rolling" in head.digests
    for reference in frames:
        try:
            shard = read_frame(responses, reference)
        except FrameError as error:
            raise ReplayError(str(error)) from error
        if shard.task != head.task or shard.key != key:
            raise ReplayError(
                f"{reference.file} at byte {reference.offset} answers {shard.task} of request set {shard.key[:12]}, "
                f"not {head.task} of {key[:12]}"
            )
        for index, answer in shard.responses:
            if rolling and isinstance(answer, list) and isinstance(answer[0], int):
                windows.setdefault(index, {})[answer[0]] = answer[1]
            else:
                answers[index] = tuple(answer) if isinstance(answer, list) else answer
    for index, terms in windows.items():
        answers[index] = sum(terms[number] for number in sorted(terms))
    return answers


def check_whole(head: RequestsHead, answers: Sequence[Any]) -> None:
    """Raise ReplayError if a request has no answer."""
    missing = [index for index, answer in enumerate(answers) if answer is _MISSING]
    if missing:
        raise ReplayError(
            f"task {head.task}: {len(missing)} of {head.requests} requests have no response "
            f"(the first is {missing[0]}): no partial score is made"
        )


def restrict_answers(leaf: Answers, pieces: Iterable[Piece], documents: Collection[int]) -> Answers:
    """The answers of these documents; others have blanks, whose scores the caller drops. ReplayError where one lacks an answer."""
    blanks = {"loglikelihood": (0.0, False), "loglikelihood_rolling": 0.0}
    wanted, answers = set(documents), list(leaf.answers)
    for piece in pieces:
        turns = len(piece.conversation.turns) + 1 if piece.conversation is not None else 0
        if piece.document not in wanted:
            answers[piece.index] = blanks.get(piece.kind, ("",) * turns or "")
    made = Answers(head=leaf.head, answers=answers)
    check_whole(made.head, made.answers)
    return made


def has_answer(answers: Sequence[Any], index: int) -> bool:
    return answers[index] is not _MISSING


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A leaf task's request set with all of its answers, in build order."""

    head: RequestsHead
    answers: Sequence[Any]


def replay_model(
    leaves: Mapping[str, Answers] | None, *, chat: bool, model_dir: str, options: ModelOptions
) -> Any:
    """Return a model that replays `leaves`; without them its first request raises RequestsBuiltError.

    The tokenizer is only read if a chat template is applied.
    """
    from lm_eval.api.model import LM  # noqa: PLC0415

    class Replay(LM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.templates = ChatTemplate(model_dir, options) if chat else None

        def loglikelihood(self, requests: Any) -> Any:
            return list(_answers(leaves, "loglikelihood", requests))

        def loglikelihood_rolling(self, requests: Any) -> Any:
            return list(_answers(leaves, "loglikelihood_rolling", requests))

        def generate_until(self, requests: Any) -> Any:
            return list(_answers(leaves, "generate_until", requests))

        def apply_chat_template(self, chat_history: Any, *, add_generation_prompt: bool = True) -> str:
            assert self.templates is not None
            return self.templates.apply(chat_history, add_generation_prompt=add_generation_prompt)

        @property
        def tokenizer_name(self) -> str:
            return ""  # the name of lm-eval's request cache, which is not used

    return Replay()


def _answers(leaves: Mapping[str, Answers] | None, kind: str, requests: Sequence[Any]) -> Iterator[Any]:
    """Yield answers of one kind in the order of `requests`: leaf after leaf, clones adjacent."""
    if leaves is None:
        raise RequestsBuiltError
    by_task: dict[str, list[Any]] = {}
    for request in requests:
        by_task.setdefault(request.task_name, []).append(request)
    streams: dict[str, Iterator[Any]] = {}
    for task, asked in by_task.items():
        if task not in leaves:
            raise OtherPromptsError(task, "lm-eval asks for it, and it has no request set")
        leaf = leaves[task]
        if instances_digest(asked, leaf.head.follow_up).get(kind) != leaf.head.digests.get(kind):
            raise OtherPromptsError(task, "its prompts differ from those answered")
        order: Sequence[int] = leaf.head.order.get(kind, range(leaf.head.requests))
        streams[task] = iter([leaf.answers[index] for index in order])
        if len(asked) != len(order):
            what = f"{len(asked)} requests asked, {leaf.head.requests} answered"
            raise OtherPromptsError(task, what)
    for request in requests:
        yield next(streams[request.task_name])


class ChatTemplate:
    """A checkpoint's chat template, applied as lm-eval's HFLM.apply_chat_template does."""

    def __init__(self, model_dir: str, options: ModelOptions) -> None:
        from lm_eval.models.utils import configure_pad_token  # noqa: PLC0415

        class Config:
            model_type = json.loads((Path(model_dir) / "config.json").read_text()).get("model_type")

        given = options.model_args
        keywords = {
            "trust_remote_code": given.get("trust_remote_code", False),
            "use_fast": given.get("use_fast_tokenizer", True),
        }
        if given.get("add_bos_token") is not None:
            keywords["add_bos_token"] = given["add_bos_token"]
        tokenizer = _tokenizer(given.get("tokenizer") or model_dir, keywords)
        self.tokenizer: Any = configure_pad_token(tokenizer, model_config=Config)
        self.arguments = dict(given.get("chat_template_args") or {})
        if given.get("enable_thinking") is not None:
            self.arguments["enable_thinking"] = given["enable_thinking"]

    def apply(self, history: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        import jinja2  # noqa: PLC0415

        def rendered(messages: list[dict[str, str]]) -> str:
            with task_deadline(TEMPLATE_SECONDS):
                return str(
                    self.tokenizer.apply_chat_template(
                        messages,
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=not add_generation_prompt,
                        **self.arguments,
                    )
                )

        try:
            return rendered(history)
        except jinja2.exceptions.TemplateError:  # a template without a system role
            return rendered([message for message in history if message["role"] != "system"])
        except LateError:
            raise OperatorError(
                f"the checkpoint's chat template took longer than {TEMPLATE_SECONDS:g} s for one conversation: it may loop "
                "without end; look at chat_template in its tokenizer_config.json or chat_template.jinja"
            ) from None


def _tokenizer(source: str, keywords: dict[str, Any]) -> Any:
    """Load a tokenizer without importing torch, which transformers 5 imports if it can."""
    import transformers.utils  # noqa: PLC0415
    import transformers.utils.import_utils  # noqa: PLC0415

    places: tuple[Any, ...] = (transformers.utils, transformers.utils.import_utils)
    before = [place.is_torch_available for place in places]
    if "torch" not in sys.modules:
        for place in places:
            place.is_torch_available = lambda: False
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415

        return AutoTokenizer.from_pretrained(source, **keywords)
    finally:
        for place, function in zip(places, before, strict=True):
            place.is_torch_available = function
