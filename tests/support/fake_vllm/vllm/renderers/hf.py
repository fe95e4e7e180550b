"""Chat templates."""

from typing import Any


def resolve_chat_template(tokenizer: Any, chat_template: Any, tools: Any, *, model_config: Any) -> Any:
    return tokenizer.chat_template
