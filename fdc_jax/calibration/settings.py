"""Settings and components of FDC."""

from functools import cache
from typing import Annotated, Any, NamedTuple

import jax
import msgspec
from msgspec import Meta

Weight = Annotated[float, Meta(ge=0, le=1e6)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of FDC, which checks them; the defaults are the paper's."""

    retained_energy: Annotated[
        float, Meta(gt=0, le=1, description="eta, share of the variance in the task subspace")
    ] = 0.75
    attenuation: Annotated[
        float, Meta(ge=0, le=1, description="gamma, share that TSF removes outside the subspace")
    ] = 0.5
    rlc_weight: Annotated[Weight, Meta(description="alpha, weight of RLC")] = 1.0
    pac_weight: Annotated[Weight, Meta(description="beta, weight of PAC")] = 1.0
    adapted_view_weight: Annotated[Weight, Meta(description="w_T, weight of the adapted view")] = (
        1.0
    )
    pretrained_view_weight: Annotated[
        Weight, Meta(description="w_0, weight of the pretrained view; 0 needs no such view")
    ] = 1.0
    neighbours: Annotated[
        int, Meta(ge=1, le=2**31 - 1, description="K, class prototypes whose cosines PAC averages")
    ] = 1


# Compiled functions accept settings.
jax.tree_util.register_dataclass(Settings, Settings.__struct_fields__, ())


class Switches(NamedTuple):
    """Components of FDC that are on, and whether affinities are standardised in another way.

    `nearest` takes the moments of the affinities of an input over the tasks ("PAC Neighborhood
    Size").
    """

    tsf: bool = True
    rlc: bool = True
    pac: bool = True
    adapted_view: bool = True
    pretrained_view: bool = True
    nearest: bool = False


@cache
def on_device(settings: Settings, on: Switches) -> tuple[Settings, Switches]:
    """Returns settings and components as compiled functions read them, as numbers."""
    numbers: Any = map(float, on)
    return jax.device_put((settings, Switches(*numbers)))


# Rows of Table current-ablation, then of Table plugin with one view: fields of `Switches`.
COMPONENTS = {
    "raw": {"tsf": False, "rlc": False, "pac": False},
    "tsf": {"rlc": False, "pac": False},
    "pac": {"tsf": False, "rlc": False},
    "rlc": {"tsf": False, "pac": False},
    "tsf+pac": {"rlc": False},
    "tsf+rlc": {"pac": False},
    "pac+rlc": {"tsf": False},
    "full": {},
    "adapted_view": {"pretrained_view": False},
    "pretrained_view": {"adapted_view": False},
    "pac+rlc_adapted_view": {"tsf": False, "pretrained_view": False},
    "pac+rlc_pretrained_view": {"tsf": False, "adapted_view": False},
}
