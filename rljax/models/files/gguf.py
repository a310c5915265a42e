"""GGUF files of llama, qwen2 and qwen3, read with the package `gguf` (extra `gguf`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rljax.errors import InputError
from rljax.models.config import Attention, Block, Dense, ModelConfig, Stack
from rljax.models.files.fields import Fields
from rljax.models.files.tables import (
    Table,
    from_heads,
    heads_vector,
    linear,
    rows,
    to_heads,
    vector,
)

_COMMON: Table = {
    "embed": rows("token_embd.weight"),
    "norm": vector("output_norm.weight"),
    "output": linear("output.weight"),
    "attention_norm": vector("blk.{layer}.attn_norm.weight"),
    "attention/q": to_heads("blk.{layer}.attn_q.weight"),
    "attention/k": to_heads("blk.{layer}.attn_k.weight"),
    "attention/v": to_heads("blk.{layer}.attn_v.weight"),
    "attention/o": from_heads("blk.{layer}.attn_output.weight"),
    "feed_forward_norm": vector("blk.{layer}.ffn_norm.weight"),
    "dense/gate": linear("blk.{layer}.ffn_gate.weight"),
    "dense/up": linear("blk.{layer}.ffn_up.weight"),
    "dense/down": linear("blk.{layer}.ffn_down.weight"),
}

TABLES: Mapping[str, Table] = {
    # Of llama alone the converter turns the rotary pairs of each head to stand side by side.
    "llama": {
        **_COMMON,
        "attention/q": to_heads("blk.{layer}.attn_q.weight", interleaved=True),
        "attention/k": to_heads("blk.{layer}.attn_k.weight", interleaved=True),
    },
    "qwen2": {
        **_COMMON,
        "attention/q_bias": heads_vector("blk.{layer}.attn_q.bias"),
        "attention/k_bias": heads_vector("blk.{layer}.attn_k.bias"),
        "attention/v_bias": heads_vector("blk.{layer}.attn_v.bias"),
    },
    "qwen3": {
        **_COMMON,
        "attention/q_norm": vector("blk.{layer}.attn_q_norm.weight"),
        "attention/k_norm": vector("blk.{layer}.attn_k_norm.weight"),
    },
}
"""Where each family's parameters are in a GGUF file; by general.architecture."""


def _package() -> ModuleType:
    try:
        import gguf
    except ImportError as e:
        raise InputError(
            "reading .gguf files needs the package gguf; install it: pip install 'rljax[gguf]'"
        ) from e
    return gguf


class File:
    """The weights of a GGUF file, open for reading (a `weights.Store`).

    Attributes:
      config: What its metadata describe.
      shapes: Name -> shape of every weight.
    """

    def __init__(self, path: Path):
        """Reads the metadata; no weight yet.

        Raises:
          ValueError: The file is no GGUF file, or describes what is not supported; named.
        """
        self.path = path
        self._gguf = _package()
        try:
            reader = self._gguf.GGUFReader(path)
        except Exception as e:  # the package raises many kinds
            raise InputError(f"{path} cannot be read as GGUF ({e}); fetch it again") from e
        # Only places are kept: the reader maps the whole file and would hold it in memory.
        self._places = {
            t.name: (int(t.data_offset), tuple(t.data.shape), t.data.dtype, t.tensor_type)
            for t in reader.tensors
        }
        self.shapes = {t.name: tuple(int(n) for n in t.shape[::-1]) for t in reader.tensors}
        values = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("tokenizer.")
        }
        if "rope_freqs.weight" in self.shapes:
            raise InputError(
                f"{path}: rope_freqs.weight (scaled rotary frequencies) is not supported in GGUF "
                "files; load the model's Hugging Face folder instead"
            )
        vocab = self.shapes.get("token_embd.weight", (None,))[0]
        self.config = _config(values, vocab, "output.weight" not in self.shapes, str(path))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing to hold: each read opens the file."""
        yield

    def read(self, name: str, cut: tuple[slice, ...]) -> np.ndarray:
        """A part of one weight, dequantised to float32; only its rows are read."""
        offset, shape, dtype, kind = self._places[name]
        first, *rest = cut
        row = int(np.prod(shape[1:], dtype=np.int64))
        count = (first.stop - first.start) * row
        data = np.fromfile(
            self.path, dtype, count, offset=offset + first.start * row * dtype.itemsize
        ).reshape(-1, *shape[1:])
        return self._gguf.quants.dequantize(data, kind)[(slice(None), *rest)]


def _config(values: dict[str, Any], vocab: int | None, tied: bool, where: str) -> ModelConfig:
    """The configuration that a GGUF file's metadata describe."""
    family: str = values.get("general.architecture", "")
    if family not in TABLES:
        raise InputError(
            f"{where}: general.architecture={family!r} is not supported in GGUF files, only "
            f"{', '.join(TABLES)} are; load the model's Hugging Face folder instead"
        )
    # Only fields under the architecture's name describe the model.
    prefix = f"{family}."
    f = Fields({k: v for k, v in values.items() if k.startswith(prefix)}, where)
    width = f.size(prefix + "embedding_length")
    heads = f.size(prefix + "attention.head_count")
    head_dim = f.size(prefix + "attention.key_length", width // heads)
    f.must(prefix + "attention.value_length", head_dim)
    f.must(prefix + "rope.dimension_count", head_dim)
    f.must(prefix + "rope.scaling.type", "none")
    f.must(prefix + "vocab_size", vocab)
    attention = Attention(
        num_heads=heads,
        num_kv_heads=f.size(prefix + "attention.head_count_kv", heads),
        head_dim=head_dim,
        bias=family == "qwen2",
        qk_norm="head" if family == "qwen3" else None,
        rope_theta=f.number(prefix + "rope.freq_base", 10_000.0),
    )
    block = Block(attention, Dense(f.size(prefix + "feed_forward_length")))
    config = ModelConfig(
        vocab_size=f.size(prefix + "vocab_size", vocab),
        hidden_size=width,
        stacks=(Stack((block,), f.size(prefix + "block_count")),),
        norm_eps=f.number(prefix + "attention.layer_norm_rms_epsilon", 1e-5),
        tie_embeddings=tied,
        family=str(family),
        max_positions=f.size(prefix + "context_length", 32_768),
    )
    f.close(())
    return config
