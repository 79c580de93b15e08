"""PyTorch models: features as arrays, and modules that score with a calibrator."""

import copy
import csv
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fdc_jax import calibration, heads
from tests.calibration import streams
from tests.errors import input_error
from tests.integrations.conftest import run_program, surpasses

torch = pytest.importorskip("torch", reason="needs PyTorch, which the package does not require")

from fdc_jax import torch as fdc_torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


class Split(torch.nn.Module):
    """A model whose images are both features, one after the other."""

    def forward(self, images):
        return images[:, :16], images[:, 16:]


def fitted(name, dual=True):
    """Returns a calibrator of labels out of order, one of them without images, and inputs."""
    calibrator = calibration.make(name)
    tasks = streams.stream(9, offset=1.0)
    for task, names in zip(tasks, ([7, 3, 5], [8, 2, 9, 0], [4, 6]), strict=True):
        labels = np.array(names)[task.rows]
        kept = labels != 3
        adapted = task.adapted[kept]
        pretrained = task.pretrained[kept] if dual else None
        calibrator.fit_task(adapted, labels[kept], task.head, pretrained, names, adapted)
    calibrator.finalize()
    return calibrator, streams.probe_inputs(tasks)


@pytest.mark.parametrize("name", ["fdc", "gaussians", "mahalanobis"])
def test_a_module_and_its_copies_score_as_the_calibrator(name, tmp_path):
    calibrator, views = fitted(name)
    order = np.argsort(np.concatenate(calibrator.classes))
    expected = calibrator.class_scores(*views)[:, order]
    model = fdc_torch.Calibrated(Split(), calibrator)
    images = torch.tensor(np.hstack(views))
    torch.save(model, tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt", weights_only=False)
    for module in (model, copy.deepcopy(model), read):
        scores = module(images)
        assert scores.dtype == torch.float32 and module.classes.tolist() == [0, *range(2, 10)]
        assert_allclose(scores, expected, rtol=1e-6)
        labels = module.classes[scores.argmax(dim=1)]
        assert_array_equal(labels, calibrator.score(*views).label)


def test_one_view_scores_as_the_calibrator_others_are_refused():
    calibrator, views = fitted("fdc", dual=False)
    adapted = torch.tensor(views[0])
    both = torch.tensor(np.hstack(views))
    model = fdc_torch.Calibrated(torch.nn.Identity(), calibrator)
    expected = calibrator.score(views[0]).task_scores.max(axis=1)
    assert_allclose(model(adapted.double()).max(dim=1).values, expected, rtol=1e-6)
    with input_error("adapted features: expected width 16, found 28"):
        model(both)
    with input_error(r"features: expected one row per image, .* \[40, 4, 4\]"):
        model(adapted.reshape(-1, 4, 4))
    with input_error("call fit_task for every task, then finalize, first"):
        fdc_torch.Calibrated(Split(), calibration.FDC())(both)


IMAGES = torch.zeros(40, 28)
LABELS = torch.arange(40)


@pytest.mark.parametrize(
    "batch, message",
    [
        (IMAGES, "dictionaries with labels, found none"),
        ((IMAGES, LABELS + 0.5), "loader: labels: expected integers, found float32"),
        ((IMAGES, LABELS[:7]), "loader: labels: .*40.*7"),
    ],
)
def test_wrong_batches_are_refused(batch, message):
    with input_error(message):
        fdc_torch.collect(Split(), [batch])


def test_wrong_layers_and_calibrators_are_refused():
    kinds = (torch.nn.LayerNorm(3), torch.nn.Conv2d(1, 2, 3), torch.nn.Embedding(3, 2))
    for layer in (*kinds, torch.nn.ReLU(), None):
        with input_error(f"expected a linear layer, .*{type(layer).__name__}"):
            fdc_torch.head_of(layer)
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    network[0].spare = torch.nn.Linear(4, 3)
    for layer, message in (
        ("3", "layer: expected one of 0, .*2, found '3'"),
        (network[0], "layer: expected one of 0, .*2, found 'Linear'"),
        ("0.spare", r"one that the model uses .*, found 0.spare"),
    ):
        with input_error(message):
            fdc_torch.pooled(network, torch.zeros(1, 4), layer=layer)
    with input_error("calibrator: expected .*str"):
        fdc_torch.Calibrated(network, "fdc")
    assert fdc_torch.head_of(network, [1], name="2").weight.shape == (1, 3)


def test_features_are_the_input_of_the_layer_of_the_output(caplog):
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    model = torch.nn.Sequential(torch.nn.Linear(3, 9), encoder, torch.nn.Linear(3, 2))
    model.forward = lambda x: model[2](model[1](x))  # The order of layers is not that of calls.
    images = torch.randn(5, 4)
    for _ in range(2):
        features, *_ = fdc_torch.collect(model, [(images, torch.arange(5) % 2)])
    assert_allclose(features, encoder(images).detach())
    text = "Sequential: features are the input of its layer 2; layer= names another layer"
    assert caplog.messages == [text]
    head = fdc_torch.head_of(model)
    assert_allclose(head.logits(features), model(images).detach(), atol=1e-6)


def test_features_stay_on_a_device_that_jax_has(monkeypatch):
    """Without an accelerator: an array of JAX that takes the part of a tensor on one."""
    given = jnp.arange(6.0).reshape(3, 2)

    class OnDevice:
        device = torch.device("cuda")
        detach = float = contiguous = lambda self: self
        __dlpack__, __dlpack_device__ = given.__dlpack__, given.__dlpack_device__

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    actual = fdc_torch.as_array(OnDevice())
    assert isinstance(actual, jax.Array)
    assert_array_equal(actual, given)
    assert isinstance(fdc_torch.as_array(torch.ones(2)), np.ndarray)


def task_loader(task):
    """Batches of a task, in order; images are both features, one after the other."""
    images = torch.tensor(np.hstack([task.adapted, task.pretrained]))
    labels = torch.tensor(task.labels)
    return [{"x": images[i : i + 9], "labels": labels[i : i + 9]} for i in range(0, len(labels), 9)]


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
def test_checkpoints_and_copies_resume_bit_by_bit(name, tmp_path):
    tasks = streams.stream(9, offset=1.0)

    def fresh():
        return fdc_torch.Calibrated(Split(), calibration.make(name))

    calibrated = fresh()
    direct = calibration.make(name)
    for task in tasks:
        direct.fit_task(task.adapted, task.labels, task.head, task.pretrained, None, task.adapted)
    direct.finalize()
    for task in tasks[:2]:
        calibrated.before_task(task_loader(task))
        calibrated.after_task(task_loader(task), head=task.head)
    calibrated.before_task(task_loader(tasks[2]))  # Stopped within the third.
    assert (calibrated.previous is not None) == (name == "gaussians")
    torch.save(calibrated.state_dict(), tmp_path / "checkpoint.pt")
    read = fresh()
    read.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    copies = [read, copy.deepcopy(calibrated), pickle.loads(pickle.dumps(calibrated))]
    views = streams.probe_inputs(tasks)
    expected = direct.class_scores(*views).astype(np.float32)
    for module in (calibrated, *copies):
        module.after_task(task_loader(tasks[2]), head=tasks[2].head)
        assert_array_equal(module(torch.tensor(np.hstack(views))), expected)
        assert module.classes.tolist() == list(range(9))
    state = calibrated.get_extra_state()
    state["calibrator"][len(state["calibrator"]) // 2] ^= 1
    with input_error(r"calibrator.npz: "):
        read.set_extra_state(state)


# transformers and PEFT ---------------------------------------------------------------------------

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"image_size": 8, "patch_size": 4, "num_labels": 6}


@pytest.fixture(scope="module")
def transformers():
    reason = "needs transformers, which the package does not require"
    return pytest.importorskip("transformers", reason=reason, exc_type=ImportError)


def made(transformers, kind):
    """Returns a small image classifier with random weights."""
    torch.manual_seed(0)
    if kind == "CLIP":
        vision = SMALL | {"projection_dim": 8}
        del vision["num_labels"]
        config = transformers.CLIPConfig(vision_config=vision, num_labels=6)
    else:
        config = getattr(transformers, f"{kind}Config")(**SMALL)
    return getattr(transformers, f"{kind}ForImageClassification")(config)


def dictionaries():
    """Batches as the collators of transformers give them, and their images and labels."""
    images = torch.randn(30, 3, 8, 8)
    labels = torch.arange(30) % 6
    parts = zip(images.split(16), labels.split(16), strict=True)
    return [{"pixel_values": x, "labels": y} for x, y in parts], images, labels


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Dinov2", "CLIP"])
def test_image_classifiers_of_transformers(transformers, kind):
    model = made(transformers, kind)
    batches, images, labels = dictionaries()
    features, pretrained, collected = fdc_torch.collect(model, batches)
    assert pretrained is None and collected.tolist() == labels.tolist()
    with torch.no_grad():
        logits = model.eval()(pixel_values=images).logits
    head = fdc_torch.head_of(model, [4, 1])
    assert_allclose(head.logits(features), logits[:, [4, 1]], atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # PEFT asks for what is gone.
def test_views_of_a_peft_model_and_adapters_read_back(transformers, tmp_path):
    peft = pytest.importorskip("peft", reason="needs PEFT, which the package does not require")
    base = made(transformers, "ViT").eval()
    plain = copy.deepcopy(base)
    batches, images, labels = dictionaries()
    options = {"modules_to_save": ["classifier"], "init_lora_weights": False}
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options)
    model, stages = peft.get_peft_model(base, lora), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for step in range(2):
        model(**batches[0]).loss.backward()
        optimizer.step()
        model.save_pretrained(tmp_path / str(step))
        trained = [parameter.requires_grad for parameter in model.parameters()]
        adapted, pretrained, collected = fdc_torch.collect(model, batches)
        assert [parameter.requires_grad for parameter in model.parameters()] == trained
        head = fdc_torch.head_of(model)
        stages.append((adapted, head))
        with torch.no_grad():
            logits = model(pixel_values=images).logits
        assert_allclose(head.logits(adapted), logits, atol=1e-5)
        assert_array_equal(pretrained, fdc_torch.collect(plain, batches)[0])
        assert collected.tolist() == labels.tolist() and abs(adapted - pretrained).max() > 0.1
    # In another process: the adapters of both tasks on the same pretrained model.
    again = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "0", "before")
    again.load_adapter(tmp_path / "1", "after")
    for (adapted, head), name in zip(stages, ("before", "after"), strict=True):
        again.set_adapter(name)
        assert_allclose(fdc_torch.collect(again, batches)[0], adapted, atol=1e-6)
        assert_array_equal(fdc_torch.head_of(again).weight, head.weight)
        assert again.active_adapter == name
    wrong = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["classifier"]))
    with input_error(r"that PEFT adapts .put it into modules_to_save"):
        fdc_torch.head_of(wrong)


@pytest.mark.parametrize(
    "variant", [{}, {"global_pool": "avg", "fc_norm": True}, {"num_classes": 0}], ids=str
)
def test_features_of_timm_vits_are_the_inputs_of_their_heads(variant):
    reason = "needs timm, which the package does not require"
    timm = pytest.importorskip("timm", reason=reason, exc_type=ImportError)
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    images = torch.randn(30, 3, 16, 16)
    labels = torch.arange(30) % 6
    batches = [(images[:16], labels[:16], None), (images[16:], labels[16:], None)]
    model = timm.models.VisionTransformer(**(size | {"num_classes": 6} | variant))
    inputs = []
    model.head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    both = torch.nn.ModuleList([model, copy.deepcopy(model)])
    torch.nn.init.normal_(both[1].blocks[0].mlp.fc1.weight)
    model.train()
    adapted, pretrained, collected = fdc_torch.collect(both, batches)
    assert model.training and model.blocks[0].training
    with torch.no_grad():
        model.eval()(images)
    assert_allclose(adapted, inputs[-1], atol=1e-5)
    assert abs(adapted - pretrained).max() > 0.1
    assert_array_equal(collected, labels)


def test_program_of_the_page():
    right = {}
    for name in ("fdc", "gaussians"):
        defined = run_program("PyTorch", gaussians=name)
        truth = defined["labels"][defined["test"]]
        for method, labels in defined["predicted"].items():
            right[method] = (labels == truth).numpy()
    for worse in ("raw", "fdc"):
        assert surpasses(right["gaussians"], right[worse])


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_program_of_the_page_with_an_adapter(transformers, capsys):
    pytest.importorskip("peft", reason="needs PEFT, which the package does not require")
    defined = run_program("transformers and PEFT")
    assert capsys.readouterr().out.startswith("{'raw': ")
    truth = defined["labels"][defined["test"]]
    raw, right = ((answers == truth).numpy() for answers in defined["predicted"].values())
    assert surpasses(right, raw)
    assert "with drift compensation" in defined["calibrated"].calibrator.note


class HeadPerTask(torch.nn.Module):
    """An encoder with a head for each of two tasks; images go to the heads learned so far."""

    def __init__(self, listed=True):
        super().__init__()
        self.encoder, self.learned, self.listed = torch.nn.Linear(6, 8), 1, listed
        self.heads = torch.nn.ModuleList([torch.nn.Linear(8, 2), torch.nn.Linear(8, 3)])

    def forward(self, images):
        features = torch.relu(self.encoder(images))
        logits = [head(features) for head in self.heads[: self.learned]]
        return logits if self.listed else torch.cat(logits, dim=1)


HEADS = {
    "name of a list": lambda model: {"heads": "heads"},
    "name of a list as the layer": lambda model: {"layer": "heads"},
    "list in the model": lambda model: {"heads": model.heads},
    "function": lambda model: {"heads": lambda task: model.heads[task], "layer": "heads"},
}


def batches_of(task):
    """Returns the batches of a task of two or three classes."""
    count = 20 + 10 * task
    return [(torch.randn(count, 6), 2 * task + torch.arange(count) % (2 + task))]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("listed", [True, False])
def test_a_list_of_heads_is_a_head_per_task(kind, listed):
    torch.manual_seed(0)
    model = HeadPerTask(listed)
    calibrated = fdc_torch.Calibrated(model, calibration.make("raw"), **HEADS[kind](model))
    for task in range(2):
        model.learned = task + 1
        calibrated.after_task(batches_of(task))
    images = torch.randn(9, 6)
    model.listed = False
    for module in (calibrated, copy.deepcopy(calibrated)):
        assert_allclose(module(images), model(images).detach(), atol=1e-5)
    if kind != "function":
        with input_error(r"heads: expected a head for task 2 .*, found 2"):
            calibrated.after_task([(torch.randn(4, 6), 5 + torch.arange(4) % 2)])


def test_heads_beside_the_model_and_a_head_that_grows_are_heads():
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU())
    layers = torch.nn.ModuleList()
    beside = fdc_torch.Calibrated(encoder, calibration.make("raw"), heads=layers)
    model = torch.nn.Sequential(encoder, torch.nn.Linear(8, 2))
    grown = fdc_torch.Calibrated(model, calibration.make("raw"), heads="1")
    for task in range(2):
        layers.append(torch.nn.Linear(8, 2 + task))
        beside.after_task(batches_of(task))
        model[1] = torch.nn.Linear(8, 2 + 3 * task)
        for part in ("weight", "bias"):
            rows = torch.cat([getattr(layer, part) for layer in layers])
            getattr(model[1], part).data.copy_(rows)
        grown.after_task(batches_of(task))
    images = torch.randn(9, 6)
    expected = torch.cat([layer(encoder(images)) for layer in layers], dim=1).detach()
    for module in (beside, grown, copy.deepcopy(beside)):
        assert_allclose(module(images), expected, atol=1e-5)


class Noisy(torch.utils.data.TensorDataset):
    """Images with other noise whenever they are read."""

    noise = 0.1

    def __getitem__(self, row):
        image, label = super().__getitem__(row)
        return image + self.noise * torch.randn(6), label


@pytest.mark.parametrize("name", ["fdc", "gaussians"])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_loader_of_random_images_is_named_before_each_training(name, noise, caplog):
    calibrated = fdc_torch.Calibrated(torch.nn.Linear(6, 8), calibration.make(name))
    for task in range(2):
        data = Noisy(*batches_of(task)[0])
        data.noise = noise
        loader = torch.utils.data.DataLoader(data, 8, generator=torch.Generator())
        before = torch.get_rng_state()
        calibrated.before_task(loader)
        is_same = torch.equal(torch.get_rng_state(), before)
        assert is_same or (task == 1 and name == "gaussians")  # The walk itself draws noise.
        expected = f"loader of task {task} (from 0): 100%"
        named = [text for text in caplog.messages if text.startswith("loader")]
        assert [text[: len(expected)] for text in named] == [expected] * (noise > 0)
        calibrated.after_task(loader, head=torch.nn.Linear(6, 2 + task))
        assert len([text for text in caplog.messages if text.startswith("loader")]) == len(named)
        caplog.clear()


def test_other_images_after_a_task_than_before_are_named(caplog):
    calibrated = fdc_torch.Calibrated(torch.nn.Linear(6, 8), calibration.make("gaussians"))
    [(images, labels)] = batches_of(0)
    calibrated.before_task(iter([(images, labels)]))  # cannot be read again
    calibrated.after_task([(images, labels)])
    assert not caplog.messages[1:]
    calibrated.before_task([(images, labels + 2)])
    calibrated.after_task([(images.flip(0), labels + 2)])
    assert [text for text in caplog.messages if text.startswith("loader of task 1 (from 0): 100%")]


@pytest.mark.parametrize("moved", [0.0, 0.5])
@pytest.mark.parametrize("before", ["", "late", "early"])
def test_drift_that_statistics_do_not_follow_is_measured(moved, before, caplog):
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU())
    calibrated = fdc_torch.Calibrated(model, calibration.make("gaussians"))
    calibrated.after_task(batches_of(0))
    batches = batches_of(1)
    if before == "early":
        calibrated.before_task(batches)
    for parameter in model.parameters():
        parameter.data *= 1 + moved
    if before == "late":
        calibrated.before_task(batches)
    pickle.loads(pickle.dumps(calibrated)).after_task(batches)  # Images are in no pickle.
    calibrated.after_task(batches)
    named = [text for text in caplog.messages if "changed by 50% of their length" in text]
    assert len(named) == int(moved > 0 and before != "early")


def test_heads_of_several_tasks_that_are_not_named_are_an_error():
    model = HeadPerTask()
    labels = torch.arange(20) % 2
    model.learned = 2
    batches = [(torch.randn(20, 6), labels)]
    with input_error(r"found those of 2 linear layers; name the nn.ModuleList"):
        fdc_torch.collect(model, batches)
    calibrated = fdc_torch.Calibrated(torch.nn.Linear(6, 2), calibration.make("raw"))
    calibrated.after_task(batches)
    with input_error("layer: expected a row for each class, found 2 rows"):
        calibrated.after_task([(torch.randn(20, 6), labels + 2)])
    with input_error("expected one or two views, found 3"):
        fdc_torch.collect(torch.nn.Identity(), batches, lambda *_: [1, 1, 1])


def test_layers_and_parameters_with_gradients_are_heads():
    (task,) = streams.known(0, 1)
    layer = torch.nn.Linear(16, 3)
    for head in (layer, heads.LinearHead(layer.weight, layer.bias)):
        calibrator = calibration.make("raw")
        calibrator.fit_task(task.adapted, task.labels, head)
        expected = layer(torch.tensor(task.adapted)).detach()
        assert_allclose(calibrator.class_scores(task.adapted), expected, atol=1e-5)


@pytest.mark.ci
def test_pytorch_trains_to_the_reference_numbers():
    """The first seed again; another PyTorch may move a test image or two of 596."""
    from benchmarks import reference_pytorch

    actual = reference_pytorch.run(seed=1, shared=True)
    with open(ROOT / "results" / "reference_pytorch_digits.csv", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["seed"] == "1"]
    expected = {line["quantity"]: float(line["value"]) for line in lines}
    assert actual == pytest.approx(expected, abs=0.5)
