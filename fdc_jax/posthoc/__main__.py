"""Runs the command."""

import sys

from fdc_jax.posthoc.command import main

sys.exit(main())
