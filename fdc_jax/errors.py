"""The two kinds of failure that a user can act on; programs print them as one line."""


class InputError(ValueError):
    """A configuration, file or array is not what was expected."""


class TrainingError(RuntimeError):
    """Training cannot go on, for instance because a loss is not a finite number."""


class Interrupted(RuntimeError):
    """The process was asked to stop; what was done is saved."""
