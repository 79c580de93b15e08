import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fdc_jax import heads
from fdc_jax.features import feature_files
from tests.errors import input_error


def example(num_tasks=2, seed=0, two_views=True):
    rng, arrays = np.random.default_rng(seed), {}

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    for t in range(num_tasks):
        arrays[f"train_adapted_{t}"] = normal(5, 4)
        arrays[f"train_labels_{t}"] = 10 * t + np.array([1, 0, 1, 0, 0])
        arrays[f"head_weight_{t}"] = normal(2, 4)
        arrays[f"head_bias_{t}"] = normal(2)
        if two_views:
            arrays[f"train_pretrained_{t}"] = normal(5, 3)
    arrays["test_adapted"] = normal(6, 4)
    if two_views:
        arrays["test_pretrained"] = normal(6, 3)
    return arrays | {"test_labels": np.array([0, 1, 10, 11, 0, 10])}


def save(path, arrays):
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
    return path


def linear_head(arrays, task):
    return heads.LinearHead(arrays[f"head_weight_{task}"], arrays[f"head_bias_{task}"])


def refused(path, message):
    """Loading ends in one line that starts with the file."""
    with input_error(f"^{path}: .*{message}"):
        feature_files.load(path)


@pytest.fixture(params=["features.npz", "features"])
def target(request, tmp_path):
    return tmp_path / request.param


def same(actual, expected):
    assert_array_equal(actual, expected)


def test_saved_features_are_read_back(target):
    arrays = example() | {"train_previous_1": np.ones((5, 4), np.float32)}
    for name, dtype in (("adapted", ml_dtypes.bfloat16), ("pretrained", np.float16)):
        arrays[f"train_{name}_0"] = arrays[f"train_{name}_0"].astype(dtype)
    # Rows in another order, and a class without training images.
    arrays |= {"head_classes_0": np.array([1, 5, 0]), "head_weight_0": zeros(3, 4)}
    arrays |= {"head_bias_0": zeros(3), "test_labels": np.array([5, 1, 10, 11, 0, 10])}
    features = feature_files.load(save(target, arrays))
    assert len(features.tasks) == 2
    for t, task in enumerate(features.tasks):
        for name in ("adapted", "pretrained", "labels"):
            assert_array_equal(getattr(task, name), arrays[f"train_{name}_{t}"], strict=True)
        np.testing.assert_equal(task.head, linear_head(arrays, t))
        same(task.classes, arrays.get(f"head_classes_{t}", [10, 11]))
    assert features.tasks[0].previous is None
    same(features.tasks[1].previous, np.ones((5, 4)))
    same(features.test_tasks, [0, 0, 1, 1, 0, 1])
    mapped = isinstance(features.tasks[0].adapted, np.memmap)
    assert mapped == (target.suffix != ".npz")


def test_optional_arrays_may_be_absent(target):
    arrays = example(two_views=False)
    del arrays["head_bias_0"], arrays["head_bias_1"], arrays["test_labels"]
    features = feature_files.load(save(target, arrays))
    same(features.tasks[0].head.bias, [0, 0])
    assert features.tasks[0].pretrained is None
    assert features.test_pretrained is None
    with input_error("test_labels: missing"):
        _ = features.test_tasks


def change(**new):
    def apply(arrays):
        for name, array in new.items():
            if array is None:
                del arrays[name]
            else:
                arrays[name] = array

    return apply


def zeros(*shape):
    return np.zeros(shape, np.float32)


FAULTS = {
    "typo": (change(train_adaptd_0=zeros(3)),
             "train_adaptd_0: unknown array; did you mean train_adapted_t"),
    "one view lost": (change(train_pretrained_1=None), "train_pretrained_1: missing; expected"),
    "no test": (change(test_pretrained=None), "test_pretrained: missing; expected beside"),
    "head of some": (change(head_weight_0=None, head_bias_0=None),
                     "head_weight_0: missing; expected for each task t = 0 .. 1"),
    "growing head": (change(head_weight_1=zeros(4, 4)),
                     r"head_weight_1: found 4 rows for the 2 classes of task 1, as many as several "
                     r"tasks have together; .*, weight\[2:4\]"),
    "full head, labels in another order": (
        lambda a: a.update(
            train_labels_0=3 - a["train_labels_0"], train_labels_1=3 - a["train_labels_1"],
            test_labels=3 - a["test_labels"], head_weight_0=zeros(4, 4),
        ),
        r"weight\[np.unique\(train_labels_0\)\] if row c is of label c",
    ),
    "label of two tasks": (change(train_labels_1=np.zeros(5, int)),
                           "train_labels_1: label 0 already belongs to task 0"),
    "no class": (change(test_labels=np.array([0, 1, 7, 0, 0, 0])),
                 "test_labels: row 2 is label 7, no class of any task"),
    "bias of cosine": (change(head_kind=np.array("cosine")), "head_bias_0: cosine heads, .* none"),
    "final bias alone": (change(final_head_bias_1=zeros(2)),
                         "final_head_weight_1: missing, but there is a final_head_bias_1"),
    "previous before the first": (change(train_previous_0=zeros(5, 4)),
                                  "train_previous_0: expected from t = 1 on"),
    "previous of some": (lambda a: a.update(example(3), train_previous_2=zeros(5, 4)),
                         "train_previous_1: missing; expected for each task t = 1 .. 2"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_one_line_with_file_and_array(tmp_path, fault):
    damage, message = FAULTS[fault]
    arrays = example()
    damage(arrays)
    refused(save(tmp_path / "features.npz", arrays), message)


class Trap:
    """Unpickling this would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_objects_are_refused_without_unpickling(target, tmp_path):
    arrays = example()
    arrays["train_labels_0"] = np.array([Trap(tmp_path / "sprung")] * 5, dtype=object)
    refused(save(target, arrays), "train_labels_0.*(Python objects|Object arrays)")
    assert not (tmp_path / "sprung").exists()


PAGE = b"\xef\xbb\xbf\n<!DOCTYPE html><html><body>404 Not Found</body></html>"


def test_missing_and_foreign_files_are_named(tmp_path):
    path = tmp_path / "x.npz"
    refused(path, "no such file or folder")
    path.write_bytes(PAGE)
    refused(path, r"not a readable .npz file: it is a web page \(HTML\), as a failed download lea")


def write(folder, arrays, task, head, **given):
    names = (f"train_adapted_{task}", f"train_labels_{task}")
    feature_files.write_task(folder, task, *(arrays[name] for name in names), head, **given)


WEIGHT = np.ones((2, 4), np.float32)
BIAS = np.array([1.0, 2.0], np.float32)


@pytest.mark.parametrize(
    "head",
    [
        heads.LinearHead(WEIGHT, BIAS),
        heads.NormalisedLinearHead(WEIGHT, BIAS),
        heads.CosineHead(WEIGHT, 2.0),
        heads.NearestMeanHead(WEIGHT),
    ],
)
def test_written_tasks_are_read_back_and_rewritten(tmp_path, head):
    arrays = example()
    for t in range(2):
        pretrained = arrays[f"train_pretrained_{t}"]
        write(tmp_path, arrays, t, head, pretrained=pretrained, classes=[10 * t + 1, 10 * t])
    feature_files.write_test(tmp_path, arrays["test_adapted"], arrays["test_pretrained"], [0] * 6)
    final = type(head)(2 * WEIGHT, *head[1:])
    feature_files.write_final_heads(tmp_path, [head, final])
    features = feature_files.load(tmp_path)
    for t, task in enumerate(features.tasks):
        np.testing.assert_equal(task.head, head)
        same(task.classes, [10 * t + 1, 10 * t])
        same(task.pretrained, arrays[f"train_pretrained_{t}"])
    assert {type(task.head) for task in features.tasks} == {type(features.final_heads[1])}
    np.testing.assert_equal(features.final_heads, [head, final])
    # Arrays that are omitted now are removed.
    for t in range(2):
        write(tmp_path, arrays, t, head)
    feature_files.write_test(tmp_path, arrays["test_adapted"])
    features = feature_files.load(tmp_path)
    assert features.test_pretrained is features.test_labels is features.final_heads is None


def test_heads_of_a_folder_are_of_one_kind(tmp_path):
    write(tmp_path, example(), 0, heads.CosineHead(WEIGHT))
    with input_error(r"head_kind.npy: expected linear, the kind of head 1 .*, is cosine"):
        write(tmp_path, example(), 1, heads.LinearHead(WEIGHT, BIAS))


def test_only_final_heads_that_differ_are_written(tmp_path):
    """Written again, as after an interruption, they are what the last call says."""
    arrays = example(two_views=False)
    first, second = (linear_head(arrays, t) for t in range(2))
    for t, head in enumerate((first, second)):
        write(tmp_path, arrays, t, head)
    feature_files.write_test(tmp_path, arrays["test_adapted"])
    biased = first._replace(bias=first.bias + 1.0)
    for head, expected in ((first, None), (biased, [biased, second]), (first, None)):
        feature_files.write_final_heads(tmp_path, [head, second])
        np.testing.assert_equal(feature_files.load(tmp_path).final_heads, expected)
        assert len([*tmp_path.glob("final_*")]) == 2 * (expected is not None)
    feature_files.write_final_heads(tmp_path, [biased, second])
    # A task that is written anew has no final head yet.
    write(tmp_path, arrays, 0, first)
    assert feature_files.load(tmp_path).final_heads is None
