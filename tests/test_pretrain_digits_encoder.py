"""The script that made the embedded encoder: letters only, reproducible, a file that loads."""

import importlib.util
import sys
import unicodedata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.model import weights

pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "pretrain_digits_encoder.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[SCRIPT.stem]


@pytest.fixture(scope="module")
def pool(script):
    return script.render()


def test_no_letter_is_a_digit_or_a_number(script):
    letters = script.letters()
    assert len(letters) == len(set(letters)) > 200
    for letter in letters:
        assert unicodedata.category(letter) in ("Lu", "Ll", "Lo")
        assert unicodedata.numeric(letter, None) is None
        assert not letter.isdigit() and not letter.isnumeric()


def test_every_face_draws_every_letter_it_is_asked_for(script):
    # fontTools reads which characters a face really has: a missing one is drawn as a box.
    from fontTools.ttLib import TTFont

    for face in script._DEJAVU + script._STIX + script._COMPUTER_MODERN:
        known = TTFont(script._FONT_FOLDER / f"{face}.ttf").getBestCmap()
        asked = [letter for letter in script.letters() if face in script.fonts_of(letter)]
        assert asked
        missing = [letter for letter in asked if ord(letter) not in known]
        assert missing == [], face


def test_glyphs_fill_the_square_and_every_class_is_drawn_for_training(script, pool):
    ink = pool.distances > 0
    margin = (script.GLYPH_SIZE - script.LETTER_SIZE) // 2
    height, width = ink.any(2).sum(1), ink.any(1).sum(1)
    longest = np.maximum(height, width)
    assert longest.max() <= script.LETTER_SIZE
    # Thin ends vanish when an outline is scaled down.
    assert np.quantile(longest, 0.05) >= script.LETTER_SIZE - 4
    assert not ink[:, : margin - 1].any() and not ink[:, :, : margin - 1].any()
    trained = np.unique(pool.classes[~pool.held_out])
    np.testing.assert_array_equal(trained, np.arange(pool.classes.max() + 1))
    assert pool.held_out.any()


def test_look_alikes_share_a_class_and_others_do_not(script):
    from PIL import ImageFont

    font = ImageFont.truetype(str(script._FONT_FOLDER / "DejaVuSans.ttf"), 96)
    # Latin, Greek and Cyrillic A; Latin and Cyrillic small o; then letters of their own.
    letters = "A\u0391\u0410oo\u043eBKS"
    classes = script.merge_look_alikes(np.stack([script.draw(c, font) for c in letters]))
    assert classes.tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 4]


def test_look_alikes_of_look_alikes_share_a_class(script):
    glyphs = np.zeros((4, 1, 40), bool)
    glyphs[0, 0, :30] = glyphs[1, 0, 2:32] = glyphs[2, 0, 4:34] = True
    glyphs[3, 0, 20:] = True
    # Overlap: 28/32 for neighbours, 26/34 for the first and third.
    assert script.merge_look_alikes(glyphs, 0.8).tolist() == [0, 0, 0, 1]
    assert script.merge_look_alikes(glyphs, 0.9).tolist() == [0, 1, 2, 3]


def test_signed_distance_grows_into_the_ink(script):
    ink = np.zeros((9, 9), bool)
    ink[2:7, 3:6] = True
    distance = script.signed_distances(ink)
    np.testing.assert_array_equal(distance > 0, ink)
    assert distance[4, 4] == 1.5 and distance[4, 3] == 0.5 and distance[4, 2] == -0.5
    assert distance[4, 0] == -2.5


def test_scans_have_few_levels_and_pixels_are_grey_whole_numbers(script, pool):
    pool = script.Pool(*map(jnp.asarray, pool))
    glyph = 7
    scan = jax.jit(script.scan)(jax.random.key(0), pool.distances[glyph], pool.half_strokes[glyph])
    assert scan.shape == (8, 8)
    np.testing.assert_array_equal(scan * 16, np.round(scan * 16))
    assert 0 <= scan.min() and 0.5 < scan.max() <= 1
    images = np.asarray(jax.jit(script.images_of)(jax.random.key(1), pool, jnp.arange(12)))
    assert images.shape == (12, 32, 32, 3)
    assert images.min() == 0 and 200 < images.max() <= 255
    np.testing.assert_array_equal(images, np.round(images))
    np.testing.assert_array_equal(images[..., :1].repeat(3, -1), images)
    # Bright ink on a dark ground, in every image.
    assert (images.max((1, 2, 3)) > 100).all() and (images.min((1, 2, 3)) < 50).all()
    assert np.median(images) < 128


def test_classes_are_drawn_equally_often_and_held_out_faces_apart(script, pool):
    for held_out in (False, True):
        chance = np.diff(script.chances(pool, held_out), prepend=0)
        assert not chance[pool.held_out != held_out].any()
        assert (chance[pool.held_out == held_out] > 0).all()
        per_class = np.bincount(pool.classes, chance)
        np.testing.assert_allclose(per_class[per_class > 0], per_class.max(), rtol=1e-3)
        assert chance.sum() == pytest.approx(1)


def test_a_batch_follows_the_chances(script, pool, monkeypatch):
    on_device = script.Pool(*map(jnp.asarray, pool))
    monkeypatch.setattr(script, "images_of", lambda key, pool, chosen: chosen)
    cumulative = jnp.asarray(script.chances(pool, True))
    chosen, classes = script.draw_batch(jax.random.key(2), on_device, cumulative, 50_000)
    assert pool.held_out[np.asarray(chosen)].all()
    np.testing.assert_array_equal(classes, pool.classes[np.asarray(chosen)])
    counts = np.bincount(classes)
    counts = counts[counts > 0]
    assert counts.min() > 0.6 * counts.mean() and counts.max() < 1.5 * counts.mean()


def test_a_few_steps_write_a_file_that_loads_and_repeats(
    script, pool, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(script, "render", lambda: pool)
    arguments = ["--steps=12", "--batch_size=8", "--learning_rate=1e-3", "--seed=5"]
    for name in ("first.npz", "second.npz"):
        script.main([*arguments, f"--output={tmp_path / name}"])
    printed = capsys.readouterr().out
    assert "held-out faces" in printed and str(tmp_path / "second.npz") in printed
    first = weights.load(tmp_path / "first.npz", "digits", 32)
    second = weights.load(tmp_path / "second.npz", "digits", 32)
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    assert len(list(tmp_path.iterdir())) == 2


def test_training_lowers_the_loss_and_another_seed_differs(script, pool):
    # The settings of the test before, which are compiled already.
    settings = script.Settings(
        script.vit.build("digits", 32), int(pool.classes.max()) + 1, 12, 8, 1e-3
    )
    cumulative = jnp.asarray(script.chances(pool, False))
    pool = script.Pool(*map(jnp.asarray, pool))
    state = script.initialise(jax.random.key(0), settings)
    start = jax.tree.map(np.array, state.params)
    losses = []
    for _ in range(12):
        # The same batch each time.
        state, loss = script.step(state, jax.random.key(1), pool, cumulative, settings)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(settings.num_classes), rel=1e-3)
    assert losses[-1] < 0.9 * losses[0]
    other = script.initialise(jax.random.key(3), settings).params
    assert not np.allclose(start["embedding"]["kernel"], other["embedding"]["kernel"])


@pytest.mark.parametrize("flag", ["--steps=0", "--batch_size=-1"])
def test_counts_must_be_positive(script, flag, capsys):
    with pytest.raises(SystemExit) as caught:
        script.parse([flag])
    assert caught.value.code == 2
    assert "expected a positive number" in capsys.readouterr().err
