"""Conversations: generation tasks whose later prompts hold the model's own answers.

A task's YAML has `metadata: {follow_up: FIELD}`: FIELD is a document's column with the next user
message, or a list of them. Rule: a conversation is one request as lm-eval made it, with one
response, a list with an answer per turn. The trial applies the chat template to lm-eval's messages,
the answers so far and the next message. A turn is generated for the members of the first turn's
batch, so no answer depends on sharding. The type of a response, never its text, tells a
conversation from a single answer. Called from `requests.build`, `trial.engines`, `catalogue` and
judge tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from evaljobs.errors import OperatorError, one_line
from evaljobs.lmeval.batches import Conversation, Piece, Turn

FOLLOW_UP: Final = "follow_up"
_SAID: Final = "."  # placeholder for an answer while a prompt's own tokens are counted


def follow_up_of(task: Any) -> str:
    """Return the column of an lm-eval task's documents with the next messages; "" for a single turn."""
    return str(_column(vars(task.config)) or "")


def _column(config: Mapping[str, Any]) -> Any:
    metadata = config.get("metadata")
    return metadata.get(FOLLOW_UP) if isinstance(metadata, dict) else None


def messages_of(document: Any, field: str) -> list[str]:
    """Return a document's next user messages. Raise OperatorError if its column contains anything but texts."""
    found = document.get(field) if isinstance(document, dict) else None
    messages = [found] if isinstance(found, str) else found
    if not isinstance(messages, list) or not all(isinstance(message, str) for message in messages):
        raise OperatorError(
            f"a document's column {field!r} ({FOLLOW_UP} of its task's metadata) is neither a text nor a list of texts"
        )
    return messages


def unfit_reason(config: Mapping[str, Any], *, chat: bool) -> str:
    """Return why a task with this YAML config cannot have its later turns; "" if it can or has none.

    `chat`: the suite applies a chat template.
    """
    column = _column(config)
    kind = config.get("output_type") or "generate_until"  # lm-eval's default
    reason = ""
    if column is None:
        return reason
    if not isinstance(column, str) or not column:
        reason = f"metadata {FOLLOW_UP} is no column's name"
    elif not chat:
        reason = "its turns are rendered by the chat template: set `apply_chat_template = true` in the suite"
    elif kind != "generate_until":
        reason = f"only generate_until tasks have turns, not {kind}"
    elif config.get("filter_list"):
        reason = "filters take one text an answer: do their work in process_results"
    elif not config.get("process_results"):
        reason = "lm-eval's own metrics take one text an answer: give it a process_results"
    return reason


def check_task(name: str, task: Any, lm: Any, *, chat: bool) -> bool:
    """Return whether a task has conversations. Raise OperatorError if its settings do not allow them."""
    reason = unfit_reason({**vars(task.config), "output_type": task.OUTPUT_TYPE}, chat=chat)
    if not reason and follow_up_of(task) and lm.backend != "causal":
        reason = "a sequence-to-sequence model cannot hold a conversation"
    if reason:
        raise OperatorError(f"task {name} has {FOLLOW_UP} messages, but {reason}")
    return bool(follow_up_of(task))


def turn_answers(response: Any) -> tuple[str, ...]:
    """Return a conversation's answers in order, from one of the `results` of `process_results`."""
    if isinstance(response, tuple) and all(isinstance(answer, str) for answer in response):
        return response
    raise OperatorError(
        "only `evalspan eval` runs the task's later turns; here only the first answer is available"
    )


def conversation_of(lm: Any, name: str, instance: Any, field: str) -> Conversation:
    """Return an instance's later turns. `lm.histories`: rendered prompt -> its messages."""
    history = lm.histories.get(instance.args[0])
    if history is None or history[-1]["role"] != "user":
        raise OperatorError(
            f"task {name} has {FOLLOW_UP} messages, but its prompt is not what the chat template makes of messages that "
            "end with the user's: omit gen_prefix and anything else that changes the prompt"
        )
    later: list[Turn] = []
    for message in messages_of(instance.doc, field):
        begun = Conversation(history=history, turns=[*later, Turn(message=message)])
        length = len(lm.tok_encode(_prompt(lm, begun, [_SAID] * len(begun.turns))))
        later.append(Turn(message=message, length=length))
    return Conversation(history=history, turns=later)


def answer_conversations(
    lm: Any, pieces: Sequence[Piece], generate: Callable[[list[str], list[Piece]], list[str]]
) -> list[str] | list[list[str]]:
    """Return answers of one batch: a text per piece, or a list of texts per conversation.

    `generate`: prompts, and the piece of each -> as many answers. Raises OperatorError if the model's template renders the
    first prompt differently from the build, since later prompts would not fit. Causes are a date in the template, or another
    tokenizer.
    """
    for piece in pieces:
        if piece.conversation is not None and _prompt(lm, piece.conversation, []) != piece.context:
            raise OperatorError(
                "the chat template renders a first turn differently than when its request set was built (does it contain the "
                "date, or does the engine use another one?): use a template that does not change"
            )
    first = generate([str(piece.context) for piece in pieces], list(pieces))
    if not any(piece.conversation is not None for piece in pieces):
        return first
    by_piece = [[answer] for answer in first]
    # members of each later batch do not depend on answers, so those batches are fixed, too
    while going := [
        (p, p.conversation, s)
        for p, s in zip(pieces, by_piece, strict=True)
        if p.conversation is not None and len(s) <= len(p.conversation.turns)
    ]:
        prompts = [_prompt(lm, conversation, so_far) for _, conversation, so_far in going]
        answers = generate(prompts, [piece for piece, _, _ in going])
        for (_, _, so_far), answer in zip(going, answers, strict=True):
            so_far.append(answer)
    return by_piece


def _prompt(lm: Any, conversation: Conversation, answers: Sequence[str]) -> str:
    """Return the prompt after these answers, rendered by the model class's own template."""
    import jinja2  # noqa: PLC0415

    messages = [dict(message) for message in conversation.history]
    for answer, turn in zip(answers, conversation.turns, strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn.message}]
    try:
        return str(lm.apply_chat_template(messages))
    except (jinja2.exceptions.TemplateError, NotImplementedError) as error:
        raise OperatorError(f"the chat template cannot render a conversation: {one_line(error)}") from error
