"""Law of loading: what it draws at random is the same in every trial, and in lm_eval's own process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from evaljobs.contract.specs import ModelOptions
from evaljobs.trial.engines import loading


@pytest.mark.model
def test_the_rows_of_a_larger_tokenizer_are_those_of_lm_eval(model_dir: Path, tmp_path: Path) -> None:
    """An adapter whose tokenizer has more words than the model: lm-eval adds rows of random numbers."""
    from lm_eval.models.huggingface import HFLM
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens([f"word{i}" for i in range(model.config.vocab_size - len(tokenizer) + 40)])
    shutil.copytree(model_dir, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments = {"peft": str(tmp_path / "adapter"), "tokenizer": str(tmp_path / "tokenizer")}

    torch.manual_seed(1234)  # as simple_evaluate does
    theirs = HFLM(pretrained=str(tmp_path / "model"), **arguments, device="cpu", batch_size=1)
    expected = theirs.model.get_input_embeddings().weight
    assert len(expected) > model.config.vocab_size
    for _trial in range(2):
        torch.rand(7)  # other trials draw other numbers before
        engine = loading.load(str(tmp_path / "model"), ModelOptions(model_args=arguments, device="cpu"), 1)
        assert torch.equal(engine.lm.model.get_input_embeddings().weight, expected)
        engine.close()
