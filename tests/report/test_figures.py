"""Figures against the numbers that they are made from."""

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.text import Text
from scipy import stats

from fdc_jax.report import drawing, figures, formatting
from tests.report import made_up


@pytest.fixture(scope="module")
def group():
    """Three seeds of a run by the protocol, and their analyses."""
    return made_up.analysed()[0]


@pytest.fixture(scope="module")
def drawn(group):
    """Every figure of the group, by kind."""
    return {drawing.kind: drawing for drawing in figures.draw([group])}


def line_of(axes, gid):
    (line,) = [line for line in axes.lines if line.get_gid() == gid]
    return line


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text)]


def check_band(axes, gid, values, index=0):
    """A line is the mean over seeds, and its band one standard deviation around it."""
    mean, std = np.mean(values, axis=0), np.std(values, axis=0, ddof=1)
    line = line_of(axes, gid)
    assert line.get_ydata() == pytest.approx(mean)
    bands = [band for band in axes.collections if isinstance(band, PolyCollection)]
    points = bands[index].get_paths()[0].vertices
    for x, low, high in zip(line.get_xdata(), mean - std, mean + std, strict=True):
        ys = points[np.isclose(points[:, 0], x), 1]
        assert [min(ys), max(ys)] == pytest.approx([low, high])


def test_final_accuracies_of_groups_stand_in_their_rows(drawn):
    kinds = ("similarity", "residual_contributions", "residual_distributions")
    assert [*drawn] == [*figures.OF_A_RUN, *kinds, "prototype_geometry", "sweeps"]
    group, other = made_up.groups(*map(made_up.run, (1, 2, 3)), made_up.run(1, "digits"))
    figure = figures.task_identity([group, other])
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["Cumulative-LoRA, CIFAR-100", "Cumulative-LoRA, Digits"]
    for name, (colour, _) in drawing.looks((*made_up.METHODS, "oracle")).items():
        point = line_of(axes, f"{name}-0")
        assert point.get_xdata() == pytest.approx([np.mean(group.values(name))])
        assert point.get_color() == colour and formatting.method_title(name) in texts(figure)


def test_the_curve_is_the_mean_with_one_standard_deviation(group, drawn):
    (axes,) = drawn["accuracy_curve"].figure.axes
    curve = figures.curve(group)
    for index, name in enumerate((*made_up.METHODS, "oracle")):
        check_band(axes, name, curve[name].unstack("task"), index)
        assert list(line_of(axes, name).get_xdata()) == [1, 2, 3, 4]


def test_curves_need_two_evaluated_tasks_and_bands_two_seeds():
    run = made_up.run(1)
    (group,) = made_up.groups(run)
    assert not figures.accuracy_curve(group).axes[0].collections
    del run.results.curve[:-1]
    assert figures.accuracy_curve(group) is None


def test_similarity_is_the_mean_over_seeds(group, drawn):
    residual, affinity = drawn["similarity"].figure.axes
    seeds = group.analyses["similarity"]
    mean = sum(seeds) / len(seeds)
    for name in made_up.SIMILARITIES:
        view, kind = name.split("_")
        points = line_of({"residual": residual, "affinity": affinity}[kind], view)
        assert points.get_xdata() == pytest.approx(mean[name])
        assert points.get_ydata() == pytest.approx(mean["error"])
    ranks = [stats.spearmanr(of.adapted_affinity, of.error).statistic for of in seeds]
    assert f"adapted view, ρ = {np.mean(ranks):.2f}" in texts(affinity)


def test_sweeps_are_means_with_the_default_dotted(group, drawn):
    axes = dict(zip(figures._SWEPT, drawn["sweeps"].figure.axes, strict=True))
    axes["nearest"] = axes["neighbours"]
    for setting in axes:
        names = [name for name in made_up.SWEPT if name.startswith(f"{setting}=")]
        values = np.transpose([group.values("fdc", name) for name in names])
        check_band(axes[setting], setting, values, index=int(setting == "nearest"))
        at = [float(name.partition("=")[2]) for name in names]
        assert line_of(axes[setting], setting).get_xdata() == pytest.approx(at)
    for setting, value in (("attenuation", 0.5), ("retained_energy", 0.75), ("neighbours", 1)):
        default = line_of(axes[setting], "default")
        assert (default.get_xdata()[0], default.get_linestyle()) == (value, ":")
