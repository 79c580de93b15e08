"""Class Gaussians and familiarity in float64 NumPy, by explicit formulas."""

import numpy as np

from fdc_jax.calibration import drift


def unit(features):
    """Returns features of unit length, which all formulas below read."""
    features = np.asarray(features, np.float64)
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def within(features, labels):
    """Returns deviations from class means, and these means in the order of labels."""
    names, columns = np.unique(labels, return_inverse=True)
    means = np.stack([features[labels == name].mean(axis=0) for name in names])
    return features - means[columns], means


def scatter_of(features, labels):
    deviations, _ = within(features, labels)
    return deviations.T @ deviations


def shared_covariance(scatter, images, classes, shrunk=None):
    """Returns the covariance that classes share; `shrunk` is the scatter of the ridge."""
    width = len(scatter)
    trace = np.trace(scatter if shrunk is None else shrunk) / images
    ridge = 0.1 + width / (images - classes)
    return 0.9 * scatter / images + ridge * trace / width * np.eye(width)


def squares(points, means, precision):
    """Returns squared Mahalanobis distances [n, c]."""
    difference = points[:, None] - means[None]
    return np.einsum("ncd,de,nce->nc", difference, precision, difference)


def factors_of(features, labels):
    """Returns eight leading principal directions by class, as long as standard deviations."""
    factors = []
    for label in np.unique(labels):
        members = features[labels == label]
        values, vectors = np.linalg.eigh(np.cov(members.T, bias=True))
        kept = np.argsort(values)[::-1][: min(8, len(members) - 1, len(values))]
        factors.append((vectors[:, kept] * np.sqrt(np.maximum(values[kept], 0))).T)
    return factors


def view_scores(features, labels, factors, unexplained, inputs):
    """Returns the class scores of one view from the features and labels of all tasks.

    `factors` are those of the classes, `unexplained` the errors of maps, summed over images.
    """
    features, labels = np.concatenate(features), np.concatenate(labels)
    _, means = within(features, labels)
    scatter = scatter_of(features, labels) + unexplained
    base = shared_covariance(scatter, len(labels), len(means))
    scores = []
    for mean, factor in zip(means, factors, strict=True):
        inverse = np.linalg.inv(base + 0.1 * factor.T @ factor)
        scores.append(-0.5 * squares(unit(inputs), mean[None], inverse))
    return np.concatenate(scores, axis=1)


def class_scores(tasks, previous, adapted, pretrained=None):
    """Returns class scores by view, and the mean of s; features and factors follow every map."""
    labels = [task.labels for task in tasks]
    features, factors, stale = [], [], []
    unexplained, images = np.zeros((adapted.shape[1],) * 2), 0
    for t, task in enumerate(tasks):
        if previous and t:
            by = drift.fit_map(unit(previous[t]), unit(task.adapted), classes=task.rows)
            features = [by.move(rows) for rows in features]
            factors = [factor @ by.matrix for factor in factors]
            unexplained = by.matrix.T @ unexplained @ by.matrix + images * by.residual
            scatter = scatter_of(np.concatenate(features), np.concatenate(labels[:t]))
            inverse = np.linalg.inv(shared_covariance(scatter + unexplained, images, len(stale)))
            error = by.class_errors
            stale = [s + np.einsum("cd,de,ce->c", error, inverse, error).mean() for s in stale]
        stale += [0.0] * len(np.unique(task.labels))
        features.append(unit(task.adapted))
        factors += factors_of(features[-1], task.labels)
        images += len(task.labels)
    scores = view_scores(features, labels, factors, unexplained, adapted)
    by_view = {"adapted": scores + np.log(1 + np.array(stale) / 4)}
    if pretrained is not None:
        features = [unit(task.pretrained) for task in tasks]
        factors = []
        for rows, columns in zip(features, labels, strict=True):
            factors += factors_of(rows, columns)
        by_view["pretrained"] = view_scores(features, labels, factors, 0.0, pretrained)
    return by_view, np.mean(stale)


def familiarity(feature, features, labels, out=None):
    """Returns f of a feature; the image `out` has no part in means and scatters."""
    kept = np.arange(len(labels)) != out
    distances = []
    for classes in (labels, 0 * labels):
        _, means = within(features[kept], classes[kept])
        scatter = scatter_of(features[kept], classes[kept])
        all_images = scatter_of(features, classes)
        covariance = shared_covariance(scatter, len(labels), len(means), all_images)
        distances.append(squares(feature[None], means, np.linalg.inv(covariance)).min())
    return (distances[1] - distances[0]) / 2
