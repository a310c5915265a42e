"""What every test runs under: eight virtual CPU devices, a compilation cache, checked shapes.

All of it is set before jax and rljax are imported, and inherited by the processes that tests start.
"""

import fnmatch
import importlib.util
import os
import pathlib
import shutil
import sys
import tempfile

import pytest

_SLOW = pathlib.Path(__file__).parent / "slow.txt"

# Programs here are tiny and compiled often: LLVM's optimizations would cost more than they give.
_FLAGS = ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0")
for _flag in _FLAGS:
    if _flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two programs with collectives in flight on virtual devices can wait for each other for ever.
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "false")

# One compilation cache for all workers and for the processes they start: the caller's, or a folder
# that lives as long as this session. The controller makes it; its workers inherit the variable.
_own_cache = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _own_cache = tempfile.mkdtemp(prefix="rljax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _own_cache
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


# Arrays that annotated functions take and return are checked against their annotations.
_spec = importlib.util.spec_from_file_location(
    "shape_checks", pathlib.Path(__file__).parent / "shape_checks.py"
)
sys.modules["shape_checks"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["shape_checks"])
sys.modules["shape_checks"].install("rljax", "rljax_kernels")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of slow.txt; refuses a line that matches no test of a file it names."""
    lines = [line.strip() for line in _SLOW.read_text().splitlines()]
    patterns = [line for line in lines if line and not line.startswith("#")]
    unused = set(patterns)
    for item in items:
        found = [p for p in patterns if fnmatch.fnmatchcase(item.nodeid, _escaped(p))]
        unused.difference_update(found)
        if found and not found[-1].startswith("!"):
            item.add_marker(pytest.mark.slow)
    if any("::" in argument for argument in config.invocation_params.args):
        return  # only some tests of a file were asked for
    collected = {item.nodeid.split("::")[0] for item in items}
    stale = sorted(p for p in unused if p.lstrip("!").split("::")[0] in collected)
    if stale:
        raise pytest.UsageError(f"{_SLOW.name}: no test matches {', '.join(stale)}")


def _escaped(pattern: str) -> str:
    """The pattern for fnmatch, which would take brackets for sets of characters."""
    return pattern.lstrip("!").replace("[", "[[]")


def pytest_unconfigure() -> None:
    """Removes the cache where this process made it."""
    if _own_cache is not None:
        shutil.rmtree(_own_cache, ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs a C++ compiler where there is none."""
    if item.get_closest_marker("compiler"):
        from rljax_kernels import cpu  # imports jax

        if cpu.compiler() is None:
            pytest.skip("no C++ compiler is installed")
