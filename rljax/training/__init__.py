"""Training: the loop, a run's parts and stages, its state and checkpoints.

`loop.py` holds `train`; `build.py` makes the parts of a run, `run.py` its stages.
"""

from rljax.training.build import open_run
from rljax.training.loop import train
from rljax.training.run import Run
from rljax.training.state import RunState, TrainState

__all__ = ["Run", "RunState", "TrainState", "open_run", "train"]
