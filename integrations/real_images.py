"""Real images for the programs of docs/integrations.md: CIFAR-100, and a pretrained ViT-Ti/16.

`CIFAR100` names the folder with the `cifar100` of TensorFlow Datasets, `WEIGHTS` the file
`Ti_16-augreg-i21k-ft-i1k.npz`. Needs timm.
"""

import io
import os

import numpy as np
import tensorflow_datasets as tfds
import timm
import torch
from PIL import Image

CLASSES, TRAIN, TEST, SIZE = 20, 20, 15, 96  # the last in pixels


def read(split: str, per_class: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first images of each class, [n, 3, SIZE, SIZE] from -1 to 1, and their labels."""
    source = tfds.data_source(
        "cifar100",
        split=split,
        data_dir=os.environ["CIFAR100"],
        decoders={"image": tfds.decode.SkipDecoding()},
    )
    missing = dict.fromkeys(range(CLASSES), per_class)
    images, labels = [], []
    for row in source:
        label = int(row["label"])
        if missing.get(label):
            missing[label] -= 1
            image = Image.open(io.BytesIO(row["image"])).resize((SIZE, SIZE))
            images.append(np.asarray(image, np.float32).transpose(2, 0, 1) / 127.5 - 1)
            labels.append(label)
        if not any(missing.values()):
            break
    return torch.tensor(np.stack(images)), torch.tensor(labels)


def vit(classes: int = 0) -> torch.nn.Module:
    """Returns the pretrained encoder, with a new layer `head` if there are classes."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=SIZE, num_classes=classes)
    model.load_pretrained(os.environ["WEIGHTS"])
    return model


train_images, train_labels = read("train", TRAIN)
test_images, test_labels = read("test", TEST)
images = torch.cat([train_images, test_images])
labels = torch.cat([train_labels, test_labels])
test = torch.arange(len(labels)) >= len(train_labels)
