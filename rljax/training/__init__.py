"""State, update step, checkpoints and the loop."""

from rljax.training.loop import train
from rljax.training.state import TrainState

__all__ = ["TrainState", "train"]
