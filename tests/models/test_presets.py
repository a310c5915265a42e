"""Named configurations have the sizes that their makers published."""

import pytest

from rljax import models
from rljax.models import families, presets

# Totals of the published safetensors files; non-embedding and active counts of the model cards.
PUBLISHED = {
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-math-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.2-3b": 3_212_749_824,
    # Of all layers but the one for multi-token prediction; the model card says 671B.
    "deepseek-v3": 671_026_419_200,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    assert models.count(presets.PRESETS[name]()) == PUBLISHED[name]


def test_active_parameters():
    qwen3 = presets.qwen3_30b_a3b()
    assert models.count_active(qwen3) == pytest.approx(3.3e9, rel=0.02)
    embeddings = 2 * qwen3.vocab_size * qwen3.hidden_size
    assert round((models.count(qwen3) - embeddings) / 1e9, 1) == 29.9
    assert models.count_active(presets.deepseek_v3()) == pytest.approx(37e9, rel=0.02)
    dense = presets.qwen2_5_7b()
    assert models.count_active(dense) == models.count(dense)
    assert round((models.count(dense) - 2 * 152_064 * 3584) / 1e9, 2) == 6.53


def test_the_largest_is_as_large_as_it_is_called():
    config = presets.PRESETS["mixture-1.6t"]()
    assert models.count(config) == pytest.approx(1.6e12, rel=0.02)
    assert models.count_active(config) == pytest.approx(49e9, rel=0.02)


def test_sizes_of_the_small_ones():
    assert models.count(presets.tiny_moe(16)) == pytest.approx(0.2e6, rel=0.05)
    s, m = presets.speed_s(), presets.speed_m()
    assert models.count(s) * 4 == pytest.approx(117e6, rel=0.01)  # bytes, as measured elsewhere
    assert (s.num_experts, m.num_experts, m.top_k) == (0, 8, 2)
    # Keys and values of all layers, in float32: 16 KB a token.
    attention = s.layers[0].attention
    assert 2 * attention.num_kv_heads * attention.head_dim * s.num_layers * 4 == 16 * 1024


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_can_be_written_as_config_json(name):
    config = presets.PRESETS[name]()
    back = families.read_fields(families.write_fields(config), "config.json")
    assert back.layers == config.layers and back.stacks == config.stacks
    assert back.vocab_size == config.vocab_size and back.max_positions == config.max_positions


def test_published_config_json_is_read_as_the_preset():
    # The fields of Qwen2.5-7B's and Llama-3.2-3B's files, as transformers 4 wrote them.
    qwen = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    }
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    }
    # DeepSeek-V3's, but for its quantization_config, which is refused.
    deepseek = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    for fields, preset in (
        (qwen, presets.qwen2_5_7b()),
        (llama, presets.llama_3_2_3b()),
        (deepseek, presets.deepseek_v3()),
    ):
        found = families.read_fields(fields, "config.json")
        for name in ("stacks", "vocab_size", "norm_eps", "tie_embeddings", "max_positions"):
            assert getattr(found, name) == getattr(preset, name), name


# What tells the published config.json of each apart; totals of the published safetensors files,
# billions active of the model cards (gpt-oss's cards count one embedding of the two).
MIXTURES = {
    "mixtral-8x7b": (
        {
            "model_type": "mixtral",
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        46_702_792_704,
        12.9,
    ),
    "olmoe-1b-7b": (
        {
            "model_type": "olmoe",
            "vocab_size": 50_304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "clip_qkv": None,
        },
        6_919_161_856,
        1.3,
    ),
    "qwen1.5-moe-a2.7b": (
        {
            "model_type": "qwen2_moe",
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "max_window_layers": 21,
            "sliding_window": 32_768,
            "use_sliding_window": False,
        },
        14_315_784_192,
        2.7,
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "head_dim": 64,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "experts_per_token": 4,
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "rope_theta": 150_000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        },
        20_914_757_184,
        3.6,
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_published_mixtures_have_the_published_sizes(name):
    fields, total, active = MIXTURES[name]
    config = families.read_fields(fields, "config.json")
    assert models.count(config) == total
    embedding = config.vocab_size * config.hidden_size if name.startswith("gpt-oss") else 0
    assert round((models.count_active(config) - embedding) / 1e9, 1) == active
