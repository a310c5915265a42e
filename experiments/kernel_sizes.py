"""The sizes that `experiments.benchmark_kernels` runs on each platform."""

from experiments.kernel_cases import (
    Case,
    Packing,
    attention,
    grouped_matmul,
    logprobs,
    paged_attention,
)

QWEN_7B = (28, 4, 128, 128)
LATENT = (128, 1, 576, 512)
MOST = {"attention": "as cuDNN's within 10%", "paged_attention": "80% of bandwidth"}
MOST |= {"grouped_matmul": "70% of peak", "logprobs": "60% of peak"}


def accelerator_cases(platform: str) -> list[Case]:
    """The sizes of models of 7B and above, in bfloat16; pages as a platform's kernels take them."""
    bf16, expected, page = "bfloat16", MOST, 128 if platform == "tpu" else 16
    long = {"against": "blocked", "timed_reference": False}
    paged, grouped = expected["paged_attention"], expected["grouped_matmul"]
    return [
        paged_attention("256 rows of 2,048", 256, 2048, QWEN_7B, bf16,
                        page_size=page, expected=paged),
        paged_attention("16 rows of 32,768", 16, 32_768, QWEN_7B, bf16,
                        page_size=page, expected=paged),
        paged_attention("256 rows of 1,024, 8 of them on 1,024", 256, 1024, QWEN_7B, bf16,
                        shared=(1024, 8), page_size=page),
        paged_attention("latent, 64 rows of 4,096", 64, 4096, LATENT, bf16,
                        latent=True, page_size=page),
        grouped_matmul("131,072 rows, 128 experts", 131_072, 128, 2048, 768, bf16,
                       against="ragged", timed_reference=False, expected=grouped),
        grouped_matmul("16,384 rows, 32 experts", 16_384, 32, 7168, 2048, bf16, expected=grouped),
        attention("2 x 8,192", 2, Packing((8192,)), QWEN_7B, bf16,
                  timed_reference=False, expected=expected["attention"]),
        attention("1 x 32,768", 1, Packing((32_768,)), QWEN_7B, bf16,
                  expected=expected["attention"], **long),
        attention("16 packed in 16,384", 1, Packing((1024,) * 16), QWEN_7B, bf16, **long),
        attention("2,048 and 8 x 1,792 on it", 1, Packing((2048,), 1792, 8), QWEN_7B, bf16, **long),
        logprobs("8,192 of 152,064", 8192, 3584, 152_064, bf16, against="chunked",
                 timed_reference=False, expected=expected["logprobs"]),
    ]  # fmt: skip


def cpu_cases() -> list[Case]:
    """Sizes that a small machine computes in seconds, in float32."""
    f32, small = "float32", (8, 4, 64, 64)
    return [
        attention("8 x 192", 8, Packing((192,)), small, f32),
        attention("1 x 2,048", 1, Packing((2048,)), small, f32),
        attention("16 packed in 2,048", 1, Packing((128,) * 16), small, f32),
        attention("512 and 8 x 192 on it", 1, Packing((512,), 192, 8), small, f32),
        paged_attention("64 rows of 512", 64, 512, small, f32),
        paged_attention("64 rows of 128, 8 of them on 512", 64, 128, small, f32, shared=(512, 8)),
        logprobs("1,024 of 32,768", 1024, 512, 32_768, f32),
        grouped_matmul("2,048 rows, 8 experts", 2048, 8, 512, 512, f32),
    ]


def tiny_cases() -> list[Case]:
    """One case of each operation that costs nothing, for tests."""
    f32, heads = "float32", (4, 2, 16, 16)
    return [
        attention("16 and 2 x 24 on it", 2, Packing((16,), 24, 2), heads, f32),
        paged_attention("4 rows of 20 on 32", 4, 20, heads, f32, shared=(32, 2)),
        logprobs("32 of 96", 32, 16, 96, f32),
        grouped_matmul("48 rows, 3 experts", 48, 3, 16, 24, f32),
    ]


def cases(platform: str, tiny: bool = False) -> list[Case]:
    """The cases of a platform."""
    if tiny:
        return tiny_cases()
    return cpu_cases() if platform == "cpu" else accelerator_cases(platform)
