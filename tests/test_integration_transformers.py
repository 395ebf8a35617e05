"""Tiny models of every supported architecture answer as their own `generate` does; the others are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from conftest import DEVICES
from tiny_models import MODELS, SIZE, WINDOW, own_answers, random_prompts, tiny_model

from paged_kv.engine import LLM, SamplingParams
from paged_kv.errors import UnsupportedModelError
from paged_kv.integrations import transformers as integration
from paged_kv.integrations.transformers import PagedModel

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 12
LENGTHS = [1, 5, 17, 30]  # shorter and longer than the window and than a step's budget
UNEVEN = {"block_size": 4, "num_blocks": 40, "max_batch_tokens": 13}  # cuts prompts at odd places


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_packed_answers_equal_the_models_own(name, device):
    model = tiny_model(name).to(device)
    prompts = random_prompts(LENGTHS)
    expected = own_answers(model, prompts, MAX_TOKENS)
    assert len({token for answer in expected for token in answer}) > 10, "answers too dull to tell anything"
    outputs = LLM(model, **UNEVEN).generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    assert [output.token_ids for output in outputs] == expected


def test_a_window_changes_what_the_model_says():
    prompts = random_prompts(LENGTHS)
    with_window, without = (
        own_answers(tiny_model("mistral", sliding_window=window), prompts, MAX_TOKENS)
        for window in (WINDOW, None)
    )
    assert with_window != without


@pytest.mark.parametrize(
    ("name", "windows", "softcap", "sinks"),
    [
        ("llama", [-1, -1, -1], 0, False),
        ("qwen2-window", [-1, WINDOW, WINDOW], 0, False),
        ("mistral", [WINDOW] * 3, 0, False),
        ("gemma2", [WINDOW, -1, WINDOW], 2, False),
        ("gemma3", [WINDOW, -1, WINDOW], 0, False),
        ("gpt-oss", [WINDOW, -1, WINDOW], 0, True),
    ],
)
def test_layers_ask_for_what_their_config_says(name, windows, softcap, sinks):
    layers = PagedModel(tiny_model(name)).layers
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert [layer.window for layer in layers] == windows
    assert {layer.softcap for layer in layers} == {softcap}
    assert {layer.sinks is not None for layer in layers} == {sinks}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "qwen3-moe", "gpt2"])
def test_half_precision_models_pass_the_probe(name, dtype):
    model = PagedModel(tiny_model(name, dtype))
    assert {layer.dtype for layer in model.layers} == {dtype}


def test_the_model_stays_as_it_was():
    model = tiny_model("llama")
    prompts = random_prompts([9])
    before = own_answers(model, prompts, MAX_TOKENS)
    attention = model.config._attn_implementation
    LLM(model, **UNEVEN).generate(prompts, SamplingParams(max_tokens=2))
    assert model.config._attn_implementation == attention
    assert own_answers(model, prompts, MAX_TOKENS) == before


def test_training_mode_raises():
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        PagedModel(tiny_model("llama").train())


MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
T5_SIZE = {"vocab_size": 128, "d_model": 64, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16}
UNSUPPORTED = {
    "encoder-decoder": (hf.T5Config, T5_SIZE, "encoder-decoder"),
    "no attention interface": (
        hf.BloomConfig,
        {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "AttentionInterface",
    ),
    "latent attention": (hf.DeepseekV3Config, {**SIZE, **LATENT}, "latent attention"),
    "state-space": (
        hf.MambaConfig,
        {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2},
        "position_ids",
    ),
    "state-space beside attention": (hf.FalconH1Config, {**SIZE, **MAMBA}, "hybrid"),
    "linear attention": (hf.JambaConfig, SIZE, "linear_attention"),
    "convolution": (hf.Lfm2Config, {**SIZE, "layer_types": ["conv", "full_attention", "conv"]}, "conv"),
    "chunked attention": (
        hf.Llama4TextConfig,
        {
            **SIZE,
            "attention_chunk_size": 4,
            "intermediate_size_mlp": 32,
            "head_dim": 16,
            "num_local_experts": 2,
        },
        "chunked",
    ),
    "bidirectional": (hf.BertConfig, SIZE, "mask of its own"),
    "keyword arguments lost": (hf.StableLmConfig, SIZE, "keyword arguments"),
    "large heads": (hf.LlamaConfig, {**SIZE, "head_dim": 320}, "head size is 320"),
}


def unsupported_model(name):
    config_class, settings, reason = UNSUPPORTED[name]
    kind = hf.AutoModelForSeq2SeqLM if config_class is hf.T5Config else hf.AutoModelForCausalLM
    torch.manual_seed(0)
    return kind.from_config(config_class(**settings)).eval(), reason


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_models_are_refused_with_the_reason(name):
    model, reason = unsupported_model(name)
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__} cannot run .*{reason}"):
        PagedModel(model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("state-space beside attention", "something besides attention mixes tokens"),
        ("linear attention", "0 attention layers answered"),
        ("convolution", "1 attention layers answered"),
        ("chunked attention", "not a sliding window"),
    ],
)
def test_the_probe_alone_refuses_what_a_config_does_not_tell(name, reason, monkeypatch):
    monkeypatch.setattr(integration, "_check_config", lambda model, config: None)
    with pytest.raises(UnsupportedModelError, match=reason):
        PagedModel(unsupported_model(name)[0])


def attend_otherwise(change):
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward

    def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
        return change(own, module, query, key, value, attention_mask, scaling, **kwargs)

    return modeling_llama, eager_attention_forward


@pytest.mark.parametrize(
    "change",
    [
        lambda own, module, q, k, v, mask, scaling, **kw: own(module, q, k, v, mask, scaling * 1.01, **kw),
        lambda own, module, q, k, v, mask, scaling, **kw: own(module, q, k, v, None, scaling, **kw),
        lambda own, module, q, k, v, mask, scaling, **kw: own(
            module, q, k, v, mask + 0.1 * torch.arange(mask.shape[-1]), scaling, **kw
        ),
    ],
    ids=["scale", "no mask", "bias"],
)
def test_the_probe_refuses_attention_that_is_not_what_it_seems(change, monkeypatch):
    module, function = attend_otherwise(change)
    monkeypatch.setattr(module, "eager_attention_forward", function)
    with pytest.raises(UnsupportedModelError, match="layer 0 attends otherwise than paged_attention"):
        PagedModel(tiny_model("llama"))


def test_unknown_attention_arguments_are_refused():
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    own = attention.forward
    attention.forward = lambda *args, **kwargs: own(*args, position_bias=torch.ones(1), **kwargs)
    with pytest.raises(UnsupportedModelError, match="unknown here: position_bias"):
        PagedModel(model)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, 512),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, 512),
        (
            {
                "rope_type": "dynamic",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 128,
            },
            128,
        ),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            },
            64,
        ),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else str(value),
)
def test_the_context_ends_where_rotations_would_depend_on_the_batch(rope, context):
    name, more = (
        ("phi3", {"original_max_position_embeddings": 64}) if "short_factor" in rope else ("llama", {})
    )
    model = tiny_model(name, rope_parameters=rope, **more)
    assert PagedModel(model).context_length == context


def run_without_transformers(code):
    hide = "import sys; sys.modules['transformers'] = None\n"
    return subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True, check=False)


def test_importing_paged_kv_needs_no_transformers():
    code = "import paged_kv, paged_kv.engine, paged_kv.integrations.transformers"
    assert run_without_transformers(code).stderr == ""


def test_a_missing_transformers_is_named_with_its_extra():
    code = "from paged_kv.integrations.transformers import PagedModel\nPagedModel(None)"
    result = run_without_transformers(code)
    assert result.stderr.strip().endswith("run `pip install 'paged_kv[transformers]'`")


FAULTS_OF_TEMPORARIES = """
import resource, torch
from paged_kv.integrations.transformers import PagedModel
from tiny_models import tiny_model

model = PagedModel(tiny_model("llama"))

def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        [torch.ones(3 << 18) for _ in range(4)]  # of 3 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(1)
print(faults(10))
"""


def test_a_steps_temporaries_stay_in_the_process():
    """Once given, the pages of what a model drops are not mapped anew for what it makes next."""
    tests = Path(__file__).parent
    child = subprocess.run(
        [sys.executable, "-c", FAULTS_OF_TEMPORARIES],
        env={**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(child.stdout) < 1000, "3,072 pages each time, had they been given back"
