"""Compilations are counted, named and timed."""

import jax
import jax.numpy as jnp

from rljax.monitoring import compilations


def test_a_watch_names_and_times_what_was_compiled():
    def shifted(x):
        return x * 3 + 1

    compiled, numbers = jax.jit(shifted), jnp.arange(3)
    before = compilations.count()
    with compilations.watch() as outer:
        with compilations.watch() as first:
            compiled(numbers)
        with compilations.watch() as second:
            compiled(numbers)
        compiled(jnp.arange(4.0))
    assert compilations.count() - before == len(outer) > len(first) == 1
    assert "shifted" in first.found[0].name and first.seconds > 0
    assert not second and str(second) == "nothing"
    assert str(first).startswith("jit(shifted) in ")
    assert "and 1 more in" in str(outer) or "and 2 more in" in str(outer)
    compiled(jnp.arange(5))
    assert len(outer) < compilations.count() - before  # its block is over
