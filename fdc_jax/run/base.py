"""Settings, one field a line: the paper's, and our choices where it has none (docs/choices.md)."""

import functools
from typing import Any

import ml_collections
from ml_collections import config_dict


def get_config(
    benchmark: str = "cifar100", learner: str = "cumulative_lora"
) -> ml_collections.ConfigDict:
    """Returns the settings of a learner on a benchmark, with the options of all learners.

    The learner is one of the package, or a module outside of it, by its dotted name.

    Raises:
        InputError: there is no such learner.
    """
    from fdc_jax import learners  # loads JAX

    config: Any = fields()
    config.benchmark, config.learner.name = benchmark, learner
    config.learner.update(learners.defaults(benchmark, learner))
    config.lock()
    return config


_any_type = functools.partial(config_dict.FieldReference, field_type=object)


def fields() -> ml_collections.ConfigDict:
    """Returns the settings without the options of learners; the comments are those of --help."""
    config = ml_collections.ConfigDict()

    config.benchmark = "cifar100"  # as in docs/data.md, or a name of your own; empty: the source's
    config.seed = (1,)  # training seeds, one run each: --config.seed=1,2,3
    config.class_order_seed = 1993  # PILOT's permutation of the classes; -1: the order given
    config.class_order = ()  # with -1: a file with all class names, one a line, or the names
    # A number, or a list such as 10,5,5; 0: the paper's number for the benchmark, else a fifth.
    config.classes_per_task = _any_type(0)
    config.num_tasks = 0  # stop after so many, and go on later with more; 0: all
    config.precision = "parity"  # parity: float32, exact products; fast: bfloat16 activations
    config.cache_dir = ""  # downloads, compiled programs, E_0 features; empty: the user's cache
    config.save_features = True  # keep features under the work directory, for refits and sweeps
    config.log = ""  # events also for these, where installed: tensorboard,wandb
    config.untrained = False  # first answer by frozen features, in the folder untrained of the run
    config.report = True  # write tables, figures and a page into the work directory at the end

    config.encoder = ml_collections.ConfigDict()
    config.encoder.variant = "B/16"  # of augreg, Ti/16 to L/16; any other file states its own
    config.encoder.weights = "augreg"  # the public file; digits; or a path, see docs/encoders.md
    config.encoder.image_size = 224  # pixels, 0: the file's; tests resize to 256/224 of it first
    config.encoder.heads = 0  # of a plain timm file without config.json; others state their own
    config.encoder.attention = "auto"  # cudnn, a fused kernel, on NVIDIA GPUs in fast mode, or xla

    config.data = ml_collections.ConfigDict()
    config.data.source = ""  # a folder or an archive of images, see docs/data.md
    config.data.test_share = 0.0  # of each class, where the source is not divided; 0: refuse that
    config.data.allow_overlap = False  # accept images of train in test
    config.data.dir = ""  # what TFDS prepared; empty: $TFDS_DATA_DIR or ~/tensorflow_datasets
    config.data.input_range = "pilot01"  # pixels in [0, 1]; augreg: in [-1, 1]; model: the file's
    config.data.train_per_class = 0  # images of each class, 0: all
    config.data.test_per_class = 0  # likewise
    config.data.crop_scale = (0.05, 1.0)  # share of the image that a training crop covers
    config.data.flip = True  # mirror half of the training images
    config.data.workers = 0  # decoding threads, 0: one per core
    config.data.cache_gib = 4.0  # memory for decoded images: the task's for training, and for test

    config.learner = ml_collections.ConfigDict()
    config.learner.name = "cumulative_lora"
    config.learner.preset = "protocol"  # protocol: as in config.train; native: the method's own

    config.train = ml_collections.ConfigDict()
    config.train.epochs = 20  # 0: by the number of images of the first task
    config.train.batch_size = 64
    config.train.increment_learning_rate = 5e-4
    config.train.head_learning_rate = 5e-3
    config.train.schedule = "constant"  # unstated; or cosine, or inflora's quarter_cosine
    config.train.rank = 10  # of the key and value increments

    # Calibrators that are fitted and evaluated after every task; names as in `fdc posthoc`.
    config.calibrators = "fdc,gaussians"
    config.fdc = ml_collections.ConfigDict()
    config.fdc.retained_energy = 0.75  # eta, share of the variance that the task subspace keeps
    config.fdc.attenuation = 0.5  # gamma, of features outside the task subspace
    config.fdc.rlc_weight = 1.0  # alpha
    config.fdc.pac_weight = 1.0  # beta
    config.fdc.adapted_view_weight = 1.0  # w_T
    config.fdc.pretrained_view_weight = 1.0  # w_0
    config.fdc.neighbours = 1  # K, class prototypes averaged into an affinity

    config.evaluation = ml_collections.ConfigDict()
    config.evaluation.batch_size = 256  # images per forward pass without gradients
    config.evaluation.every = 1  # evaluate after so many tasks, and after the last one

    config.checkpoint = ml_collections.ConfigDict()
    config.checkpoint.every_steps = 500  # within a task; each task's end is always kept
    config.checkpoint.keep = 2  # newest checkpoints that stay
    return config
