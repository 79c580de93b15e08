"""The paper's settings (Table "Common training and FDC hyperparameters"), one field a line."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()

    config.benchmark = "cifar100"  # cifar100, imagenet_a, imagenet_r, cub200, omnibench, digits
    config.seed = (1,)  # training seeds, one run each: --config.seed=1,2,3
    config.class_order_seed = 1993  # PILOT's permutation of the classes
    config.classes_per_task = 0  # 0: the paper's number for the benchmark
    config.precision = "parity"  # parity: float32, exact products; fast: bfloat16 activations
    config.cache_dir = ""  # downloads, compiled programs, E_0 features; empty: the user's cache
    config.save_features = True  # keep features under the work directory, for refits and sweeps

    config.encoder = ml_collections.ConfigDict()
    config.encoder.variant = "B/16"  # Ti/16, S/16, B/16, L/16, digits
    config.encoder.weights = "augreg"  # augreg: public ImageNet-21k file; digits; or a path
    config.encoder.image_size = 224  # pixels; the test transform resizes to 256/224 of it first

    config.data = ml_collections.ConfigDict()
    config.data.dir = ""  # TFDS folder; empty: TFDS's own default
    config.data.input_range = "pilot01"  # pilot01: pixels in [0, 1]; augreg: in [-1, 1]
    config.data.train_per_class = 0  # images of each class, 0: all
    config.data.test_per_class = 0  # likewise
    config.data.crop_scale = (0.05, 1.0)  # share of the image that a training crop covers
    config.data.flip = True  # mirror half of the training images
    config.data.workers = 0  # decoding threads, 0: one per core
    config.data.cache_gib = 4.0  # memory for decoded test images

    config.learner = ml_collections.ConfigDict()
    config.learner.name = "cumulative_lora"

    config.train = ml_collections.ConfigDict()
    config.train.epochs = 20
    config.train.batch_size = 64
    config.train.increment_learning_rate = 5e-4
    config.train.head_learning_rate = 5e-3
    config.train.schedule = "constant"  # constant or cosine; the paper does not say
    config.train.rank = 10  # of the key and value increments

    config.fdc = ml_collections.ConfigDict()
    config.fdc.retained_energy = 0.75  # eta, share of the variance that the task subspace keeps
    config.fdc.attenuation = 0.5  # gamma, of what lies outside the task subspace
    config.fdc.rlc_weight = 1.0  # alpha
    config.fdc.pac_weight = 1.0  # beta
    config.fdc.adapted_view_weight = 1.0  # w_T
    config.fdc.pretrained_view_weight = 1.0  # w_0
    config.fdc.neighbours = 1  # K, class prototypes averaged into an affinity

    config.evaluation = ml_collections.ConfigDict()
    config.evaluation.batch_size = 256  # images per forward pass without gradients
    config.evaluation.every_task = True  # the curve and the average incremental accuracy

    config.checkpoint = ml_collections.ConfigDict()
    config.checkpoint.every_steps = 500  # within a task; each task's end is always kept
    config.checkpoint.keep = 2  # newest checkpoints that stay
    return config
