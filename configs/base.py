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
    config.report = True  # write tables, figures and a page into the work directory at the end

    config.encoder = ml_collections.ConfigDict()
    config.encoder.variant = "B/16"  # Ti/16, S/16, B/16, L/16, digits
    config.encoder.weights = "augreg"  # augreg: public ImageNet-21k file; digits; or a path
    config.encoder.image_size = 224  # pixels; the test transform resizes to 256/224 of it first
    config.encoder.attention = "xla"  # or cudnn: one fused kernel, on NVIDIA GPUs in fast precision

    config.data = ml_collections.ConfigDict()
    config.data.dir = ""  # prepared data; empty: $TFDS_DATA_DIR or ~/tensorflow_datasets
    config.data.input_range = "pilot01"  # pilot01: pixels in [0, 1]; augreg: in [-1, 1]
    config.data.train_per_class = 0  # images of each class, 0: all
    config.data.test_per_class = 0  # likewise
    config.data.crop_scale = (0.05, 1.0)  # share of the image that a training crop covers
    config.data.flip = True  # mirror half of the training images
    config.data.workers = 0  # decoding threads, 0: one per core
    config.data.cache_gib = 4.0  # memory for decoded images: the task's for training, and for test

    config.learner = ml_collections.ConfigDict()
    config.learner.name = "cumulative_lora"
    config.learner.preset = "protocol"  # protocol: as in config.train; native: the method's own

    config.learner.inflora = ml_collections.ConfigDict()  # read by inflora and inflora_ca
    config.learner.inflora.lamb = 0.98  # energy of the inputs to protect, at the first task
    config.learner.inflora.lame = 1.0  # likewise, where it would arrive after the last task

    config.learner.inflora_ca = ml_collections.ConfigDict()
    config.learner.inflora_ca.epochs = 5  # of classifier alignment, from the second task on
    config.learner.inflora_ca.learning_rate = 5e-3  # of Adam; native: SGD with 1e-2
    config.learner.inflora_ca.schedule = "cosine"  # half a wave over the epochs; or constant
    config.learner.inflora_ca.samples_per_class = 256  # pseudo-features of a class in an epoch
    config.learner.inflora_ca.batch_size = 256
    config.learner.inflora_ca.mean_scale = 0.9  # of the oldest means, as the stream grows; 1: none
    config.learner.inflora_ca.ridge = 1e-4  # added to the variances of a class
    config.learner.inflora_ca.logit_temperature = 0.1  # of normalised logits; 0: logits as they are

    config.learner.splitlora = ml_collections.ConfigDict()
    config.learner.splitlora.alpha = 20.0  # plasticity against stability
    config.learner.splitlora.loss_temperature = 0.0  # of training logits; 0: 1, or 30 if native

    config.learner.ewc_lora = ml_collections.ConfigDict()
    config.learner.ewc_lora.strength = 1e7  # lambda, of the penalty
    config.learner.ewc_lora.accumulation = 1.0  # gamma, on the importance of earlier tasks
    config.learner.ewc_lora.fisher = "per_sample"  # or batch_mean: squared gradients of batches
    config.learner.ewc_lora.fisher_labels = "data"  # or model: drawn from its softmax
    config.learner.ewc_lora.head_input = "class_token"  # or l2: the token divided by its norm
    config.learner.ewc_lora.folding = "products"  # or factors: A and B added up
    config.learner.ewc_lora.images_at_once = 8  # gradients held; 57 MB each for ViT-B/16

    config.learner.sd_lora = ml_collections.ConfigDict()
    config.learner.sd_lora.magnitude = 0.8  # every magnitude at its start
    config.learner.sd_lora.reset_magnitudes = True  # at each task; False carries trained ones over
    config.learner.sd_lora.head_start = "uniform"  # or zero_bias, the authors'
    config.learner.sd_lora.magnitude_rate_factor = 1.0  # of their learning rate over increments'

    config.learner.lora_subtraction = ml_collections.ConfigDict()
    config.learner.lora_subtraction.triplet_weight = 0.05  # lambda; the authors' for CIFAR-100
    config.learner.lora_subtraction.margin = 1.0  # of the triplet loss, between unit features
    config.learner.lora_subtraction.energy = 0.99  # share of the eigenvalue sum to keep
    config.learner.lora_subtraction.normalise_projector = True  # divide it by its Frobenius norm
    config.learner.lora_subtraction.sparse_start = True  # B starts with an entry per rank

    config.learner.loda = ml_collections.ConfigDict()
    config.learner.loda.general_scale = 0.25  # of the general product; without halving 0.5
    config.learner.loda.isolated_scale = 0.5  # of the isolated product; without halving 1
    config.learner.loda.merge_gamma = 3.0  # weight of the new task where products are shrunk
    config.learner.loda.scale = 20.0  # of cosines in the loss
    config.learner.loda.margin = 0.0  # authors: CIFAR-100 0, ImageNet-A 0.15, ImageNet-R, CUB 0.1
    config.learner.loda.alignment = True  # half-steps over groups of classes; False: plain steps
    config.learner.loda.look_ahead = 0.3  # rho, the longest; authors: 0.3, ImageNet-R 0.7
    config.learner.loda.native_learning_rate = 0.0  # 0: the authors', or 1e-2 where they have none

    config.learner.rsiat = ml_collections.ConfigDict()  # the authors' constants for ImageNet-A
    config.learner.rsiat.bottleneck = 64  # hidden units of the adapter of a block
    config.learner.rsiat.dropout = 0.1  # share of them that a training step drops
    config.learner.rsiat.scale = 30.0  # s, on cosines in training
    config.learner.rsiat.margin = 0.3  # m, off the cosine of the own class
    config.learner.rsiat.steering_weight = 1.0  # lambda_RS, in the first task
    config.learner.rsiat.warm_up_epochs = 3  # in which that weight rises from 0
    config.learner.rsiat.separation_weight = 1.0  # a, of different classes in the steering loss
    config.learner.rsiat.separation_threshold = 1.5  # m_RS, a cosine up to it costs nothing
    config.learner.rsiat.alignment_weight = 3.0  # beta, in later tasks
    config.learner.rsiat.repulsion_weight = 6.0  # gamma, in later tasks
    config.learner.rsiat.projector_width = 128  # of the projector's code
    config.learner.rsiat.projector_learning_rate = 3.121e-4  # 0: untrained; native: per data set
    config.learner.rsiat.identity_init = False  # a new projector per task, at first the identity
    config.learner.rsiat.drift_width = 4.0  # sigma, reach of an image's drift
    config.learner.rsiat.ridge = 1e-3  # added to the variances of a class
    config.learner.rsiat.calibration_epochs = 10  # from the second task on
    config.learner.rsiat.calibration_learning_rate = 6.69e-3  # native: the authors' per data set
    config.learner.rsiat.calibration_optimizer = "sgd"  # or adam
    config.learner.rsiat.samples_per_class = 256  # pseudo-features of a class in an epoch
    config.learner.rsiat.calibration_batch_size = 256
    config.learner.rsiat.mean_scale = 0.9  # of the oldest means, as the stream grows; 1: none

    config.train = ml_collections.ConfigDict()
    config.train.epochs = 20
    config.train.first_epochs = 0  # of the first task; 0: as many as the others
    config.train.batch_size = 64
    config.train.increment_learning_rate = 5e-4
    config.train.head_learning_rate = 5e-3
    config.train.schedule = "constant"  # unstated; or cosine, or inflora's quarter_cosine
    config.train.rank = 10  # of the key and value increments
    config.train.seeds_together = False  # steps of all seeds as one; takes memory for all of them

    config.fdc = ml_collections.ConfigDict()
    config.fdc.retained_energy = 0.75  # eta, share of the variance that the task subspace keeps
    config.fdc.attenuation = 0.5  # gamma, of what lies outside the task subspace
    config.fdc.rlc_weight = 1.0  # alpha
    config.fdc.pac_weight = 1.0  # beta
    config.fdc.adapted_view_weight = 1.0  # w_T
    config.fdc.pretrained_view_weight = 1.0  # w_0
    config.fdc.neighbours = 1  # K, class prototypes averaged into an affinity
    config.fdc.affinity_metric = "cosine"  # or whitened: beyond the paper, see docs/beyond.md
    config.fdc.affinity_evidence = "tanh"  # or linear, whose entry stands beside the paper's
    config.fdc.affinity_reference = "own"  # nearest (cosine) or pooled (whitened) moments
    config.fdc.affinity_scope = "task"  # or class, of the whitened metric
    config.fdc.affinity_shrinkage = 0.05  # lambda, of the within-class covariance

    config.evaluation = ml_collections.ConfigDict()
    config.evaluation.batch_size = 256  # images per forward pass without gradients
    config.evaluation.every_task = True  # the curve and the average incremental accuracy

    config.checkpoint = ml_collections.ConfigDict()
    config.checkpoint.every_steps = 500  # within a task; each task's end is always kept
    config.checkpoint.keep = 2  # newest checkpoints that stay
    return config
