"""The paged-KV sampling engine, for rollouts and for batch inference."""

from rljax.sampling.engine import Engine, generate
from rljax.sampling.types import Response, SamplingParams

__all__ = ["Engine", "Response", "SamplingParams", "generate"]
