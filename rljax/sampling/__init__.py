"""The paged-KV sampling engine, for rollouts and for batch inference."""

from rljax.sampling.config import EngineConfig
from rljax.sampling.engine import Engine
from rljax.sampling.generation import generate
from rljax.sampling.params import SamplingParams
from rljax.sampling.responses import Response

__all__ = ["Engine", "EngineConfig", "Response", "SamplingParams", "generate"]
