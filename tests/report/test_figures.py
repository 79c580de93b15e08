"""Figures against the numbers that they are made from."""

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.text import Text
from scipy import stats

from fdc_jax.report import drawing, figures, formatting
from tests.report import made_up


@pytest.fixture(scope="module")
def protocol():
    """Three seeds of a protocol run, and their analyses."""
    return made_up.analysed()


@pytest.fixture(scope="module")
def drawn(protocol):
    """Every figure of these, by kind."""
    return {each.kind: each for each in figures.draw(protocol)}


def the_line(axes, gid):
    (line,) = [line for line in axes.lines if line.get_gid() == gid]
    return line


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text)]


def over_seeds(found):
    """Mean and deviation over seeds of columns of an analysis."""
    return np.mean(found, axis=0), np.std(found, axis=0, ddof=1)


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
    # All others are drawn of one group.
    kinds = ("similarity", "residual_contributions", "residual_distributions")
    assert [*drawn] == [*figures.OF_A_RUN, *kinds, "prototype_geometry", "sweeps"]
    members = [made_up.run(seed) for seed in (1, 2, 3)] + [made_up.run(1, "digits")]
    group, _ = groups = made_up.groups(*members)
    figure = figures.task_identity(groups)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "Final accuracy (%)"
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["Cumulative-LoRA, CIFAR-100", "Cumulative-LoRA, Digits"]
    for name, (colour, _) in drawing.looks((*made_up.METHODS, "oracle")).items():
        point = the_line(axes, f"{name}-0")
        assert point.get_xdata() == pytest.approx([np.mean(group.values(name))])
        assert point.get_color() == colour
    titles = {"Raw", "FDC", "Task given", formatting.method_title("gaussians")}
    assert titles <= set(texts(figure))


def test_four_matrices_stand_two_by_two():
    run = made_up.run(1)
    run.predictions["ncm_task"] = run.predictions["fdc_task"]
    run.results.accuracy["ncm"] = 50.0
    panels = figures.task_confusion(made_up.groups(run)[0]).axes[:4]
    rows = [axes.get_subplotspec().rowspan.start for axes in panels]
    assert rows == [0, 0, 1, 1]


# One run ------------------------------------------------------------------------------------------


def test_the_curve_is_the_mean_with_one_standard_deviation(protocol, drawn):
    (group,), (axes,) = protocol, drawn["accuracy_curve"].figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Tasks learned", "Accuracy (%)")
    for index, name in enumerate((*made_up.METHODS, "oracle")):
        values = [[p.accuracy[name] for p in run.results.curve] for run in group.runs]
        check_band(axes, name, over_seeds(values), index)
        assert list(the_line(axes, name).get_xdata()) == [1, 2, 3, 4]


def test_a_curve_needs_two_evaluated_tasks_and_one_seed_has_no_band():
    run = made_up.run(1)
    (group,) = made_up.groups(run)
    assert not figures.accuracy_curve(group).axes[0].collections
    del run.results.curve[:-1]
    assert figures.accuracy_curve(group) is None


# Diagnostics and sweeps ---------------------------------------------------------------------------


def test_similarity_is_the_mean_over_seeds(protocol, drawn):
    (group,) = protocol
    residual, affinity = drawn["similarity"].figure.axes
    seeds = group.analyses["similarity"]
    for axes, kind in ((residual, "residual"), (affinity, "affinity")):
        for view in ("adapted", "pretrained"):
            points, name = the_line(axes, view), f"{view}_{kind}"
            assert points.get_xdata() == pytest.approx(np.mean([s[name] for s in seeds], axis=0))
            assert points.get_ydata() == pytest.approx(np.mean([s.error for s in seeds], axis=0))
    assert residual.get_ylabel() == "Routing error (%)"
    rank = np.mean([stats.spearmanr(s.adapted_affinity, s.error).statistic for s in seeds])
    assert f"adapted view, ρ = {rank:.2f}" in texts(affinity)


def test_sweeps_are_means_with_the_default_dotted(protocol, drawn):
    (group,) = protocol
    defaults = {"attenuation": 0.5, "retained_energy": 0.75, "neighbours": 1}
    for axes, (name, own) in zip(drawn["sweeps"].figure.axes, defaults.items(), strict=True):
        for index, column in enumerate((name, *["nearest"] * (name == "neighbours"))):
            names = [each for each in made_up.SWEPT if each.startswith(f"{column}=")]
            accuracies = np.array([group.values("fdc", each) for each in names]).T
            check_band(axes, column, over_seeds(accuracies), index)
            values = [float(each.partition("=")[2]) for each in names]
            assert the_line(axes, column).get_xdata() == pytest.approx(values)
        default = the_line(axes, "default")
        assert (default.get_xdata()[0], default.get_linestyle()) == (own, ":")


def test_files_of_a_figure(drawn, tmp_path):
    figures.write(drawn["sweeps"], tmp_path)
    starts = {path.suffix: path.read_bytes()[:4] for path in tmp_path.iterdir()}
    assert starts == {".svg": b"<?xm", ".pdf": b"%PDF", ".png": b"\x89PNG"}
