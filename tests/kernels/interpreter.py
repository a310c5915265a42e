"""Runs Triton kernels in Triton's interpreter, on the CPU, from inside jit.

    with interpreter.interpreting():
        out = jax.jit(lambda *a: attention(*a, backend="triton"))(q, k, v)

It needs torch and triton: `pytest.importorskip` both before this module is imported.
"""

import contextlib
import functools
import importlib
import os
import sys

import jax
import numpy as np
import torch
from rljax_kernels import triton_tools


@contextlib.contextmanager
def interpreting():
    """What is traced meanwhile calls its kernels in the interpreter, through callbacks."""
    with triton_tools.running_by(_run):
        yield


def _run(launch, *arguments):
    arrays = [a for a in arguments if not isinstance(a, int)]
    integers = [a if isinstance(a, int) else None for a in arguments]

    def on_host(*values):
        values = iter(values)
        given = [_tensor(next(values)) if i is None else i for i in integers]
        # What a kernel does not write must not be relied on: it starts as NaN or a wild number.
        outputs = [
            _tensor(
                np.full(o.shape, 0 if n in launch.zeroed else _wild(o.dtype), o.dtype)
                if o.shape
                else np.zeros((), o.dtype)
            )
            for n, o in enumerate(launch.outputs)
        ]
        kernel = _interpreted(launch.kernel.module, launch.kernel.name)
        kernel[launch.grid](*given, *outputs, **launch.constants)
        return [_array(t, o.dtype) for t, o in zip(outputs, launch.outputs, strict=True)]

    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in launch.outputs]
    return jax.pure_callback(on_host, shapes, *arrays)


def _wild(dtype):
    return np.nan if np.issubdtype(dtype, np.inexact) or dtype == jax.numpy.bfloat16 else 2**30


def _tensor(value):
    """A torch tensor with a copy of the values."""
    value = np.array(value)
    if value.dtype == jax.numpy.bfloat16:
        return torch.from_numpy(value.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def _array(tensor, dtype):
    if dtype == jax.numpy.bfloat16:
        return tensor.view(torch.uint16).numpy().view(dtype)
    return tensor.numpy()


def _interpreted(module, name):
    return getattr(_copy(module), name)


@functools.cache
def _copy(module):
    """The module once more, its kernels made for the interpreter; so are those that it imports."""
    before = os.environ.get("TRITON_INTERPRET")
    known = {n: m for n, m in sys.modules.items() if _holds_kernels(n)}
    for n in known:
        del sys.modules[n]
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return importlib.import_module(module)
    finally:
        for n in [n for n in sys.modules if _holds_kernels(n)]:
            del sys.modules[n]
        sys.modules.update(known)
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _holds_kernels(module):
    return module.startswith("rljax_kernels.") and module.endswith("_kernels")
