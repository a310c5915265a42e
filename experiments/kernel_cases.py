"""Cases of each operation for `experiments.benchmark_kernels`, with their bytes and FLOPs.

Bytes are those that have to move if every array is read or written once; FLOPs are those of the
products (2 for each multiplication with an addition). `both` is the forward and the backward pass:
what the backward pass has to compute anew, because it is not kept, is counted once.
"""

import dataclasses
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
