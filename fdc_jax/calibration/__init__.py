"""Post-hoc calibration of task heads from feature statistics: arrays in, arrays out.

`FDC` is the paper's method; `from_settings` also gives what is beyond it, `WhitenedFDC` and
`TransportedFDC`, with the settings of a name in `CALIBRATORS`; `load` reads what `save` of any
wrote. `check` tells before any training whether settings suit tasks.
"""

from fdc_jax.calibration.components import CALIBRATORS
from fdc_jax.calibration.fdc import FDC, Settings, Terms
from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.storage import load, to_arrays
from fdc_jax.calibration.transported import TransportedFDC, check, from_settings
from fdc_jax.calibration.whitened import WhitenedFDC, WhitenedTerms

__all__ = [
    "CALIBRATORS",
    "FDC",
    "Scores",
    "Settings",
    "Terms",
    "TransportedFDC",
    "WhitenedFDC",
    "WhitenedTerms",
    "check",
    "from_settings",
    "load",
    "to_arrays",
]
