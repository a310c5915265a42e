"""The errors that a user can act on: their message is complete in one line.

Programs show these as one line and nothing else; any other exception is a fault of the library and
keeps its traceback.
"""


class RljaxError(Exception):
    """The base of all errors whose message says what, got and fix."""


class InputError(RljaxError, ValueError):
    """An input that cannot be used: a setting, an argument, a file's content."""


class MissingFileError(InputError, FileNotFoundError):
    """A file that is not where it was said to be."""


class MissingDependencyError(InputError, ImportError):
    """A package or program that must be installed first."""


class TrainingStoppedError(RljaxError, FloatingPointError):
    """A run that cannot go on, such as after too many updates without a finite gradient."""


class EngineStateError(RljaxError, RuntimeError):
    """A call of the sampling engine that its state does not allow now."""


class NonFiniteLogitsError(RljaxError, FloatingPointError):
    """Weights whose forward pass gives NaN, so that nothing can be sampled."""
