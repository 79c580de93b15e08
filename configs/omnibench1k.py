r"""OmniBenchmark-1K in 100 tasks: 1,000 classes, some 190,000 images (Lou et al., CaRE, ICML 2026).

    python main.py --config=configs/omnibench1k.py --config.data.source=omnibenchmark1k.tar.gz

The archive of `train/` and `test/`, a folder for each class, is the data set
LMMM2025/OmniBenchmark-1K of Hugging Face. Division, class order 1993 and tasks are those of the
authors' code (GitHub: LMMMEng/CaRE). Further streams, of 200, 151 and 301 tasks:

    --config.classes_per_task=5
    --config.classes_per_task=100$(printf ',6%.0s' {1..150})
    --config.classes_per_task=100$(printf ',3%.0s' {1..300})

Published final accuracies, percent, ViT-B/16 of ImageNet-21k, in 100, 200, 151 and 301 tasks: CaRE
68.27, 67.46, 69.01, 68.51; MOS 64.27, 63.51, 65.20, 64.37; APER with adapter, prototypes of an
encoder that adapts once, 62.24, 61.53, 62.99, 62.99; in 100 tasks alone SD-LoRA 28.15 and InfLoRA
27.01. Nothing was measured with this file yet. The run is evaluated after every tenth task and
after the last one.
"""

import ml_collections

from fdc_jax.run import base


def get_config(learner: str = "cumulative_lora") -> ml_collections.ConfigDict:
    config = base.get_config("omnibench1k", learner)
    config.classes_per_task = 10
    config.evaluation.every = 10
    return config
