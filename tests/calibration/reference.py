"""Algorithm 1 in float64 NumPy, written from the paper alone and sharing no code with the package.

Slow and plain on purpose: one task, one view, one formula after the other.
"""

import numpy as np
from scipy.stats import norm
from sklearn.decomposition import PCA

SCALE_FLOOR = 1e-6
TINY = 1e-12
# Smaller residual ratios are rounding errors of float32; without a residual RLC says nothing.
RATIO_ROUNDING = 2.0**-18


def pca_basis(features, share):
    """Fewest leading components that explain at least `share`: [d, r]; none without variance."""
    if len(features) < 2 or np.allclose(features, features[0], rtol=0, atol=0):
        return np.zeros((features.shape[1], 0))
    pca = PCA(svd_solver="full").fit(features)
    energy = pca.explained_variance_
    reached = np.cumsum(energy) / energy.sum() >= share - 1e-9
    rank = int(np.argmax(reached)) + 1
    return pca.components_[:rank].T


def normalise(rows):
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), TINY)


class Head:
    """A head of a kind, named as in `fdc_jax.heads.KINDS`."""

    def __init__(self, kind, weight, bias=None, scale=1.0):
        self.kind, self.weight, self.scale = kind, np.asarray(weight, np.float64), scale
        self.bias = 0.0 if bias is None else np.asarray(bias, np.float64)

    def logits(self, h):
        if self.kind == "linear":
            return h @ self.weight.T + self.bias
        if self.kind == "normalised_linear":
            return normalise(h) @ self.weight.T + self.bias
        if self.kind == "cosine":
            return self.scale * normalise(h) @ normalise(self.weight).T
        unit, means = normalise(h), normalise(self.weight)
        return -((unit[:, None] - means[None]) ** 2).sum(-1)


class ViewOfTask:
    """Statistics of one task in one view."""

    def __init__(self, features, rows, num_classes, share, neighbours):
        self.neighbours = neighbours
        self.mean = features.mean(axis=0)
        self.basis = pca_basis(features, share)
        unit = normalise(features)
        self.prototypes = np.stack(
            [
                normalise(unit[rows == c].mean(axis=0))
                for c in range(num_classes)
                if (rows == c).any()
            ]
        )
        rho, affinity = self.residual(features), self.affinity(features)
        self.rho_mean, self.rho_std = rho.mean(), max(rho.std(), SCALE_FLOOR)
        self.aff_mean, self.aff_std = affinity.mean(), max(affinity.std(), SCALE_FLOOR)

    def residual(self, features):
        centred = features - self.mean
        outside = centred - centred @ self.basis @ self.basis.T
        return (outside**2).sum(1) / np.maximum((centred**2).sum(1), TINY)

    def u(self, features):
        return (self.residual(features) - self.rho_mean) / self.rho_std

    def affinity(self, features):
        cosines = np.sort(normalise(features) @ self.prototypes.T, axis=1)
        return cosines[:, -self.neighbours :].mean(axis=1)


def fit_foreign(per_task_views):
    """(mu_F, V_F, tau) from features of task t on earlier tasks j < t; None for one task."""
    pairs = []
    for t, (features, _) in enumerate(per_task_views):
        for j in range(t):
            pairs.append(per_task_views[j][1].u(features))
    if not pairs:
        return None
    mu = np.mean([pair.mean() for pair in pairs])
    variance = max(np.mean([pair.var() + (pair.mean() - mu) ** 2 for pair in pairs]), SCALE_FLOOR)
    ratio = log_ratio(np.concatenate(pairs), mu, variance)
    return mu, variance, max(np.median(np.abs(ratio)), SCALE_FLOOR)


def log_ratio(u, mu, variance):
    return norm.logpdf(u, mu, np.sqrt(variance)) - norm.logpdf(u)


class Reference:
    """tasks: list of (adapted, rows, head, pretrained or None), `rows` being head rows."""

    def __init__(
        self,
        tasks,
        retained_energy=0.75,
        attenuation=0.5,
        rlc_weight=1.0,
        pac_weight=1.0,
        adapted_view_weight=1.0,
        pretrained_view_weight=1.0,
        neighbours=1,
        nearest=False,
    ):
        self.gamma, self.nearest = attenuation, nearest
        self.alpha, self.beta = rlc_weight, pac_weight
        self.weights = adapted_view_weight, pretrained_view_weight
        self.heads = [task[2] for task in tasks]
        self.views = []
        for column in (0, 3):
            if tasks[0][column] is None:
                continue
            fitted = []
            for task in tasks:
                features = np.asarray(task[column], np.float64)
                classes = int(task[1].max()) + 1
                view = ViewOfTask(features, task[1], classes, retained_energy, neighbours)
                fitted.append((features, view))
            self.views.append(([view for _, view in fitted], fit_foreign(fitted)))
        self.sigma = {True: [], False: []}
        for t, task in enumerate(tasks):
            for tsf in (True, False):
                largest = self.logits(t, np.asarray(task[0], np.float64), tsf).max(axis=1)
                self.sigma[tsf].append(max(largest.std(), SCALE_FLOOR))

    def logits(self, t, h, tsf):
        if not tsf:
            return self.heads[t].logits(h)
        basis = self.views[0][0][t].basis
        if self.heads[t].kind == "linear":
            head = self.heads[t]
            folded = (1 - self.gamma) * head.weight + self.gamma * (head.weight @ basis) @ basis.T
            return h @ folded.T + head.bias
        return self.heads[t].logits((1 - self.gamma) * h + self.gamma * (h @ basis) @ basis.T)

    def corrections(self, view, features):
        """tanh-ed (rlc, pac), [n, T] each."""
        tasks, foreign = self.views[view]
        features = np.asarray(features, np.float64)
        u = np.stack([task.u(features) for task in tasks], axis=1)
        rlc = np.zeros_like(u)
        if foreign is not None:
            mu, variance, tau = foreign
            rlc = np.tanh(log_ratio(u, mu, variance) / tau)
            for t, task in enumerate(tasks):
                if task.rho_mean < RATIO_ROUNDING:
                    rlc[task.residual(features) < RATIO_ROUNDING, t] = 0.0
        affinity = np.stack([task.affinity(features) for task in tasks], axis=1)
        if self.nearest:
            std = np.maximum(affinity.std(axis=1, keepdims=True), SCALE_FLOOR)
            q = (affinity - affinity.mean(axis=1, keepdims=True)) / std
        else:
            means = np.array([task.aff_mean for task in tasks])
            q = (affinity - means) / np.array([task.aff_std for task in tasks])
        return rlc, np.tanh(q)

    def score(self, adapted, pretrained=None, tsf=True, rlc=True, pac=True, views=(True, True)):
        """Returns scores [n, T] and local argmaxes [n, T]."""
        adapted = np.asarray(adapted, np.float64)
        logits = [self.logits(t, adapted, tsf) for t in range(len(self.heads))]
        score = np.stack([z.max(axis=1) for z in logits], axis=1)
        sigma = np.array(self.sigma[tsf])
        for view, features in enumerate((adapted, pretrained)):
            if features is None or not views[view]:
                continue
            down, up = self.corrections(view, features)
            if pac:
                score = score + self.weights[view] * self.beta * sigma * up
            if rlc:
                score = score - self.weights[view] * self.alpha * sigma * down
        return score, np.stack([z.argmax(axis=1) for z in logits], axis=1)
