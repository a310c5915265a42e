"""Makes the golden files of this folder with torch 2.13 and transformers 5.24.

    python tests/golden/models/make.py                          the tiny models and yarn.json
    python tests/golden/models/make.py NAME ...                 some of the tiny models
    python tests/golden/models/make.py --smollm2 MODEL.gguf     smollm2.json (accelerate, gguf)

Each folder holds a tiny random model as transformers saves it, and `expected.json`:
`rows` are token ids with their positions, each run alone in float32; `logits` are what came out.
`gradients` are of the summed -log p of each row's tokens after the first: for every weight its
norm and its dot product with cos(0, 1, 2, ...).

`yarn.json` holds, for rotary parameters with and without each option, the frequencies of a head of
32 and the factor of cosines and sines.

`names.json` holds the names and shapes of weights that transformers 5.24 saves for one layer of
each kind in each family; `{e}` stands for every expert.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent
BASE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 12,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Name -> transformers class prefix, configuration, dtype of the file.
MODELS = {
    "llama": ("Llama", {**BASE, "rope_parameters": LLAMA3}, torch.bfloat16),
    "llama_tied": (
        "Llama",
        {**BASE, "tie_word_embeddings": True, "num_key_value_heads": 4},
        torch.float16,
    ),
    "qwen2": ("Qwen2", {**BASE, "rms_norm_eps": 1e-6}, torch.bfloat16),
    "qwen3": (
        "Qwen3",
        {
            **BASE,
            "head_dim": 12,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        torch.float32,
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**BASE, **MOE, "head_dim": 8, "norm_topk_prob": True},
        torch.bfloat16,
    ),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        {
            **BASE,
            **MOE,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts_per_tok": 3,
        },
        torch.bfloat16,
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**BASE, **MOE, "shared_expert_intermediate_size": 20},
        torch.bfloat16,
    ),
    "qwen2_moe_mixed": (
        "Qwen2Moe",
        {
            **BASE,
            **MOE,
            "shared_expert_intermediate_size": 8,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
        torch.bfloat16,
    ),
    "mixtral": ("Mixtral", {**BASE, **LOCAL}, torch.bfloat16),
    "mixtral_window": (
        "Mixtral",
        {
            **BASE,
            **LOCAL,
            "num_experts_per_tok": 3,
            "head_dim": 12,
            "sliding_window": 5,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        torch.bfloat16,
    ),
    "olmoe": (
        "Olmoe",
        {**BASE, **LOCAL, "num_experts": 4, "num_key_value_heads": 4},
        torch.bfloat16,
    ),
    "olmoe_grouped": (
        "Olmoe",
        {
            **BASE,
            **LOCAL,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
    ),
    "gpt_oss": (
        "GptOss",
        {
            **BASE,
            **LOCAL,
            "head_dim": 8,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        torch.bfloat16,
    ),
    "gpt_oss_yarn": (
        "GptOss",
        {
            **BASE,
            **LOCAL,
            "head_dim": 16,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "sliding_window": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
        torch.bfloat16,
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **BASE,
            **LATENT,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.7,
                "mscale_all_dim": 0.9,
            },
        },
        torch.bfloat16,
    ),
    "deepseek_v3_direct": (
        "DeepseekV3",
        {
            **BASE,
            **LATENT,
            "first_k_dense_replace": 0,
            "q_lora_rank": None,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
        torch.bfloat16,
    ),
}
MODELS |= {
    "smollm3": (
        "SmolLM3",
        {
            **BASE,
            "num_hidden_layers": 4,
            "pad_token_id": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        torch.bfloat16,
    ),
    "smollm3_window": (
        "SmolLM3",
        {
            **BASE,
            "head_dim": 12,
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "attention_bias": True,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 5,
            "pad_token_id": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        torch.bfloat16,
    ),
    "olmo2": ("Olmo2", {**BASE, "pad_token_id": None, "eos_token_id": 2}, torch.bfloat16),
}
LENGTHS = (12, 7, 5)
PLACES, WINDOW_PLACES = [0, 1, 5, 6, 20, 50], [20, 21, 22, 23, 24, 25]
YARN = (
    {"factor": 4.0, "original_max_position_embeddings": 64},
    {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.5, "mscale_all_dim": 0.9},
    {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    {"factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2},
    {"factor": 8.0, "original_max_position_embeddings": 128, "mscale_all_dim": 0.9},
    {"factor": 8.0, "attention_factor": 0.7, "mscale": 0.5, "mscale_all_dim": 0.9},
)


def make_model(name: str) -> None:
    kind, fields, dtype = MODELS[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():  # the defaults, norms of 1 and biases of 0, would hide mistakes
        for key, p in model.named_parameters():
            spread = torch.randn_like(p)
            norm, embedding = key.endswith("norm.weight"), "embed_tokens" in key
            # Large enough that gpt-oss clamps some of what its experts compute.
            clamped = kind == "GptOss" and "gate_up_proj" in key
            scale = 0.6 if clamped else 0.3 if embedding else 0.2
            p.copy_(1 + 0.3 * spread if norm else spread * scale)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = type(model).from_pretrained(folder, dtype=torch.float32)

    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 48, n).tolist(), list(range(n))) for n in LENGTHS]
    # transformers measures windows in tokens, not in positions: those of gaps would differ.
    windows = fields.get("sliding_window")
    rows.append((rng.integers(0, 48, 6).tolist(), WINDOW_PLACES if windows else PLACES))
    logits = []
    for tokens, positions in rows:
        out = model(
            torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        ).logits[0]
        logp = torch.log_softmax(out, -1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
        (-logp.sum()).backward()
        logits.append([[float(f"{v:.8g}") for v in row] for row in out.tolist()])
    # Saved as if they were the weights, so that there is one for each weight of the file: in
    # memory experts are fused.
    with torch.no_grad(), tempfile.TemporaryDirectory() as saved:
        for p in model.parameters():
            p.copy_(p.grad)
        for buffer in model.buffers():
            buffer.zero_()
        model.save_pretrained(saved)
        grads = load_file(Path(saved) / "model.safetensors")
    gradients = {}
    for key, g in sorted(grads.items()):
        flat = g.double().reshape(-1)
        direction = torch.cos(torch.arange(flat.numel(), dtype=torch.float64))
        gradients[key] = [flat.norm().item(), (flat * direction).sum().item()]
    expected = {
        "rows": [{"tokens": t, "positions": p} for t, p in rows],
        "logits": logits,
        "gradients": gradients,
    }
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    print(name, {f.name: f.stat().st_size for f in sorted(folder.iterdir())})


def make_yarn() -> None:
    cases = []
    for case in YARN:
        fields = {"rope_type": "yarn", "rope_theta": 150_000.0, **case}
        config = transformers.Qwen3Config(
            head_dim=32, max_position_embeddings=256, rope_parameters=dict(fields)
        )
        inverse, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        found = [float(f"{x:.8g}") for x in inverse.tolist()]
        cases.append({"fields": fields, "magnitude": magnitude, "frequencies": found})
    (HERE / "yarn.json").write_text(json.dumps(cases, indent=1) + "\n")


def make_smollm2(file: Path) -> None:
    """The 64 likeliest ids after a prompt, one by one, whatever they are (no end is heeded)."""
    load = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**load)
    model = transformers.AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32)
    prompt = "The capital of France is"
    ids, chosen, margins = tokenizer(prompt)["input_ids"], [], []
    with torch.no_grad():
        for _ in range(64):
            top = model(torch.tensor([ids + chosen])).logits[0, -1].topk(2)
            chosen.append(top.indices[0].item())
            margins.append((top.values[0] - top.values[1]).item())
        logits = model(torch.tensor([ids])).logits[0, -1]
    expected = {
        "made_with": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "file": file.name,
        "prompt": prompt,
        "prompt_ids": ids,
        "ids": chosen,
        "text": tokenizer.decode(chosen),
        "smallest_margin": min(margins),
        "last_prompt_logits_head": logits[:16].tolist(),
    }
    (HERE / "smollm2.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(expected)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="the models to make; all by default")
    parser.add_argument("--smollm2", type=Path)
    args = parser.parse_args()
    print(sys.version.split()[0], torch.__version__, transformers.__version__)
    if args.smollm2:
        make_smollm2(args.smollm2)
    else:
        if not args.names:
            make_yarn()
        for name in args.names or MODELS:
            make_model(name)
