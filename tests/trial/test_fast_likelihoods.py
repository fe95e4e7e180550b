"""Laws of fast likelihoods on small models of many kinds, loaded by lm-eval's own class."""

import random
import shutil

import pytest

from evaljobs.contract.names import Cut
from evaljobs.contract.specs import ModelOptions
from evaljobs.lmeval.batches import Piece, RequestsHead, batch_chunks
from evaljobs.requests.units import cut_requests
from evaljobs.trial.engines import loading
from evaljobs.trial.engines.harness import HarnessEngine

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 300
WINDOW = 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
ROPE_FREE = {"vocab_size": VOCABULARY, "hidden_size": 32, "initializer_range": 0.3}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
SLIDING = {**SIZES, "sliding_window": WINDOW}
# name -> configuration class and its fields
FAST = {
    "llama, grouped queries": ("LlamaConfig", SIZES),
    "gpt2": ("GPT2Config", {**GPT, "initializer_range": 0.3}),
    "qwen2": ("Qwen2Config", SIZES),
    "mixtral, experts": ("MixtralConfig", {**SIZES, "num_local_experts": 4}),
    "mistral, sliding": ("MistralConfig", SLIDING),
    "gemma2, sliding, softcap, eager": ("Gemma2Config", {**SLIDING, "head_dim": 8}),
    "gemma3, sliding": ("Gemma3TextConfig", {**SLIDING, "head_dim": 8, "sliding_window_pattern": 2}),
}
LM_EVALS_WAY = {
    "mamba, state space": ("MambaConfig", {**ROPE_FREE, "num_hidden_layers": 2}),
    "mpt, alibi of its own": ("MptConfig", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4}),
    "falcon-h1, hybrid": ("FalconH1Config",
        {**SIZES, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}),
    "t5, encoder and decoder": ("T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
}  # fmt: skip


def engine_of(kind, toy_model, folder, **args):
    """A random model of this kind with the toy model's tokenizer, as a trial loads it."""
    torch.manual_seed(5)
    config = getattr(transformers, kind[0])(**kind[1], bos_token_id=1, eos_token_id=2)
    seq2seq = kind[0] == "T5Config"
    auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    if seq2seq:
        config.decoder_start_token_id = 0
    model = auto.from_config(config)
    model.save_pretrained(folder)
    for file in toy_model.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    options = ModelOptions(device="cpu", threads=1, model_args={"dtype": "float32", **args})
    engine = loading.load_engine(str(folder), options, 4)
    assert isinstance(engine, HarnessEngine)
    return engine


def few_shot(max_length, documents=12, seed=3):
    """Documents with the same examples and several choices; the last request is cut from the left."""
    draw = random.Random(seed)

    def some(count):
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    shots = some(20)
    pieces = []
    for document in range(documents):
        context = shots + some(draw.randint(1, 40))
        if document == documents - 1:
            context = some(max_length + 3)
        for _ in range(draw.choice([2, 4])):
            ending = some(draw.choice([1, 1, 4, 9]))
            length = len(context) + len(ending)
            pieces.append(Piece("loglikelihood", len(pieces), document, context, ending, length=length))
    head = RequestsHead(
        task="t",
        requests=len(pieces),
        digests={},
        order={},
        settings=[],
        max_gen_tokens=[],
        text=False,
        grouped=True,
        max_length=max_length,
    )
    return head, pieces


def asked(engine, batches):
    return dict(engine.answers(batches, [0] * len(batches), lambda _done: None))


def both(engine, budget=256):
    """Answers of units, and of lm-eval's batches."""
    head, pieces = few_shot(engine.lm.max_length)
    units = [batch for batch, _, _ in cut_requests(head, pieces, Cut(4, budget))]
    return asked(engine, units), asked(engine, [batch for batch, _, _ in batch_chunks(head, pieces, 4)])


@pytest.mark.parametrize("kind", FAST)
def test_a_unit_answers_as_lm_eval_does(kind, toy_model, tmp_path):
    """float32, within rounding; past the sliding window and the model's length, too."""
    engine = engine_of(FAST[kind], toy_model, tmp_path)
    fast, exact = both(engine)
    assert engine.loaded.fast == ""
    assert fast.keys() == exact.keys()
    assert max(abs(fast[n][0] - exact[n][0]) for n in exact) < 1e-3
    assert [fast[n][1] for n in exact] == [exact[n][1] for n in exact]


@pytest.mark.parametrize("kind", LM_EVALS_WAY)
def test_a_model_that_fails_the_probe_is_asked_lm_evals_way(kind, toy_model, tmp_path):
    engine = engine_of(LM_EVALS_WAY[kind], toy_model, tmp_path)
    fast, exact = both(engine)
    assert engine.loaded.fast
    assert fast.keys() == exact.keys()
    assert max(abs(fast[n][0] - exact[n][0]) for n in exact) < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_past_a_window_that_no_mask_tells_of_go_lm_evals_way(dtype, toy_model, tmp_path):
    """GPT-Neo's local layers look back over places of a row: right within the window, wrong past it.

    The probe sees it in bfloat16, too, where a few missing tokens of a window look like rounding.
    """
    fields = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 256}
    local = {"attention_types": [[["global", "local"], 1]], "window_size": 128}
    kind = ("GPTNeoConfig", {"vocab_size": VOCABULARY, "initializer_range": 0.1, **fields, **local})
    engine = engine_of(kind, toy_model, tmp_path, dtype=dtype)
    rounding = 1e-3 if dtype == "float32" else 0.1
    within, _ = both(engine, budget=40)
    fast, exact = both(engine)
    assert engine.loaded.fast.startswith("rows of more than 128 tokens")
    for answers in (within, fast):
        assert max(abs(answers[n][0] - exact[n][0]) for n in exact) < rounding


def test_rows_under_dynamic_rope_go_lm_evals_way(toy_model, tmp_path):
    """A converted checkpoint's config is seen by the trial alone; its digits depend on no earlier row."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    kind = ("LlamaConfig", {**SIZES, "max_position_embeddings": 32, "rope_parameters": rope})
    engine = engine_of(kind, toy_model, tmp_path, max_length=256)
    head, pieces = few_shot(engine.lm.max_length)
    units = [batch for batch, _, _ in cut_requests(head, pieces, Cut(4, 256))]
    forwards = asked(engine, units)
    assert "dynamic rope" in engine.loaded.fast
    assert asked(engine, units[::-1]) == forwards


def test_rounding_of_bfloat16_passes_the_probe(toy_model, tmp_path):
    engine = engine_of(FAST["llama, grouped queries"], toy_model, tmp_path, dtype="bfloat16")
    both(engine)
    assert engine.loaded.fast == ""


def test_answers_do_not_depend_on_order_and_on_earlier_units(toy_model, tmp_path):
    """The same digits from units in any order, over any number of loads, after a shard that was cut off."""
    kind = FAST["llama, grouped queries"]
    engine = engine_of(kind, toy_model, tmp_path)
    head, pieces = few_shot(engine.lm.max_length, 40)
    units = [batch for batch, _, _ in cut_requests(head, pieces, Cut(4, 64))]
    assert len(units) >= 7
    expected = asked(engine, units)

    def stop(done):
        if done == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        engine.answers(units, [0] * len(units), stop)
    for trials in (1, 3, 7):
        shuffled = list(units)
        random.Random(trials).shuffle(shuffled)
        got = {}
        for number in range(trials):
            part = shuffled[number::trials]
            got |= asked(engine if number else engine_of(kind, toy_model, tmp_path), part)
        assert got == expected


def test_a_task_is_computed_on_its_own_prefix(toy_model, tmp_path):
    """Not on that of the task before it, also where both prefixes are equally long."""
    kind = FAST["llama, grouped queries"]
    engine = engine_of(kind, toy_model, tmp_path)
    before, units = (
        [batch for batch, _, _ in cut_requests(*few_shot(engine.lm.max_length, seed=seed), Cut(4, 256))]
        for seed in (3, 4)
    )
    assert {b.unit.prefix for b in before if b.unit} == {b.unit.prefix for b in units if b.unit} == {0, 20}
    asked(engine, before)
    assert asked(engine, units) == asked(engine_of(kind, toy_model, tmp_path), units)


def test_windows_of_a_token_budget_run_at_once(toy_model, tmp_path):
    """More than the evaluation's batch size in one forward pass, with lm-eval's own digits of it."""
    engine = engine_of(FAST["llama, grouped queries"], toy_model, tmp_path)
    head, _ = few_shot(engine.lm.max_length)
    draw = random.Random(1)
    windows = []
    for n in range(9):
        text = [draw.randrange(3, VOCABULARY) for _ in range(10 + n)]
        windows.append(Piece("loglikelihood_rolling", 0, 0, [1], text, window=n, length=len(text) + 1))
    calls = []
    forward = engine.lm._model_call
    engine.lm._model_call = lambda inputs, **more: calls.append(len(inputs)) or forward(inputs, **more)
    ((batch, _, _),) = cut_requests(head, windows, Cut(4, 400))
    answers = engine.answers([batch], [0], lambda _done: None)
    assert calls == [9]
    assert engine.lm.batch_size == 4
    engine.lm.batch_size_per_gpu = 9
    alone = engine.lm._loglikelihood_tokens([(None, p.context, p.continuation) for p in batch.pieces])
    assert [value for _, (_, value) in answers] == [value for value, _ in alone]
