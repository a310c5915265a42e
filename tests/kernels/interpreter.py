"""Runs Triton kernels in Triton's interpreter, on the CPU, from inside jit.

    with interpreter.interpreting():
        out = jax.jit(lambda *a: attention(*a, backend="triton"))(q, k, v)

It needs torch and triton: `pytest.importorskip` both first. The interpreter replaces parts of
Triton, so it runs in a process of its own, and kernels can be compiled in this one.
"""

import atexit
import contextlib
import functools
import importlib
import importlib.util
import os
import pathlib
import pickle
import subprocess
import sys
import threading

import jax
import numpy as np


@contextlib.contextmanager
def interpreting():
    """What is traced meanwhile calls its kernels in the interpreter, through callbacks.

    Backward passes are traced where gradients are taken, so that has to be inside, too. On a GPU
    (JAX_PLATFORMS=cuda pytest tests/kernels) the kernels themselves run, and references multiply
    in float32.
    """
    from rljax_kernels import triton_tools

    if jax.default_backend() == "gpu":
        with jax.default_matmul_precision("highest"):
            yield
        return
    with triton_tools.running_by(_run):
        yield


def available():
    """Whether the interpreter and what it needs are installed."""
    return all(importlib.util.find_spec(package) for package in ("triton", "torch"))


def _run(launch, *arguments):
    where = [None if isinstance(a, int) else n for n, a in enumerate(arguments)]
    arrays = [a for a in arguments if not isinstance(a, int)]
    kernel = (launch.kernel.module, launch.kernel.name, launch.grid, dict(launch.constants))

    def on_host(*values):
        values = iter(np.asarray(v) for v in values)
        given = [arguments[n] if w is None else next(values) for n, w in enumerate(where)]
        # What a kernel leaves out must not be relied on: outputs start as NaN or a wild number.
        outputs = [
            np.full(o.shape, 0 if n in launch.zeroed else _wild(o.dtype), o.dtype)
            for n, o in enumerate(launch.outputs)
        ]
        return _ask(kernel, given, outputs)

    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in launch.outputs]
    return jax.pure_callback(on_host, shapes, *arrays)


def _wild(dtype):
    return np.nan if jax.numpy.issubdtype(dtype, np.inexact) else 1 << 30


_one_at_a_time = threading.Lock()  # devices ask from threads of their own


def _ask(*question):
    with _one_at_a_time:
        process = _process()
        pickle.dump(question, process.stdin)
        process.stdin.flush()
        answer = pickle.load(process.stdout)
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


@functools.cache
def _process():
    """The interpreter, started once."""
    given = {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(pathlib.Path(__file__).resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **given},
    )
    atexit.register(process.kill)
    return process


def _tensor(value):
    import torch

    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == jax.numpy.bfloat16:
        return torch.from_numpy(np.array(value).view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))


def _array(tensor):
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(jax.numpy.bfloat16)
    return tensor.numpy()


def _answer(kernel, given, outputs):
    """The outputs, or what went wrong."""
    module, name, grid, constants = kernel
    try:
        written = [_tensor(o) for o in outputs]
        function = getattr(importlib.import_module(module), name)
        function[grid](*map(_tensor, given), *written, **constants)
        return [_array(t) for t in written]
    except Exception as error:
        cause = error.__cause__ or error
        at = cause.__traceback__
        while at.tb_next is not None:
            at = at.tb_next
        return f"{name} at {at.tb_frame.f_code.co_filename}:{at.tb_lineno}: {cause!r}"


def _multiply_bfloat16():
    """Lets the interpreter's dot take bfloat16, whose bits it would multiply as integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *others):
        return dot(self, widened(a), widened(b), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _patch_once():
    """Lets the interpreter replace Triton's language once a module, not at each function's call."""
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()

    class Kept:
        def restore(self):
            pass

    def patch_lang(function):
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            patch(function)
        return Kept()

    interpreter._patch_lang = patch_lang


def _serve():
    """Answers questions from stdin until there are no more."""
    _multiply_bfloat16()
    _patch_once()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not get between the answers
    while True:
        try:
            question = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_answer(*question), answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
