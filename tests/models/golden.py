"""The golden models: tiny random ones of every family, with what transformers computes."""

from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
MODELS = [
    "llama",
    "llama_tied",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "qwen2_moe",
    "qwen2_moe_mixed",
    "mixtral",
    "mixtral_window",
    "olmoe",
    "olmoe_grouped",
    "gpt_oss",
    "gpt_oss_yarn",
    "deepseek_v3",
    "deepseek_v3_direct",
    "smollm3",
    "smollm3_window",
    "olmo2",
]
