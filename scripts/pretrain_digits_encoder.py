"""Pre-trains the small encoder that comes with the package, on letters and from scratch.

    python scripts/pretrain_digits_encoder.py --output=fdc_jax/assets/digits_vit.npz

Images are made on the fly: letters of the fonts that matplotlib ships, without a single digit,
are warped, thickened or thinned, reduced to 8x8 and enlarged again, as the scanned digits of
configs/digits.py are. Letters that look alike in print share a class. No real image is used.

4000 steps of 128 images took 10 minutes of processor time, 24 minutes by the clock on two busy
cores; 54 % of the letters are then named correctly in 236 classes (a random half to whole of an 8x8
scan is seen). Equal flags give equal files on one machine with one JAX version.
"""

import argparse
import unicodedata
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tqdm
from jax.scipy.ndimage import map_coordinates
from jaxtyping import Array, Float, Int, Key
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import distance_transform_edt
from scipy.sparse.csgraph import connected_components

from fdc_jax.model import vit, weights

VARIANT = "digits"
IMAGE_SIZE = 32
SCAN_SIZE = 8
# Side of a stored glyph, and of the square inside it that the letter fills.
GLYPH_SIZE = 48
LETTER_SIZE = 32
LEARNING_RATE = 2e-3

_FONT_FOLDER = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
_DEJAVU = tuple(
    f"DejaVu{family}{style}"
    for family, slanted in (("Sans", "Oblique"), ("SansMono", "Oblique"), ("Serif", "Italic"))
    for style in ("", "-Bold", f"-{slanted}", f"-Bold{slanted}")
)
_STIX = ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta")
_COMPUTER_MODERN = ("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10", "cmmi10")
# Faces that the encoder was not trained on.
HELD_OUT_FONTS = ("DejaVuSerif-Italic", "STIXGeneral", "cmss10")

# First and last code point of each alphabet's capitals and small letters.
_ALPHABETS = {
    "Latin": ((0x41, 0x5A), (0x61, 0x7A)),
    "Greek": ((0x391, 0x3A9), (0x3B1, 0x3C9)),
    "Cyrillic": ((0x402, 0x40B), (0x40F, 0x418), (0x41A, 0x438), (0x43A, 0x44F), (0x452, 0x45B)),
    "Armenian": ((0x531, 0x556), (0x561, 0x586)),
    "Georgian": ((0x10D0, 0x10F0),),
}


def letters() -> list[str]:
    """Returns the letters of all alphabets; none is a digit or a number of any kind."""
    points = [p for spans in _ALPHABETS.values() for a, b in spans for p in range(a, b + 1)]
    return [c for c in map(chr, points) if unicodedata.category(c) in ("Lu", "Ll", "Lo")]


def fonts_of(letter: str) -> tuple[str, ...]:
    """Returns the faces that draw a letter properly."""
    name = unicodedata.name(letter).split()[0]
    if name == "LATIN":
        return _DEJAVU + _STIX + _COMPUTER_MODERN
    if name in ("GREEK", "CYRILLIC"):
        return _DEJAVU + _STIX
    if name == "ARMENIAN":
        return _DEJAVU
    return tuple(face for face in _DEJAVU if "Mono" not in face or "Oblique" in face)


def draw(letter: str, font: ImageFont.FreeTypeFont) -> np.ndarray:
    """Draws a letter, scales its longer side to LETTER_SIZE and centres it.

    Returns:
        bool [GLYPH_SIZE, GLYPH_SIZE], true on ink.
    """
    left, top, right, bottom = font.getbbox(letter)
    canvas = Image.new("L", (int(right - left), int(bottom - top)))
    ImageDraw.Draw(canvas).text((-left, -top), letter, fill=255, font=font)
    canvas = canvas.crop(canvas.getbbox())
    ratio = LETTER_SIZE / max(canvas.size)
    width, height = (max(1, round(side * ratio)) for side in canvas.size)
    glyph = Image.new("L", (GLYPH_SIZE, GLYPH_SIZE))
    canvas = canvas.resize((width, height), Image.Resampling.BOX)
    glyph.paste(canvas, ((GLYPH_SIZE - width) // 2, (GLYPH_SIZE - height) // 2))
    return np.asarray(glyph) > 127


class Pool(NamedTuple):
    """Glyphs as signed distances: positive on ink, in pixels of the glyph."""

    distances: Float[Any, "n s s"]
    half_strokes: Float[Any, " n"]
    classes: Int[Any, " n"]
    cumulative: Float[Any, " n"]  # chance of each glyph and those before it; classes equally often


def signed_distances(ink: np.ndarray) -> np.ndarray:
    """Returns the distance of each pixel to the outline, positive on ink."""
    inside, outside = (np.asarray(distance_transform_edt(side)) for side in (ink, ~ink))
    return (np.maximum(inside - 0.5, 0) - np.maximum(outside - 0.5, 0)).astype(np.float32)


def merge_look_alikes(glyphs: np.ndarray, threshold: float = 0.85) -> np.ndarray:
    """Returns a class per glyph; glyphs that share most of their ink fall into one class.

    Args:
        glyphs: bool [n, s, s].
        threshold: shared ink over joint ink from which two glyphs are one class.
    """
    flat = glyphs.reshape(len(glyphs), -1).astype(np.float32)
    shared = flat @ flat.T
    joint = flat.sum(1)[:, None] + flat.sum(1)[None] - shared
    # Look-alikes of look-alikes join, too.
    return connected_components(shared / joint >= threshold, directed=False)[1]


def render() -> Pool:
    """Draws every letter in every face and finds the classes."""
    faces = {
        face: ImageFont.truetype(str(_FONT_FOLDER / f"{face}.ttf"), 96)
        for face in _DEJAVU + _STIX + _COMPUTER_MODERN
    }
    alphabet = letters()
    class_of = merge_look_alikes(np.stack([draw(c, faces["DejaVuSans"]) for c in alphabet]))
    rows = [
        (signed_distances(draw(letter, faces[face])), number)
        for letter, number in zip(alphabet, class_of, strict=True)
        for face in fonts_of(letter)
        if face not in HELD_OUT_FONTS
    ]
    distances, classes = (np.stack(column) for column in zip(*rows, strict=True))
    # Half the stroke's width: a high quantile of the distances on ink, where serifs do not count.
    half_strokes = np.array([np.quantile(d[d > 0], 0.9) for d in distances], np.float32)
    share = 1.0 / np.bincount(classes)[classes]
    cumulative = (np.cumsum(share) / share.sum()).astype(np.float32)
    return Pool(distances, half_strokes, classes, cumulative)


def _bicubic(image: Array, size: int, translation: Array, scale: Array) -> Array:
    shape = (size, size)
    return jax.image.scale_and_translate(
        image, shape, (0, 1), scale, translation, "cubic", antialias=False
    )


def scan(key: Key[Array, ""], distances: Float[Array, "s s"], half_stroke: Array) -> Array:
    """Writes a glyph by a shaky hand and scans it: [SCAN_SIZE, SCAN_SIZE] in [0, 1]."""
    keys = jax.random.split(key, 8)
    fine = 4 * SCAN_SIZE
    grid = (jnp.arange(fine) + 0.5) * 2 / fine - 1
    y, x = jnp.meshgrid(grid, grid, indexing="ij")

    angle = jax.random.truncated_normal(keys[0], -2, 2) * 0.15
    shear = jax.random.truncated_normal(keys[1], -2, 2) * 0.2
    stretch = jnp.exp(jax.random.uniform(keys[2], (2,), minval=-0.15, maxval=0.35))
    shift = jax.random.uniform(keys[3], (2,), minval=-0.12, maxval=0.12)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    y, x = y - shift[0], x - shift[1]
    y, x = cos * y - sin * x, sin * y + cos * x
    y, x = y * stretch[0], x * stretch[1] + shear * y
    bend = jax.random.normal(keys[4], (2, 5, 5)) * 0.1
    bend = jax.image.resize(bend, (2, fine, fine), "cubic")
    at = [
        (coordinate + offset) * LETTER_SIZE / 2 + (GLYPH_SIZE - 1) / 2
        for coordinate, offset in zip((y, x), bend, strict=True)
    ]
    warped = map_coordinates(distances, at, order=1, mode="nearest")

    # Strokes of printed faces differ more than those of pens.
    wanted = jax.random.uniform(keys[5], minval=1.5, maxval=4.5)
    growth = jnp.clip(wanted - half_stroke, -0.5 * half_stroke, None)
    ink = jax.nn.sigmoid((warped + growth) / 0.4)
    levels = ink.reshape(SCAN_SIZE, 4, SCAN_SIZE, 4).mean((1, 3))
    strength = jax.random.uniform(keys[6], minval=0.8, maxval=1.3)
    return jnp.round(jnp.clip(levels * strength, 0, 1) * 16) / 16


def enlarge(key: Key[Array, ""], levels: Float[Array, "s s"]) -> Float[Array, "i i 3"]:
    """Enlarges a scan, cuts a random part out of it: grey RGB in 0 ... 255, whole numbers."""
    key_area, key_ratio, key_place = jax.random.split(key, 3)
    one = jnp.ones(2)
    large = _bicubic(levels, IMAGE_SIZE, 0 * one, one * IMAGE_SIZE / SCAN_SIZE)
    area = jax.random.uniform(key_area, minval=0.5, maxval=1.0)
    ratio = jnp.exp(jax.random.uniform(key_ratio, minval=-1, maxval=1) * jnp.log(4 / 3))
    sides = jnp.minimum(jnp.sqrt(area * jnp.stack([ratio, 1 / ratio])), 1.0)
    scale = 1 / sides
    corner = jax.random.uniform(key_place, (2,)) * (1 - sides) * IMAGE_SIZE
    part = _bicubic(jnp.clip(large, 0, 1), IMAGE_SIZE, -corner * scale, scale)
    grey = jnp.round(jnp.clip(part, 0, 1) * 255)
    return jnp.repeat(grey[..., None], 3, axis=-1)


def images_of(key: Key[Array, ""], pool: Pool, chosen: Int[Array, " n"]) -> Array:
    """Writes, scans and enlarges the chosen glyphs: [n, IMAGE_SIZE, IMAGE_SIZE, 3]."""

    def one(key, glyph):
        key_scan, key_enlarge = jax.random.split(key)
        levels = scan(key_scan, pool.distances[glyph], pool.half_strokes[glyph])
        return enlarge(key_enlarge, levels)

    return jax.vmap(one)(jax.random.split(key, len(chosen)), chosen)


def draw_batch(key: Key[Array, ""], pool: Pool, size: int) -> tuple:
    """Returns images [size, IMAGE_SIZE, IMAGE_SIZE, 3] and classes [size], by the key alone."""
    key_glyphs, key_images = jax.random.split(key)
    drawn = jax.random.uniform(key_glyphs, (size,))
    chosen = jnp.searchsorted(pool.cumulative, drawn, side="right")
    return images_of(key_images, pool, chosen), pool.classes[chosen]


class Training:
    """Pre-training: what its compiled functions are specialised to.

    Args:
        pool: the glyphs.
        steps: of training.
        batch_size: images of a step.
    """

    def __init__(self, pool: Pool, steps: int, batch_size: int):
        self.model, self.batch_size = vit.build(VARIANT, IMAGE_SIZE), batch_size
        self.pool, self.num_classes = Pool(*map(jnp.asarray, pool)), int(pool.classes.max()) + 1
        warm_up = max(1, min(500, steps // 10))
        rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, warm_up, steps)
        matrices = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
        adam = optax.adamw(rate, b2=0.98, weight_decay=0.05, mask=matrices)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)

    @partial(jax.jit, static_argnums=0)
    def initialise(self, key: Key[Array, ""]) -> tuple[Any, Any]:
        """Returns random parameters with a zero head, and the optimiser's state."""
        kernel = jnp.zeros((self.model.variant.width, self.num_classes))
        head = {"kernel": kernel, "bias": jnp.zeros(self.num_classes)}
        trained = vit.initialise(self.model, IMAGE_SIZE, key), head
        return trained, self.optimizer.init(trained)

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(self, state: tuple[Any, Any], key: Key[Array, ""], pool: Pool):
        """Trains on one batch; the task is to name the letter. Returns the state and the loss."""
        trained, optimizer_state = state
        images, classes = draw_batch(key, pool, self.batch_size)

        def mean_loss(trained: Any) -> Array:
            params, head = trained
            features: Any = self.model.apply({"params": params}, images)
            logits = features @ head["kernel"] + head["bias"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()

        loss, gradient = jax.value_and_grad(mean_loss)(trained)
        updates, optimizer_state = self.optimizer.update(gradient, optimizer_state, trained)
        return (optax.apply_updates(trained, updates), optimizer_state), loss


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, prints the loss and writes the encoder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=weights.DIGITS_WEIGHTS, help="file to write")
    for name, default in (("steps", 4000), ("batch_size", 128), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args(arguments)
    training = Training(render(), flags.steps, flags.batch_size)
    key_start, key_train, _ = jax.random.split(jax.random.key(flags.seed), 3)
    state, loss = training.initialise(key_start), jnp.nan
    for number in tqdm.trange(flags.steps, mininterval=10):
        key = jax.random.fold_in(key_train, number)
        state, loss = training.step(state, key, training.pool)
    if not np.isfinite(loss):
        raise SystemExit(f"the loss became {loss}")
    print(f"loss {loss:.3f} in {training.num_classes} classes of letters")
    weights.save(state[0][0], flags.output)
    print(f"wrote {flags.output}")


if __name__ == "__main__":
    main()
