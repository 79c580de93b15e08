"""A learner of a user's own with a mistake in its loss."""

TITLE = "Fails"


def loss(setup, backbone, frozen, trained, batch):
    """Divides by zero."""
    return 1 / 0
