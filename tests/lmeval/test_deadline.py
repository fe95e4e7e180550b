"""The law of a checkpoint's chat template that never ends: its own task fails, and says why."""

import pytest

from evaljobs.contract.specs import ModelOptions
from evaljobs.errors import OperatorError
from evaljobs.lmeval import replay_model
from evaljobs.lmeval.replay_model import ChatTemplate

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_chat_template_that_never_ends_is_an_error_in_one_line(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(replay_model, "TEMPLATE_SECONDS", 0.2)
    template = ChatTemplate(str(tiny_model_dir), ModelOptions())
    history = [{"role": "user", "content": "hello"}]
    assert "hello" in template.apply(history, add_generation_prompt=True)
    template.tokenizer.chat_template = LOOP
    with pytest.raises(OperatorError, match=r"chat template took longer than 0.2 s .* may loop without end"):
        template.apply(history, add_generation_prompt=True)
