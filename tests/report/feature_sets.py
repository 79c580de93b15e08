"""Small random feature sets, and the reference in float64 fitted on them."""

import numpy as np

from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import FeatureSet, TaskFeatures
from tests.calibration import reference, streams


def feature_set(kind="linear", dual=True, final=False, **options):
    """Returns a stream as a feature set; `final` says that heads changed after their task."""
    tasks = streams.stream(**options)
    adapted, pretrained, labels = probes(tasks)
    made = []
    for task in tasks:
        # Rows in descending order of labels, so that rows and classes are not the same thing.
        last = task.first + len(task.weight) - 1
        changed = task._replace(weight=task.weight + 0.1, bias=task.bias - 0.2)
        features = TaskFeatures(
            adapted=task.adapted,
            pretrained=task.pretrained if dual else None,
            labels=last - task.rows,
            head=streams.head_of(task, kind),
            classes=np.arange(last, task.first - 1, -1),
            final_head=streams.head_of(changed, kind) if final else None,
        )
        made.append(features)
    return FeatureSet(tuple(made), adapted, pretrained if dual else None, labels)


def write_features(folder, features):
    """Writes a feature set as a run saves it."""
    for number, task in enumerate(features.tasks):
        parts = task.adapted, task.labels, task.head, task.pretrained, task.classes
        feature_files.write_task(folder, number, *parts)
    test = features.test_adapted, features.test_pretrained, features.test_labels
    feature_files.write_test(folder, *test)


def probes(tasks):
    """Returns perturbed training samples of both views and their labels, all tasks mixed."""
    rng = np.random.default_rng(7)
    labels = np.concatenate([task.first + len(task.weight) - 1 - task.rows for task in tasks])
    pick = rng.permutation(len(labels))[:90]
    views = []
    for name in ("adapted", "pretrained"):
        view = np.concatenate([getattr(task, name) for task in tasks])[pick]
        views.append((view + 0.3 * rng.normal(size=view.shape)).astype(np.float32))
    return *views, labels[pick]


def reference_of(features, kind="linear", final=False, **settings):
    """Returns the reference on the heads of the tasks' own time, or on the final ones."""
    tasks = []
    for task in features.tasks:
        head = task.final_head if final else task.head
        bias, scale = getattr(head, "bias", None), getattr(head, "scale", 1.0)
        head = reference.Head(kind, head.weight, bias, scale)
        rows = np.array([list(task.classes).index(label) for label in task.labels])
        tasks.append((task.adapted, rows, head, task.pretrained))
    return reference.Reference(tasks, **settings)
