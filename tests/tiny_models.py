"""Tiny randomly initialised models of many architectures, and what their own `generate` answers."""

import copy

import tokenizers
import torch
import transformers as hf

SIZE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # large, so that greedy answers vary from token to token
    "tie_word_embeddings": False,  # tied random embeddings repeat the last token for ever
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2_SIZE = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32}
WINDOW = 8

MODELS = {
    "llama": (hf.LlamaConfig, {}),
    "llama-mha": (hf.LlamaConfig, {"num_key_value_heads": 4, "attention_bias": True}),
    "qwen2": (hf.Qwen2Config, {}),
    "qwen2-window": (
        hf.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (hf.Qwen3Config, {"head_dim": 32}),
    "qwen3-moe": (hf.Qwen3MoeConfig, {"head_dim": 16, **EXPERTS}),
    "mistral": (hf.MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (
        hf.Gemma2Config,
        {
            "head_dim": 256,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (hf.Gemma3TextConfig, {"head_dim": 256, "sliding_window": WINDOW, "layer_types": MIXED}),
    "gemma3n": (  # its last two layers attend to the keys and values of earlier ones
        hf.Gemma3nTextConfig,
        {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "layer_types": [*MIXED, "full_attention", "sliding_attention"],
            "head_dim": 16,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 5,
        },
    ),
    "gemma4": (  # heads of several sizes
        hf.Gemma4TextConfig,
        {
            "layer_types": MIXED,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
        },
    ),
    "phi3": (hf.Phi3Config, {}),
    "gpt-neox": (hf.GPTNeoXConfig, {}),
    "opt": (hf.OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.3}),
    "gpt2": (hf.GPT2Config, GPT2_SIZE),
    "gpt-oss": (
        hf.GptOssConfig,
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED, "rope_parameters": None, **EXPERTS},
    ),
    "smollm3": (hf.SmolLM3Config, {}),
    "cohere2": (hf.Cohere2Config, {"sliding_window": WINDOW, "layer_types": MIXED}),
    "olmo3": (hf.Olmo3Config, {"sliding_window": WINDOW, "layer_types": MIXED}),
    "starcoder2": (hf.Starcoder2Config, {"sliding_window": WINDOW}),
    "granite": (hf.GraniteConfig, {"attention_multiplier": 0.2}),
    "gptj": (hf.GPTJConfig, {**GPT2_SIZE, "rotary_dim": 8}),
}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **overrides) -> hf.PreTrainedModel:
    config_class, settings = copy.deepcopy(MODELS[name])  # some configs write to the lists they are given
    settings = settings if "n_embd" in settings else {**SIZE, **settings}
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config_class(**{**settings, **overrides}), dtype=dtype).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


def random_prompts(lengths: list[int], vocab_size: int = 128) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def own_answers(model: hf.PreTrainedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy tokens of the model's own `generate`, one prompt at a time."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def byte_tokenizer() -> hf.PreTrainedTokenizerFast:
    """Each byte is a token, whose id is the byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as in GPT-2, these stand for themselves
    others = [byte for byte in range(256) if byte not in visible]
    vocab = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback_tokenizer() -> hf.PreTrainedTokenizerFast:
    """Each byte is a token, as what Llama 2, Mistral and Gemma have no word for: half a character is no text."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
