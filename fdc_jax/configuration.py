"""What a configuration must satisfy, and how two of them differ."""

import json
from typing import Any, TypeAlias

from fdc_jax.calibration.settings import Settings
from fdc_jax.errors import InputError

# An ml_collections.ConfigDict; no type checker knows its fields.
Config: TypeAlias = Any

# Where things lie and how fast they are read and computed; no number in a result depends on them,
# but for rounding. Weights are compared by their checksum.
WITHOUT_EFFECT = frozenset(
    {
        "cache_dir",
        "data.dir",
        "encoder.weights",
        "encoder.attention",
        "data.workers",
        "data.cache_gib",
        "checkpoint.every_steps",
        "checkpoint.keep",
        "report",
        "train.seeds_together",
    }
)

_AT_LEAST_ONE = (
    "train.epochs",
    "train.batch_size",
    "train.rank",
    "learner.inflora_ca.epochs",
    "learner.inflora_ca.samples_per_class",
    "learner.inflora_ca.batch_size",
    "learner.ewc_lora.images_at_once",
    "learner.rsiat.bottleneck",
    "learner.rsiat.projector_width",
    "learner.rsiat.calibration_epochs",
    "learner.rsiat.samples_per_class",
    "learner.rsiat.calibration_batch_size",
    "evaluation.batch_size",
    "checkpoint.every_steps",
    "checkpoint.keep",
)
_AT_LEAST_ZERO = (
    "train.first_epochs",
    "class_order_seed",
    "classes_per_task",
    "data.train_per_class",
    "data.test_per_class",
    "data.workers",
    "data.cache_gib",
    "learner.inflora_ca.logit_temperature",
    "learner.splitlora.loss_temperature",
    "learner.ewc_lora.strength",
    "learner.ewc_lora.accumulation",
    "learner.sd_lora.magnitude",
    "learner.sd_lora.magnitude_rate_factor",
    "learner.lora_subtraction.triplet_weight",
    "learner.lora_subtraction.margin",
    "learner.loda.general_scale",
    "learner.loda.isolated_scale",
    "learner.loda.margin",
    "learner.loda.look_ahead",
    "learner.loda.native_learning_rate",
    "learner.rsiat.margin",
    "learner.rsiat.steering_weight",
    "learner.rsiat.warm_up_epochs",
    "learner.rsiat.separation_weight",
    "learner.rsiat.alignment_weight",
    "learner.rsiat.repulsion_weight",
    "learner.rsiat.projector_learning_rate",
)
_POSITIVE = (
    "train.increment_learning_rate",
    "train.head_learning_rate",
    "learner.inflora_ca.learning_rate",
    "learner.inflora_ca.ridge",
    "learner.rsiat.scale",
    "learner.rsiat.drift_width",
    "learner.rsiat.ridge",
    "learner.rsiat.calibration_learning_rate",
    "learner.splitlora.alpha",
    "learner.loda.merge_gamma",
    "learner.loda.scale",
)
_ONE_OF = {
    "train.schedule": ("constant", "cosine", "quarter_cosine"),
    "learner.preset": ("protocol", "native"),
    "learner.inflora_ca.schedule": ("constant", "cosine"),
    "learner.ewc_lora.fisher": ("per_sample", "batch_mean"),
    "learner.ewc_lora.fisher_labels": ("data", "model"),
    "learner.ewc_lora.head_input": ("class_token", "l2"),
    "learner.ewc_lora.folding": ("products", "factors"),
    "learner.sd_lora.head_start": ("uniform", "zero_bias"),
    "learner.rsiat.calibration_optimizer": ("sgd", "adam"),
}


def flatten(config: Config) -> dict[str, Any]:
    """Returns `{"train.epochs": 20, ...}` with tuples as lists, as JSON would give them back."""
    flat: dict[str, Any] = {}

    def visit(prefix: str, tree: dict[str, Any]) -> None:
        for name, value in tree.items():
            if isinstance(value, dict):
                visit(f"{prefix}{name}.", value)
            else:
                flat[f"{prefix}{name}"] = value

    visit("", json.loads(config.to_json()))
    return dict(sorted(flat.items()))


def validate(config: Config) -> None:
    """Checks every value that can be checked without data or weights.

    Raises:
        InputError: names the field, what was expected and what was found.
    """
    flat = flatten(config)

    def refuse(field: str, expected: str) -> None:
        raise InputError(f"config.{field}: expected {expected}, found {flat[field]!r}")

    seeds = flat["seed"]
    if (
        not isinstance(seeds, list)
        or not seeds
        or not all(type(s) is int and s >= 0 for s in seeds)
    ):
        refuse("seed", "one or more whole numbers of at least 0, such as 1,2,3")
    if len(set(seeds)) != len(seeds):
        refuse("seed", "different numbers")
    for field in _AT_LEAST_ONE:
        if not flat[field] >= 1:
            refuse(field, "at least 1")
    for field in _AT_LEAST_ZERO:
        if not flat[field] >= 0:
            refuse(field, "at least 0")
    for field in _POSITIVE:
        if not 0 < flat[field] < float("inf"):
            refuse(field, "a positive finite number")
    try:
        Settings(**config.fdc.to_dict()).checked()
    except InputError as error:
        raise InputError(f"config.fdc.{error}") from error
    for field, known in _ONE_OF.items():
        if flat[field] not in known:
            refuse(field, " or ".join(known))
    lamb, lame = "learner.inflora.lamb", "learner.inflora.lame"
    if not 0 < flat[lamb] <= 1:
        refuse(lamb, "more than 0 and at most 1")
    if not flat[lamb] <= flat[lame] <= 1:
        refuse(lame, f"at least {lamb} and at most 1")
    for field in ("learner.inflora_ca.mean_scale", "learner.rsiat.mean_scale"):
        if not 0 <= flat[field] <= 1:
            refuse(field, "between 0 and 1")
    if not 0 <= flat["learner.rsiat.dropout"] < 1:
        refuse("learner.rsiat.dropout", "at least 0 and less than 1")
    if not abs(flat["learner.rsiat.separation_threshold"]) < float("inf"):
        refuse("learner.rsiat.separation_threshold", "a finite number")
    energy = "learner.lora_subtraction.energy"
    if not 0 < flat[energy] <= 1:
        refuse(energy, "more than 0 and at most 1")
    scale = flat["data.crop_scale"]
    if (
        not isinstance(scale, list)
        or len(scale) != 2
        or not all(isinstance(s, int | float) for s in scale)
        or not 0 < scale[0] <= scale[1] <= 1
    ):
        refuse("data.crop_scale", "two ascending shares of at most 1, such as 0.05,1.0")


def differences(
    saved: dict[str, Any], config: Config, checksums: dict[str, str]
) -> list[tuple[str, Any, Any]]:
    """Returns (field, saved value, new value) where a result would be another one.

    Args:
        saved: fields and checksums of an earlier run.
        config: of this run.
        checksums: of this run's weights and images, by name.
    """
    new = flatten(config) | checksums
    return [
        (field, saved.get(field), new.get(field))
        for field in sorted(saved.keys() | new.keys())
        if field not in WITHOUT_EFFECT and saved.get(field) != new.get(field)
    ]
