"""Answers of SmolLM2-135M-Instruct at one noise of its weights, a document each: what `scripts/bench_screen` draws from.

    python scripts/bench/answers.py MODEL DATA.jsonl.gz OUT.npy [NOISE [SEED]]

MODEL: the folder of `scripts/fetch_smollm2.py`. DATA: ARC, CommonsenseQA or PIQA, as the fields tell. OUT: bytes, 1 where the
choice with the highest likelihood a character is the right one (lm-eval's acc_norm). The choices of a document are one
sequence behind its question, each blind to the others, so that a question is read once.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

BATCH = 16  # documents at a time, of about the same length
Document = tuple[str, list[str], int]  # question, choices, number of the right one


def document_of(row: dict[str, Any]) -> Document:
    """One document of a known data set."""
    if "goal" in row:
        return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]
    if "answerKey" in row:
        choices = row["choices"]
        return (
            f"Question: {row['question']}\nAnswer:",
            choices["text"],
            choices["label"].index(row["answerKey"]),
        )
    return row["query"], row["choices"], row["gold"]


def load_model(folder: str, noise: float, seed: int) -> Any:
    """The model with normal noise in each matrix, of this share of its standard deviation."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    drawn = torch.Generator().manual_seed(seed)
    for weight in model.parameters() if noise else ():
        if weight.dim() > 1:
            added = torch.randn(weight.shape, generator=drawn) * (noise * weight.detach().float().std())
            weight.data = (weight.data.float() + added).to(weight.dtype)
    return model.eval()


def sums_of(model: Any, batch: Sequence[tuple[list[int], list[list[int]]]]) -> list[list[float]]:
    """Log-likelihood of each choice's tokens of each (question's tokens, choices' tokens)."""
    longest = max(len(question) + sum(map(len, choices)) for question, choices in batch)
    tokens = torch.zeros(len(batch), longest, dtype=torch.long)
    places = torch.zeros_like(tokens)
    seen = torch.eye(longest, dtype=torch.bool).repeat(len(batch), 1, 1)
    for i, (question, choices) in enumerate(batch):
        start = len(question)
        tokens[i, :start], places[i, :start] = torch.tensor(question), torch.arange(start)
        seen[i, :start, :start] = torch.ones(start, start).tril().bool()
        for choice in choices:
            end = start + len(choice)
            tokens[i, start:end] = torch.tensor(choice)
            places[i, start:end] = torch.arange(len(question), len(question) + len(choice))
            seen[i, start:end, : len(question)] = True
            seen[i, start:end, start:end] = torch.ones(len(choice), len(choice)).tril().bool()
            start = end
    hidden = model.model(tokens, attention_mask=seen[:, None], position_ids=places).last_hidden_state
    found = []
    for i, (question, choices) in enumerate(batch):
        start, sums = len(question), []
        for choice in choices:
            before = [len(question) - 1, *range(start, start + len(choice) - 1)]
            said = model.lm_head(hidden[i, before]).float().log_softmax(-1)
            sums.append(float(said[range(len(choice)), choice].sum()))
            start += len(choice)
        found.append(sums)
    return found


def main(folder: str, data: str, out: str, noise: str = "0", seed: str = "1") -> None:
    with gzip.open(data, "rt", encoding="utf-8") as lines:
        documents = [document_of(json.loads(line)) for line in lines]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model = load_model(folder, float(noise), int(seed))
    tokens = [
        (tokenizer(question)["input_ids"], [tokenizer(f" {one}")["input_ids"] for one in choices])
        for question, choices, _ in documents
    ]
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i][0]) + sum(map(len, tokens[i][1])))
    right = np.zeros(len(documents), dtype=np.uint8)
    with torch.inference_mode():
        for first in range(0, len(order), BATCH):
            numbers = order[first : first + BATCH]
            for i, sums in zip(numbers, sums_of(model, [tokens[i] for i in numbers]), strict=True):
                _, choices, gold = documents[i]
                scores = [one / len(choice) for one, choice in zip(sums, choices, strict=True)]
                right[i] = scores.index(max(scores)) == gold
    np.save(out, right)
    print(Path(data).name, noise, seed, right.mean())


if __name__ == "__main__":
    main(*sys.argv[1:])
