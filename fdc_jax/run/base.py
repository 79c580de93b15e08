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

    config.benchmark = "cifar100"  # a name of docs/data.md or your own; empty: the data's
    config.seed = (1,)  # training seeds, one run each: --config.seed=1,2,3
    config.class_order_seed = 1993  # of PILOT's permutation of the classes; -1: the given order
    config.class_order = ()  # with seed -1: all class names, or a file with a name per line
    # A number, or a list such as 10,5,5; 0: the paper's number, of own data a fifth of the classes.
    config.classes_per_task = _any_type(0)
    config.num_tasks = 0  # stop after this many tasks; a larger number resumes; 0: all
    config.precision = "parity"  # parity: float32, exact products; fast: bfloat16 activations
    config.cache_dir = ""  # downloads, compiled programs, E_0 features; empty: the user's cache
    config.save_features = True  # keep features under the work directory, for refits and sweeps
    config.log = ""  # also send events to these, if they are installed: tensorboard,wandb
    config.untrained = False  # predict before training, from frozen features; folder untrained
    config.report = True  # write tables, figures and a page into the work directory at the end

    config.encoder = ml_collections.ConfigDict()
    config.encoder.variant = "B/16"  # Ti/16, S/16, B/16 or L/16 of augreg; a file states its own
    config.encoder.weights = "augreg"  # augreg (public), digits, or a file, see docs/encoders.md
    config.encoder.image_size = 224  # pixels, 0: the file's; test images are first resized to 8/7
    config.encoder.heads = 0  # attention heads of a timm file without config.json, else stated
    config.encoder.attention = "auto"  # xla, or cudnn (fused, NVIDIA GPUs, precision=fast)

    config.data = ml_collections.ConfigDict()
    config.data.source = ""  # a folder or an archive of images, see docs/data.md
    config.data.test_share = 0.0  # to hold out of each class if the source has no test images
    config.data.allow_overlap = False  # accept test images that are also training images
    config.data.dir = ""  # data that TFDS prepared; empty: $TFDS_DATA_DIR or ~/tensorflow_datasets
    config.data.input_range = "pilot01"  # pixels in [0, 1]; augreg: in [-1, 1]; model: the file's
    config.data.train_per_class = 0  # images of each class, 0: all
    config.data.test_per_class = 0  # test images of each class, 0: all
    config.data.crop_scale = (0.05, 1.0)  # share of the image that a training crop covers
    config.data.flip = True  # mirror half of the training images
    config.data.workers = 0  # decoding threads, 0: one per core
    config.data.cache_gib = 4.0  # memory for decoded training images of a task, and for test images

    config.learner = ml_collections.ConfigDict()
    config.learner.name = "cumulative_lora"
    config.learner.preset = "protocol"  # protocol: as in config.train; native: the method's own

    config.train = ml_collections.ConfigDict()
    config.train.epochs = 20  # 0: chosen by the number of images of the first task
    config.train.batch_size = 64
    config.train.increment_learning_rate = 5e-4
    config.train.head_learning_rate = 5e-3
    config.train.schedule = "constant"  # unstated; or cosine, or quarter_cosine (InfLoRA)
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
    config.evaluation.every = 1  # tasks between evaluations; the last task is always evaluated

    config.checkpoint = ml_collections.ConfigDict()
    config.checkpoint.every_steps = 500  # steps between checkpoints; a task's end always has one
    config.checkpoint.keep = 2  # newest checkpoints that stay
    return config
