"""Runs the command."""

import sys

from fdc_jax.report.command import main

sys.exit(main())
