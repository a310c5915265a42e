"""Triton kernels but attention's compile for GPUs without one, and are exported for CUDA."""

import importlib

import jax.numpy as jnp
import pytest
from rljax_kernels import triton_tools

pytestmark = pytest.mark.targets
if triton_tools.missing():
    pytest.skip(triton_tools.missing(), allow_module_level=True)

SHARED_MEMORY = {90: 227 * 1024, 89: 99 * 1024}  # bytes that a program may have

EXAMPLES = {
    "paged_attention": ("paged 128", "paged 128, window", "paged latent"),
    "logprobs": ("logprobs 4096 x 151936", "logprobs 4096 x 151936, tied"),
    "grouped_matmul": ("grouped 65536 x 128 x 2048 x 768", "grouped 1024 x 128 x 2048 x 768"),
}
"""Of each operation; the first is exported, the last is compiled for a GPU with little memory."""


def example(operation, name):
    module = importlib.import_module(f"rljax_kernels.{operation}.triton")
    of_name = [e for e in module.examples() if e.name == name]
    return next(e for e in of_name if e.arguments[0].dtype == jnp.bfloat16)


@pytest.mark.parametrize(("operation", "name"), [(o, n) for o in EXAMPLES for n in EXAMPLES[o]])
def test_they_compile_for_hopper_with_next_to_no_spills(operation, name):
    for compiled in triton_tools.report([example(operation, name)]):
        assert compiled.spills <= 16, compiled
        assert compiled.shared_memory <= SHARED_MEMORY[90], compiled


@pytest.mark.parametrize("operation", EXAMPLES)
def test_they_fit_gpus_with_little_shared_memory(operation):
    for compiled in triton_tools.report([example(operation, EXAMPLES[operation][-1])], 89):
        assert compiled.spills <= 16, compiled
        assert compiled.shared_memory <= SHARED_MEMORY[89], compiled


@pytest.mark.parametrize("operation", EXAMPLES)
def test_they_are_exported_for_cuda(operation):
    found = example(operation, EXAMPLES[operation][0])
    exported = triton_tools.export(found.function, *found.arguments)
    assert exported.platforms == ("cuda",)
    calls = str(exported.mlir_module()).count("custom_call @triton_kernel_call")
    assert calls == len(triton_tools.launches(found.function, *found.arguments))
