"""Errors of wrong input, and of the system."""

import contextlib
import errno
import os

import pytest

from fdc_jax.errors import InputError


@contextlib.contextmanager
def input_error(pattern):
    """Expects an InputError of one line, which the pattern matches; yields what pytest caught."""
    with pytest.raises(InputError, match=pattern) as caught:
        yield caught
    assert str(caught.value).isprintable()


def stale(*arguments, **options):
    """Fails as a network disk does for a moment."""
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
