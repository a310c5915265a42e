"""Reads models from weight files, and writes them so that others can."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from rljax import mesh as meshes
from rljax.errors import InputError
from rljax.models import families
from rljax.models.config import ModelConfig
from rljax.models.files import gguf, huggingface, weights
from rljax.models.parameters import Params, check, declare

_log = logging.getLogger(__name__)

# Buffers that older checkpoints carry and that follow from the configuration.
_BUFFERS = (".rotary_emb.inv_freq",)


def from_pretrained(
    path: str | os.PathLike[str],
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    *,
    rules: meshes.Rules = meshes.TRAIN_RULES,
    compute_dtype: Literal["float32", "bfloat16"] | None = None,
) -> tuple[ModelConfig, Params]:
    """Reads a model: each weight once, straight into its shard.

    Args:
      path: A Hugging Face folder (config.json and safetensors) or a .gguf file; never a name to
        be downloaded.
      dtype: Dtype of the parameters.
      mesh: Where to put them; each process reads only what it holds. None: whole on the default
        device.
      rules: How to lay them over the mesh.
      compute_dtype: `ModelConfig.dtype`, that of activations and matmul inputs; by default
        bfloat16 where the parameters are, float32 otherwise.

    Returns:
      The configuration and the parameters, in the shape of `models.declare(config)`.

    Raises:
      ValueError: There is no model, something in its configuration is not supported, or a weight
        is missing, surplus or misshapen; named, in one line.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(f"dtype={dtype.name} of parameters must be a float such as float32")
    if compute_dtype is None:
        compute_dtype = "bfloat16" if dtype == jnp.bfloat16 else "float32"
    path = Path(path)
    store: weights.Store
    unused: tuple[str, ...] = ()
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise InputError(f"model file {path} is not there; fetch it first")
        store = file = gguf.File(path)
        config, table = file.config, gguf.TABLES[file.config.family]
    else:
        if not path.is_dir():
            raise InputError(
                f"model folder {path} is not there; give a folder with config.json and "
                "safetensors, or a .gguf file"
            )
        fields = huggingface.read_json(path / huggingface.CONFIG)
        config = families.read_fields(fields, str(path / huggingface.CONFIG))
        family = families.FAMILIES[config.family]
        unused, table = family.unused(fields, config), family.table
        store = huggingface.Folder(path)
    config = dataclasses.replace(config, dtype=compute_dtype)
    entries = weights.entries(config, table)
    untied = table["output"].name
    extra = (*_BUFFERS, untied) if config.tie_embeddings else _BUFFERS
    shapes = {n: s for n, s in store.shapes.items() if not n.startswith(unused)}
    if len(shapes) < len(store.shapes):
        _log.info(
            "%s: %d weights of multi-token prediction (%s*) are left out",
            path,
            len(store.shapes) - len(shapes),
            "*, ".join(unused),
        )
    weights.check_names(entries, shapes, extra, str(path))
    if config.tie_embeddings and untied in store.shapes:
        _check_tied(store, table["embed"].name, untied, str(path))
    return config, weights.load(entries, store, declare(config), dtype, mesh, rules)


def _check_tied(store: weights.Store, embed: str, output: str, where: str) -> None:
    """Refuses an output matrix beside a tied embedding, unless the two are equal."""
    rows, width = store.shapes[embed]
    same = store.shapes[output] == (rows, width)
    step = max(1, 2**22 // width)
    with store.reading():
        for i in range(0, rows if same else 0, step):
            cut = (slice(i, min(i + step, rows)), slice(0, width))
            same = same and np.array_equal(store.read(embed, cut), store.read(output, cut))
    if not same:
        raise InputError(
            f"{where}: tie_word_embeddings is true but {output!r} differs from {embed!r}; set it "
            "to false in config.json"
        )


def save_pretrained(
    path: str | os.PathLike[str],
    config: ModelConfig,
    params: Params,
    *,
    extra: Mapping[str, Any] | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a Hugging Face folder that `from_pretrained` and transformers load.

    On several processes all must call it; the first writes.

    Args:
      path: The folder; made where it is missing.
      config: The model; `config.family` names its weights.
      params: Its parameters, on any mesh; saved in their own dtype.
      extra: Further fields of config.json, such as `eos_token_id`.
      shard_bytes: Bytes of a weight file, beyond which another is begun; also about what memory
        is used.

    Raises:
      ValueError: The parameters are not the configuration's, or the family cannot express it.
    """
    check(params, config)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    fields = {
        "architectures": [families.family(config.family, "save_pretrained").architecture],
        **families.write_fields(config),
        "dtype": str(max(dtypes, key=lambda d: d.itemsize)),
        **(extra or {}),
    }
    entries = weights.entries(config, families.FAMILIES[config.family].table)
    sizes: dict[str, int] = {}
    for entry in entries:
        leaf: Any = params
        for key in entry.path:
            leaf = leaf[key]
        for index in entry.pieces():
            name = entry.name(index)
            sizes[name] = sizes.get(name, 0) + math.prod(entry.inner) * leaf.dtype.itemsize
    found = weights.stored(entries, params)
    if jax.process_index() == 0:
        huggingface.write(Path(path), fields, found, sizes, shard_bytes)
    else:
        for _ in found:  # takes part in gathering
            pass
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("save_pretrained")
