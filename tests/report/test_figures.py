"""Figures against the numbers that they are made from."""

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.text import Text

from fdc_jax.report import drawing, figures, frames, paper
from tests.report import made_up


@pytest.fixture(scope="module")
def protocol():
    """Three seeds of a protocol run, and their analyses."""
    return made_up.analysed()


@pytest.fixture(scope="module")
def drawn(protocol):
    """Every figure of these, by kind."""
    return {name: figures.draw(name, protocol)[0] for name in figures.FIGURES}


def draw(name, *members):
    """The first figure of some runs."""
    return figures.draw(name, made_up.analysed(*members))[0].figure


def the_line(axes, gid):
    (line,) = [line for line in axes.lines if line.get_gid() == gid]
    return line


def hollow(axes):
    return [line for line in axes.lines if line.get_markerfacecolor() == "none"]


def words(figure):
    return [text.get_text() for text in figure.findobj(Text)]


def over_seeds(group, name, *keys):
    """Mean and deviation over seeds of a list somewhere in an analysis."""
    rows = []
    for found in group.analyses[name]:
        for key in keys:
            found = found[key]
        rows.append(found)
    return np.mean(rows, axis=0), np.std(rows, axis=0, ddof=1)


def check_band(axes, gid, expected, index=0):
    """A line is the mean over seeds, and its band one standard deviation around it."""
    mean, std = expected
    line = the_line(axes, gid)
    assert line.get_ydata() == pytest.approx(mean)
    band = [each for each in axes.collections if isinstance(each, PolyCollection)][index]
    points = band.get_paths()[0].vertices
    for x, low, high in zip(line.get_xdata(), mean - std, mean + std, strict=True):
        ys = points[np.isclose(points[:, 0], x), 1]
        assert (min(ys), max(ys)) == (pytest.approx(low), pytest.approx(high))


# Lists of learners --------------------------------------------------------------------------------


def test_accuracies_stand_where_they_belong(protocol, drawn):
    (group,), (axes,) = protocol, drawn["task_identity"].figure.axes
    assert axes.get_xlabel() == "Final accuracy (%)"
    assert axes.get_title(loc="left") == "CIFAR-100"
    assert [text.get_text() for text in axes.get_yticklabels()] == ["Cumulative-LoRA"]
    for name, (colour, _) in drawing.looks((*made_up.METHODS, "oracle")).items():
        point = the_line(axes, f"{name}-0")
        assert point.get_xdata() == pytest.approx([np.mean(group.values(name))])
        assert point.get_color() == colour
    assert {"Raw", "FDC", "Class Gaussians", "Task given", "Paper"} <= set(
        words(drawn["task_identity"].figure)
    )
    published = sorted(float(line.get_xdata()[0]) for line in hollow(axes))
    expected = [
        paper.row("benchmark", "cumulative_lora", name)["cifar100"].mean for name in ("raw", "fdc")
    ]
    assert published == expected


def test_other_settings_stand_apart_without_the_papers_numbers():
    reduced = made_up.run(1, **{"train.epochs": 5})
    figure = draw("task_identity", made_up.run(1), made_up.run(1, learner="splitlora"), reduced)
    first, second = figure.axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["Cumulative-LoRA", "SplitLoRA"]
    assert (len(hollow(first)), len(hollow(second))) == (4, 0)
    assert second.get_title(loc="left") == "CIFAR-100, 5 epochs"
    assert "Paper" not in words(draw("task_identity", reduced))


# One run ------------------------------------------------------------------------------------------


def test_the_curve_is_the_mean_with_one_standard_deviation(protocol, drawn):
    (group,), (axes,) = protocol, drawn["accuracy_curve"].figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Tasks learned", "Accuracy (%)")
    for index, name in enumerate((*made_up.METHODS, "oracle")):
        values = [[p["accuracy"][name] for p in run.results["curve"]] for run in group.runs]
        check_band(axes, name, (np.mean(values, axis=0), np.std(values, axis=0, ddof=1)), index)
        assert list(the_line(axes, name).get_xdata()) == [1, 2, 3, 4]


def test_a_curve_needs_every_task_and_one_seed_has_no_band():
    run = made_up.run(1)
    (axes,) = draw("accuracy_curve", run).axes
    assert not axes.collections
    del run.results["curve"][1]
    assert figures.draw("accuracy_curve", made_up.groups(run)) == []


def test_shares_are_stacked_to_the_whole(protocol, drawn):
    (group,), (axes,) = protocol, drawn["decomposition"].figure.axes
    titles = [text.get_text() for text in axes.get_yticklabels()]
    assert titles == ["Raw", "FDC", "Class Gaussians"]
    shares = frames.shares(group)
    for bars, name in zip(axes.containers, frames.SHARES, strict=True):
        assert [bar.get_width() for bar in bars] == pytest.approx(shares[name].tolist())
    assert [bar.get_x() + bar.get_width() for bar in bars] == pytest.approx([100] * 3)


def test_every_calibrator_has_a_confusion_matrix(protocol, drawn):
    (group,), panels = protocol, drawn["task_confusion"].figure.axes
    for axes, name in zip(panels, made_up.METHODS, strict=True):
        values = axes.images[0].get_array()
        assert np.asarray(values) == pytest.approx(frames.confusion(group, name))


# Diagnostics and sweeps ---------------------------------------------------------------------------


def test_similarity_is_the_mean_over_seeds(protocol, drawn):
    (group,) = protocol
    residual, affinity = drawn["similarity"].figure.axes
    error, _ = over_seeds(group, "similarity", "routing_error_percent")
    for axes, kind in ((residual, "residual"), (affinity, "affinity")):
        for view in ("adapted", "pretrained"):
            points = the_line(axes, view)
            alike, _ = over_seeds(group, "similarity", view, kind)
            assert points.get_xdata() == pytest.approx(alike)
            assert points.get_ydata() == pytest.approx(error)
    assert residual.get_ylabel() == "Routing error (%)"
    assert "adapted view, ρ = 0.50" in [text.get_text() for text in affinity.texts]


def test_distributions_show_own_foreign_and_their_mean_dashed(protocol, drawn):
    (group,) = protocol
    found = group.analyses["residual_distributions"][0]
    places = [(view, place) for view in ("adapted", "pretrained") for place in ("first", "last")]
    panels = drawn["residual_distributions"].figure.axes
    for axes, (view, place) in zip(panels, places, strict=True):
        result = found[view][place]
        own, mean = the_line(axes, "own"), the_line(axes, "foreign_mean")
        assert own.get_xdata() == pytest.approx(result["grid"])
        assert own.get_ydata() == pytest.approx(result["own"])
        assert mean.get_ydata() == pytest.approx(result["foreign_mean"])


def test_sweeps_are_means_with_the_default_dotted(protocol, drawn):
    (group,) = protocol
    names = ("attenuation", "retained_energy")
    for axes, name in zip(drawn["sweeps"].figure.axes, names, strict=True):
        found = group.analyses[f"sweep_{name}"][0]
        check_band(axes, "accuracy", over_seeds(group, f"sweep_{name}", "accuracy"))
        assert the_line(axes, "accuracy").get_xdata() == pytest.approx(found["values"])
        default = the_line(axes, "default")
        assert (default.get_xdata()[0], default.get_linestyle()) == (found["default"], ":")
        (published,) = hollow(axes)
        expected = paper.row("benchmark", "cumulative_lora", "fdc")["cifar100"].mean
        assert (published.get_xdata(), published.get_ydata()) == ([found["default"]], [expected])
