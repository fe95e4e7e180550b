"""Tokenizers."""


def get_tokenizer(folder, **_how):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
