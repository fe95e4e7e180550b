"""Laws of the demo: the coordinator accepts its suite and checkpoints; no answer is trained on."""

from __future__ import annotations

import json

import pytest

from coordinator.intake.checkpoint import inspect
from coordinator.intake.suites import load_suite


@pytest.fixture
def demo():
    import demo_training

    return demo_training


def test_the_suite_is_one_and_its_sums_are_held_out(demo, tmp_path):
    """It loads; each choice list holds the right answer once; training has none of the sums."""
    suite = load_suite(str(demo.write_suite(tmp_path)))
    assert [t.name for t in suite.tasks] == ["addition", "addition_choice"]
    trained = {f"{a:02d}+{b:02d}=" for a, b in demo.sums()[0]}
    rows = [
        json.loads(line)
        for f in ("addition", "addition_choice")
        for line in (tmp_path / "tasks" / f"{f}.jsonl").open()
    ]
    assert len(rows) == demo.GENERATED + demo.CHOICES
    for row in rows:
        assert row["question"] not in trained
        answer = f"{sum(map(int, row['question'].rstrip('=').split('+'))):03d}"
        given = row["choices"][row["label"]] if "choices" in row else row["answer"]
        assert given == answer
        assert row.get("choices", [answer]).count(answer) == 1


@pytest.mark.model
def test_a_saved_checkpoint_can_be_evaluated(demo, tmp_path):
    """A character is a token, and back; the folder is whole when it has its name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = demo.make_tokenizer()
    ids = tokenizer("12+34=046;")["input_ids"]
    assert (len(ids), tokenizer.decode(ids)) == (10, "12+34=046;")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    demo.save(model, tokenizer, tmp_path / "step-1")
    assert inspect(tmp_path / "step-1").bytes > 0
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_folder_that_is_not_the_demos_is_left_alone(demo, tmp_path, monkeypatch):
    """The demo refuses a folder with files that it did not write."""
    (tmp_path / "work").mkdir()
    monkeypatch.setattr("sys.argv", ["demo-training", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as refused:
        demo.main()
    assert refused.value.code == 2
    assert (tmp_path / "work").exists()
