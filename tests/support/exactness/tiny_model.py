"""A tiny causal language model with its own tokenizer, made from a seed.

Its random weights give every prompt another likelihood, which is all that equality needs.
"""

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(folder, corpus, *, seed=7, vocabulary=600, dtype="float32", files_of="50GB", **shape):
    """Write config, safetensors and tokenizer of a Llama to `folder`: 2 layers, or of another shape (LlamaConfig's fields)."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    ends = {"bos_token": special[0], "eos_token": special[1]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)
    fast.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    tiny = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    ends = {"bos_token_id": fast.bos_token_id, "eos_token_id": fast.eos_token_id}
    config = LlamaConfig(vocab_size=len(fast), **{**tiny, **shape}, **ends)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=files_of)
    fast.save_pretrained(folder)
    return folder
