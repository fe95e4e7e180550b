"""Tokenizers."""

from typing import Any


def get_tokenizer(folder: str, **_how: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
