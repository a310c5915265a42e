"""Eight virtual CPU devices for every test, asked for before jax is imported."""

import os

import pytest

# Programs here are tiny and compiled often: LLVM's optimizations would cost more than they give.
_FLAGS = ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0")
for _flag in _FLAGS:
    if _flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two programs with collectives in flight on virtual devices can wait for each other for ever.
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "false")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs a C++ compiler where there is none."""
    if item.get_closest_marker("compiler"):
        from rljax_kernels import cpu  # imports jax

        if cpu.compiler() is None:
            pytest.skip("no C++ compiler is installed")
