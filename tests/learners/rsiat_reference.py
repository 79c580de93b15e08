"""RSIAT's formulas in float64 NumPy, pair by pair and image by image, for its tests."""

import itertools
import math

import numpy as np
from scipy.special import erf, expit


def cosine(a, b):
    """Returns the cosine of two vectors."""
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def cosface(features, rows, labels, scale, margin):
    """Returns the mean CosFace loss over the images."""
    losses = []
    for feature, label in zip(features, labels, strict=True):
        logits = [scale * (cosine(feature, r) - margin * (k == label)) for k, r in enumerate(rows)]
        losses.append(np.log(np.sum(np.exp(logits))) - logits[label])
    return np.mean(losses)


def steering(features, labels, separation_weight, threshold):
    """Returns the steering loss over all ordered pairs of different images."""
    same, others = [], []
    for i, j in itertools.permutations(range(len(features)), 2):
        cosine_of_pair = cosine(features[i], features[j])
        if labels[i] == labels[j]:
            same.append(max(1.0 - cosine_of_pair, 0.0))
        else:
            others.append(max(cosine_of_pair - threshold, 0.0))
    separation = np.sum(others) / (len(others) + 1e-6)
    return np.sum(same) / (len(same) + 1e-6) + separation_weight * separation


def project(projector, x):
    """Returns P(x): four layers, the exact GELU after three of them, a sigmoid after the last."""
    hidden = x
    for layer in projector[:-1]:
        hidden = hidden @ layer.weight + layer.bias
        hidden = hidden * (1.0 + erf(hidden / math.sqrt(2.0))) / 2.0
    return x + expit(hidden @ projector[-1].weight + projector[-1].bias)


def moved_means(means, before, after, width):
    """Returns means moved by the weighted drift of the images, one by one."""
    moved = []
    for mean in means:
        weights = [math.exp(-np.sum((row - mean) ** 2) / (2 * width**2)) + 1e-5 for row in before]
        shift = sum(w * (b - a) for w, a, b in zip(weights, before, after, strict=True))
        moved.append(mean + shift / sum(weights))
    return np.array(moved)
