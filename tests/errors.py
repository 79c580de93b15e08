"""Errors of wrong input."""

import contextlib

import pytest

from fdc_jax.errors import InputError


@contextlib.contextmanager
def input_error(pattern):
    """Expects an InputError of one line, which the pattern matches; yields what pytest caught."""
    with pytest.raises(InputError, match=pattern) as caught:
        yield caught
    assert str(caught.value).isprintable()
