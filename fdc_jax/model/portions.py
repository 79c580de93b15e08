"""How many images of a batch a processor takes through the encoder together.

A core's caches hold the activations of some images, not those of a batch: a batch in portions is
faster than at once. An accelerator, and several devices that share a batch, take all of it.
"""

import jax

# Measured in training ViT-Ti/16: half of it costs 2 %, twice as much 8 %, the batch of 64 27 %.
_TOKENS = 1100


def images_together(images: int, side: int, patch: int) -> int:
    """Returns the size of a portion, a divisor of the number of images.

    It depends on shapes and on the kind of device, never on the number of cores, so that results
    are the same on any of them.

    Args:
        images: of the batch.
        side: of an image, in pixels.
        patch: side of a patch.
    """
    most = max(1, _TOKENS // ((side // patch) ** 2 + 1))
    if images <= most or jax.default_backend() != "cpu" or jax.device_count() > 1:
        return images
    best = max(size for size in range(1, most + 1) if images % size == 0)
    # Portions far below what fits are slower than the batch.
    return best if 2 * best >= most else images
