"""A table of exactness: FDC in float32 against the float64 reference, over kinds of streams.

`pytest -s` prints the table.
"""

import numpy as np
import pytest

from tests.calibration import streams

SEVERAL = {"classes": (3, 5, 4)}
WEIGHTS = {"adapted_view_weight": 0.4, "pretrained_view_weight": 2.0}


def apart(tasks, spreads=100.0):
    """Returns the tasks with their means so many within-task spreads apart."""
    rng, moved = np.random.default_rng(5), []
    for task in tasks:
        views = []
        for view in (task.adapted, task.pretrained):
            way = rng.normal(size=view.shape[1])
            far = spreads * np.linalg.norm(view.std(axis=0)) / np.sqrt(2)  # of two such ways
            views.append((view + far * way / np.linalg.norm(way)).astype(np.float32))
        moved.append(task._replace(adapted=views[0], pretrained=views[1]))
    return moved


# Stream, settings of the calibrator, kind of heads, and whether these are rewritten later.
CASES = {
    "n < d": (streams.stream(3, 4, width=128, pretrained_width=96), {}),
    "K = 3, other weights": (
        streams.stream(8, 3, **SEVERAL),
        {"neighbours": 3, "rlc_weight": 0.7, "pac_weight": 1.3} | WEIGHTS,
    ),
    "cosine heads, other settings": (
        streams.stream(8, 3, **SEVERAL),
        {"neighbours": 2, "attenuation": 0.3, "retained_energy": 0.95} | WEIGHTS,
        "cosine",
    ),
    "gamma 0": (streams.stream(8, 3), {"attenuation": 0.0}),
    "gamma 1": (streams.stream(8, 3), {"attenuation": 1.0}),
    "eta 0.5": (streams.stream(8, 3), {"retained_energy": 0.5}),
    "eta 0.95": (streams.stream(8, 3), {"retained_energy": 0.95}),
    "one task": (streams.stream(8, 1), {}),
    "unequal tasks": (streams.stream(8, 6, classes=(2, 9, 4), samples=(20, 400, 33, 90)), {}),
    "40 tasks": (streams.stream(8, 40), {}),
    "means 100 spreads apart": (apart(streams.stream(3, 5)), {}),
} | {
    f"{kind} heads, rewritten": (streams.stream(16, 3), {}, kind)
    for kind in ("linear", "normalised_linear", "cosine", "nearest_mean")
}
# Of settings, those that the reference takes when it is fitted and when it scores.
FITTED = {"retained_energy": "eta", "attenuation": "gamma", "neighbours": "neighbours"}
SCORED = {"rlc_weight": "alpha", "pac_weight": "beta"}


@pytest.mark.parametrize("case", CASES)
def test_scores_equal_a_float64_reading_of_the_paper(case):
    stream, settings, *kind = CASES[case]
    names = {name: settings[key] for key, name in FITTED.items() if key in settings}
    found = streams.fitted(stream, *kind, **settings)
    expected = streams.fitted_reference(stream, *kind, **names)
    views = streams.probe_inputs(stream, size=200)
    if kind:
        found.score(*views)  # Nothing of these heads is kept.
        new = [task._replace(weight=3 * task.weight[::-1], bias=task.bias + 1) for task in stream]
        found.replace_heads([streams.head_of(task, *kind) for task in new])
        expected.heads = [streams.reference_head(task, *kind) for task in new]
    how = {name: settings[key] for key, name in SCORED.items() if key in settings}
    how["weights"] = tuple(settings.get(name, 1.0) for name in WEIGHTS)
    terms, (scores, rows) = found.terms(*views), expected.score(*views, **how)
    error = streams.relative_error(terms.fuse().task_scores, scores)
    errors = [
        np.abs(terms.standardised(view)[0] - np.stack([task.u(of) for task in tasks], 1)).max()
        for view, ((tasks, _), of) in enumerate(
            zip(expected.views, map(np.float64, views), strict=True)
        )
    ]
    print(f"{case:28s} scores {error:.0e}, u {max(errors):.0e}")
    assert error < 1e-5
    assert max(errors) < 1e-3
    np.testing.assert_array_equal(terms.fuse().task, scores.argmax(axis=1))
    np.testing.assert_array_equal(terms.fuse().local_class, rows)
