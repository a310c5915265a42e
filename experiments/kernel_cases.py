"""What `experiments.benchmark_kernels` runs: sizes of each operation, with their bytes and FLOPs.

Bytes are those that have to move if every array is read or written once; FLOPs are those of the
products (2 for each multiplication with an addition). `both` is the forward and the backward pass:
what the backward pass has to compute anew, because it is not kept, is counted once.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call has to do at least.

    Attributes:
      flops: Operations of its products.
      bytes: Read from memory and written to it.
    """

    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Case:
    """One size of an operation.

    Attributes:
      operation: Its name.
      name: Of the case.
      asked: The operation's record of what is asked.
      make: Makes the arrays, from the seed 0.
      call: From an implementation's `run` to a function of these arrays.
      works: The work of `forward` and, where there are gradients, of `both`.
      gradients: Which of the arrays have gradients.
      carried: An array that the second result replaces in the next call, or None.
      against: The implementation whose results are the truth; it need not be timed.
      timed_reference: Whether the plain reference is timed too, and not only compared with.
      expected: What to expect of the best implementation.
    """

    operation: str
    name: str
    asked: Any
    make: Callable[[], tuple[Any, ...]]
    call: Callable[[Callable[..., Any]], Callable[..., Any]]
    works: dict[str, Work]
    gradients: tuple[int, ...] = ()
    carried: int | None = None
    against: str = "reference"
    timed_reference: bool = True
    expected: str = ""


def _normal(*shapes: Sequence[int], dtype: Any) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key, shape in pairs]


def _size(dtype: Any) -> int:
    return jnp.dtype(dtype).itemsize


# Attention


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the sequences of a row lie.

    Attributes:
      prompts: Tokens of each prompt.
      responses: Tokens of each of a prompt's responses, which see the prompt; none: the prompts are
        sequences of their own.
      count: Responses of each prompt.
    """

    prompts: tuple[int, ...]
    responses: int = 0
    count: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a row."""
        return sum(self.prompts) + len(self.prompts) * self.count * self.responses

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        n, total = self.responses, 0
        for prompt in self.prompts:
            total += prompt * (prompt + 1) // 2
            total += self.count * (n * (n + 1) // 2 + n * prompt)
        return total

    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions, segments and prefixes of a row's tokens, int32."""
        positions, segments, prefix, last = [], [], [], 0
        for prompt in self.prompts:
            own = last + 1
            parts = [(prompt, 0, 0)] + [(self.responses, prompt, own)] * self.count
            for length, start, ahead in parts:
                last += 1
                positions.append(np.arange(start, start + length))
                segments.append(np.full(length, last))
                prefix.append(np.full(length, ahead))
        found = (np.concatenate(part).astype(np.int32) for part in (positions, segments, prefix))
        return tuple(found)  # type: ignore[return-value]


def attention(
    name: str,
    rows: int,
    packing: Packing,
    heads: tuple[int, int, int, int],
    dtype: str,
    **others: Any,
) -> Case:
    """A case of attention.

    Args:
      name: Of the case.
      rows: B.
      packing: Of each row.
      heads: Query heads, key heads, width of keys, width of values.
      dtype: Of queries, keys and values.
      **others: Further fields of `Case`.
    """
    from rljax_kernels.attention import Asked, whole_rows

    (h, kv, d, dv), t = heads, packing.tokens
    shared = packing.count > 0
    packed = shared or len(packing.prompts) > 1

    def make() -> tuple[Any, ...]:
        q, k, v = _normal((rows, t, h, d), (rows, t, kv, d), (rows, t, kv, dv), dtype=dtype)
        positions, segments, prefix = (jnp.tile(x, (rows, 1)) for x in packing.places())
        return q, k, v, whole_rows(positions, segments, prefix if shared else None)

    def call(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v, places: run(q, k, v, places, places, scale=d**-0.5)

    pairs = rows * packing.pairs * h
    inputs, out = rows * t * (h * d + kv * (d + dv)), rows * t * h * dv
    forward = Work(2 * pairs * (d + dv), _size(dtype) * (inputs + out))
    # Backwards: the scores anew, and the gradients of scores, queries, keys and values.
    backward = Work(2 * pairs * (3 * d + 2 * dv), _size(dtype) * (2 * inputs + 2 * out))
    return Case(
        "attention",
        name,
        Asked(dtype, rows, t, t, h, kv, d, dv, prefix=shared, packed=packed),
        make,
        call,
        {"forward": forward, "both": _sum(forward, backward)},
        gradients=(0, 1, 2),
        **others,
    )


def _sum(a: Work, b: Work) -> Work:
    return Work(a.flops + b.flops, a.bytes + b.bytes)


# Paged attention


def paged_attention(
    name: str,
    rows: int,
    own: int,
    heads: tuple[int, int, int, int],
    dtype: str,
    *,
    shared: tuple[int, int] = (0, 1),
    latent: bool = False,
    page_size: int = 16,
    **others: Any,
) -> Case:
    """A case of paged attention: one layer, pages in random order.

    Args:
      name: Of the case.
      rows: R.
      own: Tokens of a row in pages of its own.
      heads: Query heads, key heads, width of keys, width of values.
      dtype: Of queries, keys and values.
      shared: Tokens of a prompt that so many rows share.
      latent: Whether values are part of the keys.
      page_size: Tokens of a page.
      **others: Further fields of `Case`.
    """
    from rljax_kernels.paged_attention import Asked, PageTables
    from rljax_kernels.paged_attention.pages import to_bits

    (h, kv, d, dv), (prompt, each) = heads, shared
    blocks = rows // each if prompt else 1
    own_pages, shared_pages = -(-own // page_size), prompt // page_size
    pages = rows * own_pages + (blocks * shared_pages)

    def make() -> tuple[Any, ...]:
        keys_shape, values_shape = (1, pages, kv, d, page_size), (1, pages, kv, page_size, dv)
        values = [] if latent else [values_shape]
        q, k, v, *pool = _normal(
            (rows, h, d), (rows, kv, d), (rows, kv, dv), keys_shape, *values, dtype=dtype
        )
        held = dict(zip(("k", "v"), map(to_bits, pool), strict=False))
        order = np.random.default_rng(0).permutation(pages).astype(np.int32)
        tables = PageTables(
            own=jnp.asarray(order[: rows * own_pages].reshape(rows, own_pages)),
            base=jnp.full(rows, prompt, jnp.int32),
            shared=jnp.asarray(order[rows * own_pages :].reshape(blocks, shared_pages)),
        )
        positions = jnp.full(rows, prompt + own - 1, jnp.int32)
        return q, k, v, held, tables, positions, jnp.ones(rows, bool)

    def call(run: Callable[..., Any]) -> Callable[..., Any]:
        def one(q: Any, k: Any, v: Any, pool: Any, *places: Any) -> Any:
            return run(q, k, v, pool, 0, *places, scale=d**-0.5)

        return one

    token = kv * (d if latent else d + dv)
    moved = (rows * own + (blocks * prompt if prompt else 0)) * token + rows * h * (d + dv)
    work = Work(2 * rows * (prompt + own) * h * (d + dv), _size(dtype) * moved)
    sharing = each if prompt else 0
    asked = Asked(dtype, rows, h, kv, d, dv, page_size, sharing=sharing, latent=latent)
    return Case("paged_attention", name, asked, make, call, {"forward": work}, carried=3, **others)


# Log-probabilities


def logprobs(
    name: str, tokens: int, width: int, vocabulary: int, dtype: str, **others: Any
) -> Case:
    """A case of log-probabilities and entropies, with the output matrix [width, vocabulary]."""
    from rljax_kernels.logprobs import Asked, Options

    options = Options(False, None, 1024)

    def make() -> tuple[Any, ...]:
        hidden, matrix = _normal((tokens, width), (width, vocabulary), dtype=dtype)
        matrix = (matrix * width**-0.5).astype(dtype)
        targets = jax.random.randint(jax.random.key(1), (tokens, 1), 0, vocabulary)
        return hidden, matrix, targets

    def call(run: Callable[..., Any]) -> Callable[..., Any]:
        def one(hidden: Any, matrix: Any, targets: Any) -> Any:
            found = run(hidden, matrix, targets, jnp.float32(1), jnp.int32(0), options)
            return found.picked[:, 0] - found.lse, found.lse - found.mean

        return one

    product, read = 2 * tokens * width * vocabulary, (tokens + vocabulary) * width * _size(dtype)
    return Case(
        "logprobs",
        name,
        Asked(dtype, tokens, width, vocabulary),
        make,
        call,
        # Backwards: the logits anew, and the gradients of hidden states and matrix.
        {"forward": Work(product, read), "both": Work(4 * product, 3 * read)},
        gradients=(0, 1),
        **others,
    )


# Grouped matmul


def grouped_matmul(
    name: str, rows: int, groups: int, width: int, outer: int, dtype: str, **others: Any
) -> Case:
    """A case of grouped matmul: rows [rows, width] by matrices [groups, width, outer].

    Sizes of groups are those of rows that choose a group at random, each with a weight of its own
    between 1/2 and 3/2.
    """
    from rljax_kernels.grouped_matmul import Asked

    def make() -> tuple[Any, ...]:
        x, weights = _normal((rows, width), (groups, width, outer), dtype=dtype)
        rng = np.random.default_rng(0)
        shares = rng.uniform(0.5, 1.5, groups)
        sizes = rng.multinomial(rows, shares / shares.sum()).astype(np.int32)
        return x, (weights * width**-0.5).astype(dtype), jnp.asarray(sizes)

    product = 2 * rows * width * outer
    moved = _size(dtype) * (rows * (width + outer) + groups * width * outer)
    return Case(
        "grouped_matmul",
        name,
        Asked(dtype),
        make,
        lambda run: run,
        {"forward": Work(product, moved), "both": Work(3 * product, 3 * moved)},
        gradients=(0, 1),
        **others,
    )


QWEN_7B, QWEN_30B = (28, 4, 128, 128), (32, 4, 128, 128)
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


def nbytes(tree: Any) -> int:
    """Bytes of the arrays of a pytree, or of their shapes."""
    return sum(math.prod(x.shape) * _size(x.dtype) for x in jax.tree.leaves(tree))
