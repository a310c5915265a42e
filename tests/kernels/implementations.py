"""Running an operation by each of its implementations, where it can run or in its interpreter."""

import contextlib

import pytest
from rljax_kernels import registry

from tests.kernels import interpreter


def others(operation):
    """Parameters of a test: the implementations but for the reference."""
    found = []
    for each in operation.implementations:
        marks = []
        if "cpu" not in each.platforms:
            marks.append(pytest.mark.targets)
        if each.name == "native":
            marks.append(pytest.mark.compiler)
        if each.name != operation.reference:
            found.append(pytest.param(each.name, marks=marks))
    return found


@contextlib.contextmanager
def able(operation, name, asked):
    """Lets an implementation run meanwhile, or skips the test."""
    found = operation.named(name)
    if reason := found.refuses(asked) or found.missing():
        pytest.skip(f"{name}: {reason}")
    if "cpu" in found.platforms:
        yield
        return
    platform = found.platforms[0]
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if platform == "gpu":
            if not interpreter.available():
                pytest.skip(f"{name}: Triton's interpreter needs torch")
            stack.enter_context(interpreter.interpreting())
        # Kernels for TPU are interpreted by Pallas on all other devices.
        patch.setattr(registry, "platform_here", lambda: platform)
        yield
