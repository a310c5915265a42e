"""Seeds of evaluations, apart from those of training."""

import hashlib

from rljax.errors import InputError

_LOWEST = 1 << 30


def seed_for_evaluation(seed: int) -> int:
    """The seed of the sampling keys of a run's evaluations.

    Evaluation must not draw with keys that training uses, in this run or in one with another seed:
    runs over seeds 0, 1, 2, ... would share their noise. The value is a hash of the run's seed and
    a fixed tag, and at least 2^30, so it is no training seed below that. All evaluations of a run
    share it, so that two of them differ by the weights and not by chance.

    Args:
      seed: The run's seed, 0 to 2^64 - 1.

    Returns:
      In [2^30, 2^31), the same on every machine and in every version.

    Raises:
      InputError: The seed is outside its range.
    """
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed={seed} is outside [0, 2^64): use another")
    digest = hashlib.sha256(b"rljax evaluation" + seed.to_bytes(8, "little")).digest()
    return _LOWEST + int.from_bytes(digest[:4], "little") % _LOWEST
