"""A learner of a user's own with a mistake in its loss."""

from fdc_jax.learners import Learner


class Fails(Learner):
    def loss(self, *arguments):
        """Divides by zero."""
        return 1 / 0
