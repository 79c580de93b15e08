"""Figures against the numbers that they are made from."""

import itertools
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from fdc_jax import evaluation
from fdc_jax.report import drawing, figures, paper
from tests.report import made_up

# Those that results alone can fill.
WITHOUT_ANALYSES = ("task_identity", "gains", "accuracy_curves")


@pytest.fixture(scope="module")
def protocol():
    """Three seeds of a protocol run, and their analyses."""
    groups = made_up.groups()
    return groups, made_up.analyses(*groups)


def lines(axes, gid):
    return [line for line in axes.lines if line.get_gid() == gid]


def the_line(axes, gid):
    (line,) = lines(axes, gid)
    return line


def hollow(axes):
    return [line for line in axes.lines if line.get_markerfacecolor() == "none"]


def mean_of(group, analyses, name, *keys):
    """Mean over seeds of a list somewhere in an analysis."""
    rows = []
    for run in group.runs:
        found = analyses[str(run.path)][name]
        for key in keys:
            found = found[key]
        rows.append(found)
    return np.mean(rows, axis=0), np.std(rows, axis=0, ddof=1)


def band_of(axes, index=0):
    """Lower and upper edge of a shaded band, by place."""
    bands = [each for each in axes.collections if isinstance(each, PolyCollection)]
    edges: dict[float, list[float]] = {}
    for x, y in bands[index].get_paths()[0].vertices:
        edges.setdefault(round(float(x), 9), []).append(float(y))
    return {x: (min(ys), max(ys)) for x, ys in edges.items()}


# Lists of learners --------------------------------------------------------------------------------


def test_accuracies_stand_where_they_belong(protocol):
    groups, analyses = protocol
    figure = figures.task_identity(groups, analyses)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "Final accuracy (%)"
    assert axes.get_title(loc="left") == "CIFAR-100"
    assert [text.get_text() for text in axes.get_yticklabels()] == ["Cumulative-LoRA"]
    for name in ("raw", "fdc", "oracle"):
        point = the_line(axes, f"{name}-0")
        assert point.get_xdata() == pytest.approx([np.mean(groups[0].values("accuracy", name))])
        assert point.get_color() == drawing.COLOURS[name]
    published = sorted(float(line.get_xdata()[0]) for line in hollow(axes))
    expected = [paper.accuracy("cumulative_lora", name)["cifar100"].mean for name in ("raw", "fdc")]
    assert published == expected


def test_accuracies_of_other_settings_stand_apart_without_the_papers_numbers():
    protocol, other = made_up.run(1), made_up.run(1, learner="splitlora")
    reduced = made_up.run(1, **{"train.epochs": 5})
    figure = figures.task_identity(made_up.groups(protocol, other, reduced), {})
    first, second = figure.axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["Cumulative-LoRA", "SplitLoRA"]
    assert (len(hollow(first)), len(hollow(second))) == (4, 0)
    assert [text.get_text() for text in second.texts] == ["5 epochs"]
    assert "Paper" not in " ".join(
        text.get_text() for text in figures.task_identity(made_up.groups(reduced), {}).findobj(Text)
    )


def test_gains_have_the_interval_over_seeds(protocol):
    (group,), analyses = protocol
    (axes,) = figures.gains([group], analyses).axes
    mean = np.mean(group.gains("full"))
    assert the_line(axes, "gain-0").get_xdata() == pytest.approx([mean])
    assert f"{mean:+.1f}" in [text.get_text() for text in axes.texts]
    expected = evaluation.paired_gain(
        group.values("accuracy", "raw"), group.values("accuracy", "fdc")
    )
    spans = [line.get_xdata() for line in axes.lines if len(line.get_xdata()) == 2]
    assert any(np.allclose(span, [expected.low, expected.high]) for span in spans)
    (published,) = hollow(axes)
    assert published.get_xdata() == [paper.plugin("cumulative_lora", "full").gains["cifar100"].mean]
    assert "percentage points" in axes.get_xlabel()


def test_the_gain_of_one_seed_has_the_interval_over_images_and_of_the_selection_a_cross():
    (group,) = made_up.groups(made_up.run(2, learner="splitlora"))
    figure = figures.gains([group], {})
    (axes,) = figure.axes
    columns = group.runs[0].predictions()
    expected = evaluation.bootstrap_gain(
        columns["label"], columns["raw_label"], columns["fdc_label"]
    )
    dashed = [line for line in axes.lines if line.is_dashed()]
    assert [np.allclose(line.get_xdata(), [expected.low, expected.high]) for line in dashed] == [
        True
    ]
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert cross.get_xdata() == pytest.approx(group.gains("pac+rlc_adapted_view"))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["FDC", "95 % over images", "Selected components", "Paper"]


def test_numbers_are_typeset():
    assert drawing.number(-1.25, 1, signed=True) == "\N{MINUS SIGN}1.2"
    assert drawing.number(-0.001, 2) == "0.00" and drawing.number(3.14, 1, signed=True) == "+3.1"


def test_dollar_signs_are_no_formulas():
    groups = made_up.groups(made_up.run(1, learner=r"$\oops{$"))
    figure = figures.task_identity(groups, {})
    (label,) = figure.axes[0].get_yticklabels()
    assert label.get_text() == r"$\oops{$"
    assert "<svg" in drawing.svg(figure)  # Raises where it is read as a formula.


def test_long_names_are_cut():
    long = "a_learner_with_a_name_as_long_as_a_path_" * 4
    groups = made_up.groups(made_up.run(1, learner=long, benchmark=long))
    analyses = made_up.analyses(*groups)
    for name in figures.FIGURES:
        figure = getattr(figures, name)(groups, analyses)
        drawing.svg(figure)  # Warns, which is an error here, when nothing fits.
        shown = [text.get_text() for text in figure.findobj(Text)]
        assert not any(long in text for text in shown)


# Curves and predictions ---------------------------------------------------------------------------


def test_curves_are_means_with_one_standard_deviation(protocol):
    (group,), analyses = protocol
    (axes,) = figures.accuracy_curves([group], analyses).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Tasks learned", "Accuracy (%)")
    for index, name in enumerate(("raw", "fdc", "oracle")):
        values = [[p["accuracy"][name] for p in run.results["curve"]] for run in group.runs]
        line = the_line(axes, name)
        assert line.get_xdata() == pytest.approx([1, 2, 3, 4])
        assert line.get_ydata() == pytest.approx(np.mean(values, axis=0))
        low, high = np.transpose([band_of(axes, index)[x] for x in (1.0, 2.0, 3.0, 4.0)])
        assert (high - low) / 2 == pytest.approx(np.std(values, axis=0, ddof=1))


def test_curves_need_every_task_and_one_seed_has_no_band():
    run = made_up.run(1)
    (axes,) = figures.accuracy_curves(made_up.groups(run), {}).axes
    assert not axes.collections
    run.results["curve"].pop()
    assert figures.accuracy_curves(made_up.groups(run), {}) is None
    del run.results["curve"]
    assert figures.accuracy_curves(made_up.groups(run), {}) is None


def test_shares_are_stacked_to_the_whole(protocol):
    (group,), analyses = protocol
    (axes,) = figures.decomposition([group], analyses).axes
    assert axes.get_ylabel() == "Share of images (%)"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "3", "4", "all"]
    found = {bars.get_label(): bars for bars in axes.containers}
    assert len(found) == 8
    for kind in ("raw", "fdc"):
        for name in drawing.SHARES:
            heights = [bar.get_height() for bar in found[f"_{kind} {name}"]]
            expected, _ = mean_of(group, analyses, "task_confusion", kind, name)
            whole = np.mean(group.values("decomposition", kind, name))
            assert heights == pytest.approx([*expected, whole])
        tops = [bar.get_y() + bar.get_height() for bar in found[f"_{kind} {name}"]]
        assert tops == pytest.approx([100] * 5)


def test_confusion_is_in_percent_of_the_true_task(protocol):
    (group,), analyses = protocol
    raw, fdc, bar = figures.task_confusion([group], analyses).axes
    for axes, kind in ((raw, "raw"), (fdc, "fdc")):
        (image,) = axes.images
        counts, _ = mean_of(group, analyses, "task_confusion", kind, "confusion")
        shown = np.asarray(image.get_array())
        assert shown == pytest.approx(100 * counts / 30)
        assert shown.sum(axis=1) == pytest.approx([100] * 4)
    assert (raw.get_ylabel(), raw.get_xlabel()) == ("True task", "Task chosen by raw scores")
    assert bar.get_ylabel() == "Images of the true task (%)"


# Features -----------------------------------------------------------------------------------------


def test_similarity_has_a_point_per_pair_and_view(protocol):
    (group,), analyses = protocol
    residual, affinity = figures.similarity([group], analyses).axes
    error, _ = mean_of(group, analyses, "similarity", "routing_error_percent")
    for axes, kind in ((residual, "residual"), (affinity, "affinity")):
        for view in ("adapted", "pretrained"):
            points = the_line(axes, view)
            alike, _ = mean_of(group, analyses, "similarity", view, kind)
            assert points.get_xdata() == pytest.approx(alike)
            assert points.get_ydata() == pytest.approx(error)
        assert "(std of the other task)" in axes.get_xlabel()
    assert residual.get_ylabel() == "Routing error (%)"
    assert "adapted view, ρ = 0.50" in [text.get_text() for text in affinity.texts]


def test_the_trend_of_similarity_keeps_the_mean_error(protocol):
    groups = made_up.groups(made_up.run(1, num_tasks=6))
    analyses = made_up.analyses(*groups)
    axes = figures.similarity(groups, analyses).axes[0]
    (found,) = analyses.values()
    error = np.array(found["similarity"]["routing_error_percent"])
    trends = [line for line in axes.lines if line.get_linewidth() == 1.6]
    assert len(trends) == 2
    for trend in trends:
        # 30 pairs make two parts of 15.
        assert len(trend.get_xdata()) == 2
        assert np.mean(trend.get_ydata()) == pytest.approx(error.mean())
        assert (np.diff(trend.get_xdata()) > 0).all()
    few = figures.similarity(*protocol).axes[0]
    assert not any(len(line.get_xdata()) for line in few.lines if line.get_linewidth() == 1.6)


def test_contributions_have_a_point_per_head(protocol):
    (group,), analyses = protocol
    (axes,) = figures.residual_contributions([group], analyses).axes
    for side, left in (("own", True), ("foreign", False)):
        points = the_line(axes, side)
        expected, _ = mean_of(group, analyses, "residual_contributions", side)
        assert points.get_ydata() == pytest.approx(expected)
        assert (np.asarray(points.get_xdata()) < 0).all() == left
        bars = [line for line in axes.lines if len(line.get_ydata()) == 2]
        assert any(line.get_ydata() == pytest.approx([expected.mean()] * 2) for line in bars)
    assert axes.get_ylabel().endswith("(std of own logits)")


def test_a_head_without_foreign_images_leaves_a_gap():
    groups = made_up.groups(made_up.run(1))
    analyses = made_up.analyses(*groups)
    (found,) = analyses.values()
    found["residual_contributions"]["foreign"] = [None, 1.0, 2.0, None]
    (axes,) = figures.residual_contributions(groups, analyses).axes
    assert np.isnan(the_line(axes, "foreign").get_ydata()).tolist() == [True, False, False, True]
    assert any(line.get_ydata() == pytest.approx([1.5] * 2) for line in axes.lines)


def test_distributions_show_own_foreign_and_their_mean_dashed(protocol):
    (group,), analyses = protocol
    figure = figures.residual_distributions([group], analyses)
    found = analyses[str(group.runs[0].path)]["residual_distributions"]
    places = [(view, place) for view in ("adapted", "pretrained") for place in ("first", "last")]
    for axes, (view, place) in zip(figure.axes, places, strict=True):
        result = found[view][place]
        own, mean = the_line(axes, "own"), the_line(axes, "foreign_mean")
        assert own.get_xdata() == pytest.approx(result["grid"])
        assert own.get_ydata() == pytest.approx(result["own"])
        assert mean.get_ydata() == pytest.approx(result["foreign_mean"])
        assert (mean.is_dashed(), own.is_dashed()) == (True, False)
        assert len(axes.lines) == 2 + 3
        assert f"{place} head" in axes.get_xlabel()
        assert max(result["own"]) < axes.get_ylim()[1]


def test_prototypes_are_dots_and_stars(protocol):
    (group,), analyses = protocol
    figure = figures.prototype_geometry([group], analyses)
    found = analyses[str(group.runs[0].path)]["prototype_geometry"]
    for axes, view in zip(figure.axes, ("adapted", "pretrained"), strict=False):
        dots, stars = (each for each in axes.collections if isinstance(each, PathCollection))
        assert np.asarray(dots.get_offsets()) == pytest.approx(np.array(found[view]["classes"]))
        assert np.asarray(stars.get_offsets()) == pytest.approx(np.array(found[view]["tasks"]))
        shades = [to_hex(colour) for colour in stars.get_facecolors()]
        assert len(set(shades)) == 4
        assert [to_hex(c) for c in dots.get_facecolors()] == [s for s in shades for _ in range(3)]
        assert view in axes.get_xlabel()
        assert not len(axes.get_xticks())


# Sweeps -------------------------------------------------------------------------------------------


def test_sweeps_are_means_with_the_default_dotted(protocol):
    (group,), analyses = protocol
    figure = figures.sweeps([group], analyses)
    for axes, name, label in zip(
        figure.axes,
        ("attenuation", "retained_energy"),
        ("Attenuation γ", "Retained energy η"),
        strict=True,
    ):
        found = analyses[str(group.runs[0].path)][f"sweep_{name}"]
        mean, std = mean_of(group, analyses, f"sweep_{name}", "accuracy")
        line, default = the_line(axes, "accuracy"), the_line(axes, "default")
        assert axes.get_xlabel() == label
        assert line.get_xdata() == pytest.approx(found["values"])
        assert line.get_ydata() == pytest.approx(mean)
        low, high = np.transpose([band_of(axes)[value] for value in found["values"]])
        assert (low, high) == (pytest.approx(mean - std), pytest.approx(mean + std))
        assert (default.get_xdata()[0], default.get_linestyle()) == (found["default"], ":")
        (published,) = hollow(axes)
        expected = paper.accuracy("cumulative_lora", "fdc")["cifar100"].mean
        assert (published.get_xdata(), published.get_ydata()) == ([found["default"]], [expected])


def test_a_group_that_was_not_swept_says_so():
    groups = made_up.groups(made_up.run(1), made_up.run(1, benchmark="cub200"))
    analyses = made_up.analyses(*groups)
    del analyses[str(groups[1].runs[0].path)]["sweep_attenuation"]
    swept, not_swept, *below = figures.sweeps(groups, analyses).axes
    assert "not swept" not in [text.get_text() for text in swept.texts]
    assert "not swept" in [text.get_text() for text in not_swept.texts]
    assert not not_swept.lines
    assert all(the_line(axes, "accuracy") for axes in below)


def test_neighbours_compare_two_references(protocol):
    (group,), analyses = protocol
    figure = figures.neighbours([group], analyses)
    (axes,) = figure.axes
    for name in ("own", "nearest"):
        mean, _ = mean_of(group, analyses, "sweep_neighbours", name, "accuracy")
        assert the_line(axes, name).get_xdata() == pytest.approx([1, 2, 3])
        assert the_line(axes, name).get_ydata() == pytest.approx(mean)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["Distributional matching", "Nearest"]


# All ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", figures.FIGURES)
def test_no_figure_without_data(protocol, name):
    groups, _ = protocol
    draw = getattr(figures, name)
    assert draw([], {}) is None
    assert (draw(groups, {}) is None) == (name not in WITHOUT_ANALYSES)
    assert figures.draw(name, [], {}) == []


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_fit_a_paper_and_leave_settings_alone(protocol, name):
    before = dict(matplotlib.rcParams)
    figure = getattr(figures, name)(*protocol)
    assert dict(matplotlib.rcParams) == before
    assert figure.get_figwidth() in (drawing.COLUMN, drawing.PAGE)
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert texts and all(text.get_fontsize() >= 7 for text in texts)
    inked = {to_hex(text.get_color()) for text in texts}
    assert "#000000" not in inked and drawing.INK in inked


@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_same_numbers_give_the_same_file(protocol, name):
    (first,), (second,) = (figures.draw(name, *protocol) for _ in range(2))
    assert first.figure is not second.figure
    assert first.svg == second.svg
    assert "<dc:date>" not in first.svg


def test_files_are_written_and_named_after_what_they_show(tmp_path):
    runs = [made_up.run(1), made_up.run(1, learner="Evil/../$x$ <b>", benchmark="cub200")]
    runs += [made_up.run(1, **{"train.epochs": 5})]
    groups = made_up.groups(*runs)
    drawn = figures.draw("decomposition", groups, made_up.analyses(*groups))
    names = [each.name for each in drawn]
    assert names[:2] == [
        "decomposition_cumulative_lora_cifar100",
        "decomposition_cumulative_lora_cifar100_2",
    ]
    assert len(set(names)) == 3 and all(re.fullmatch(r"[a-z0-9_-]+", name) for name in names)
    paths = figures.write(drawn[2], tmp_path / "figures")
    assert [path.name for path in paths] == [f"{names[2]}.svg", f"{names[2]}.png"]
    assert paths[0].read_text() == drawn[2].svg
    data = paths[1].read_bytes()
    width = int.from_bytes(data[16:20])
    assert data.startswith(b"\x89PNG") and width == round(200 * drawn[2].figure.get_figwidth())
    assert "Evil/../$x$ <b>" in drawn[2].shown


def test_captions_name_the_groups_and_only_papers_numbers_that_are_there(protocol):
    groups, analyses = protocol
    (drawn,) = figures.draw("sweeps", groups, analyses)
    assert drawn.title == "Attenuation and retained energy: Cumulative-LoRA, CIFAR-100"
    assert drawn.shown == "Cumulative-LoRA, CIFAR-100; seeds 1, 2, 3."
    assert "Empty markers are the paper's" in drawn.caption
    reduced = made_up.groups(made_up.run(4, **{"train.epochs": 5}))
    found = made_up.analyses(*reduced)
    (drawn,) = figures.draw("sweeps", reduced, found)
    assert "Empty markers" not in drawn.caption
    (drawn,) = figures.draw("prototype_geometry", made_up.groups(), protocol[1])
    assert drawn.shown == "Cumulative-LoRA, CIFAR-100; seed 1."


def test_captions_leave_out_groups_that_a_figure_has_nothing_of():
    groups = made_up.groups(made_up.run(1), made_up.run(2, learner="splitlora"))
    analyses = made_up.analyses(*groups)
    for name in ("sweep_attenuation", "sweep_retained_energy", "sweep_neighbours"):
        del analyses[str(groups[1].runs[0].path)][name]
    for name in ("sweeps", "neighbours"):
        (drawn,) = figures.draw(name, groups, analyses)
        assert drawn.shown == f"{groups[0].name}; seed {groups[0].seeds[0]}."


def test_groups_share_figures_by_learner_or_by_benchmark():
    def parts(*members):
        groups = made_up.groups(*members)
        return [(name, len(shared)) for (name,), shared in figures._parts(groups, "several")]

    names = [f"benchmark{number}" for number in range(7)]
    on_many = [made_up.run(1, benchmark=name) for name in names]
    assert parts(*on_many) == [("cumulative_lora", 3), ("cumulative_lora", 4)]
    learners = ("inflora", "splitlora", "rsiat")
    alike = [made_up.run(1, learner=name) for name in learners]
    assert parts(*alike) == [("cifar100", 3)]
    assert parts(*on_many[:3], *alike) == [("cumulative_lora", 3)] + [
        (name, 1) for name in ("splitlora", "inflora", "rsiat")
    ]


def test_what_differs_from_the_protocol_is_said_once():
    members = [made_up.run(1, learner=name, **{"train.epochs": 5}) for name in ("inflora", "loda")]
    groups = made_up.groups(*members)
    figure = figures.accuracy_curves(groups, {})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["InfLoRA", "LoDA"]
    assert figure.get_supxlabel() == "CIFAR-100, 5 epochs"
    assert not any(axes.texts for axes in figure.axes)
    mixed = made_up.groups(members[0], made_up.run(1, benchmark="cub200"))
    figure = figures.accuracy_curves(mixed, {})
    assert figure.get_supxlabel() == ""
    titles = {
        axes.get_title(loc="left"): [t.get_text() for t in axes.texts] for axes in figure.axes
    }
    assert titles == {"CUB-200, Cumulative-LoRA": [], "CIFAR-100, InfLoRA": ["5 epochs"]}


def test_drawing_opens_no_pyplot():
    code = "import sys; import fdc_jax.report.figures; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Colours ------------------------------------------------------------------------------------------


def luminance(colour):
    """Relative luminance of WCAG 2."""
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lightness(colour):
    return 116 * np.cbrt(luminance(colour)) - 16


def test_colours_stand_out_on_white_and_differ_in_grey():
    compared = [drawing.RAW, drawing.ORACLE, drawing.FDC]
    assert all(contrast(each, "#ffffff") >= 3 for each in compared)
    steps = -np.diff([lightness(each) for each in compared])
    assert (steps >= 10).all()
    pairs = [(drawing.OWN, drawing.FOREIGN), (drawing.ADAPTED, drawing.PRETRAINED)]
    for one, other in pairs:
        assert abs(lightness(one) - lightness(other)) >= 10
        assert min(contrast(one, "#ffffff"), contrast(other, "#ffffff")) >= 2.9
    shares = [colour for colour, _, _ in drawing.SHARES.values()]
    # Neighbours in a bar; the hatched one is told by its hatch as well.
    assert all(abs(lightness(a) - lightness(b)) >= 8 for a, b in itertools.pairwise(shares))
