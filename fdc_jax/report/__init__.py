"""Tables on the screen, and the report about finished runs.

runs (`runs`) -> numbers (`quantities`, `analysis`) -> tables and figures (`tables`,
`reference`, `figures`) -> the screen (`console`) and the page (`page`).
"""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fdc_jax.errors import InputError, counted, displayed
from fdc_jax.machine.files import (
    check_writable_folder,
    csv_text,
    named_path,
    read_object,
    sha256,
    user_cache,
    write_json,
    write_text,
)
from fdc_jax.machine.versions import versions

if TYPE_CHECKING:  # Both import plotting.
    from fdc_jax.report.runs import Group
    from fdc_jax.report.tables import Table

_SOURCES = "sources.json"
_PATIENCE = 10  # seconds without a progress bar
# Files of a run whose content is in a report.
_FILES = (
    "config.json",
    "results.json",
    "predictions.npz",
    "latency.json",
    "untrained/results.json",
    "untrained/predictions.npz",
)


def write(
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    sweep: Mapping[str, Sequence[float]] | None = None,
    references: Sequence[str] = (),
    data: str | None = None,
    hosts: Mapping[str, Mapping[str, Any]] | None = None,
    quiet: bool = False,
) -> Path:
    """Writes `report.html`, `tables/` and `figures/`; returns the path of the page.

    Folders that cannot be used are skipped, and named on standard error and in the page.
    `sources.json` has the checksums of the runs, see `is_current`.

    Args:
        paths: run folders, or folders of run folders at any depth.
        output: folder of the report, made if it is missing.
        sweep: values of settings of FDC by name, see `runs.analyse`.
        references: CSV files, see `reference`.
        data: folder of the images of the runs, see `fdc_jax.open_run`.
        hosts: argument `host` of `fdc_jax.open_run` by benchmark.
        quiet: print nothing.

    Raises:
        InputError: no folder is usable, a reference is not as expected, or `output` cannot be
            written.
    """
    # Plotting takes seconds to import, which other commands should not wait for.
    import tqdm

    from fdc_jax.machine import devices
    from fdc_jax.report import reference, runs, tables

    devices.keep_programs(user_cache())

    def say(text: str) -> None:
        if not quiet:
            print(f"fdc_jax.report: {displayed(text)}", file=sys.stderr, flush=True)

    folder = named_path("--output", output)
    hidden = quiet or not sys.stderr.isatty()
    check_writable_folder("--output", folder)
    # Errors of the arguments come before any work.
    compared = {Path(path).stem: (path, reference.read(path)) for path in references}
    # Before the runs are read: a run that changes later makes the report out of date.
    made_from = _sources(paths, folder, sweep, references)
    groups, skipped = runs.load(paths, data, hosts or {})
    for path, reason in skipped.items():
        say(f"skipped {path}: {reason}")
    if not groups:
        first = next((f"{path}: {reason}" for path, reason in skipped.items()), "none was given")
        raise InputError(f"no usable run among {counted(len(skipped), 'folder')}: {first}")
    known = {(group.benchmark, group.learner) for group in groups}
    for path, lines in compared.values():
        if unmatched := reference.check_matches(path, lines, known):
            say(unmatched)
    progress = tqdm.tqdm(groups, "analyses", disable=hidden, leave=False, delay=_PATIENCE)
    groups = [runs.analyse(group, sweep) for group in progress]
    for group in groups:
        for reason in group.missing:
            say(f"{group.name}: {reason}")
        runs.write_summary(group)
    compared = [tables.of_reference(path, lines, groups) for path, lines in compared.values()]
    page = write_groups(groups, folder, compared, skipped, quiet)
    if not quiet:
        for table in compared:
            print(f"\n{table.to_text()}", end="")
    write_json(folder / _SOURCES, made_from)
    return page


def write_groups(
    groups: "Sequence[Group]",
    folder: Path,
    compared: "Sequence[Table]" = (),
    skipped: Mapping[Path, str] = MappingProxyType({}),
    quiet: bool = False,
) -> Path:
    """Writes the report about groups of runs; returns the path of its page.

    Args:
        groups: with their analyses, see `runs.analyse`.
        folder: of the report.
        compared: tables of references.
        skipped: reasons by folder that cannot be used.
        quiet: print nothing.
    """
    from fdc_jax.report import classes, figures, page, pictures, tables

    built = [*tables.build(groups), *compared]
    for table in built:
        table.write(folder / "tables")
    matrices = csv_text(tables.of_matrices(groups), index=False)
    write_text(folder / "tables" / "accuracy_matrix.csv", matrices)
    drawn = figures.draw(groups)
    for drawing in drawn:
        figures.write(drawing, folder / "figures")
    by_class = [classes.load(group) for group in groups]
    if len(groups) == 1 and by_class[0] and groups[0].has_images:
        by_class = [classes.with_pictures(by_class[0], groups[0])]
    for number, (group, of) in enumerate(zip(groups, by_class, strict=True), 1):
        if of:
            write_text(folder / f"classes_{number}.html", page.render_classes(group, of))
    shown = [
        pictures.load(group.runs[0]) if group.has_images else pictures.Pictures()
        for group in groups
    ]
    text = page.render(groups, skipped, built, drawn, shown, by_class)
    write_text(folder / "report.html", text)
    if not quiet:
        count = sum(len(group.runs) for group in groups)
        texts = counted(count, "run"), counted(len(groups), "group")
        print(f"{' in '.join(texts)}: {folder / 'report.html'}")
    return folder / "report.html"


def is_current(
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    references: Sequence[str] = (),
    sweep: Mapping[str, Sequence[float]] | None = None,
) -> bool:
    """Returns True if `write` with these arguments would write the report that `output` holds.

    Dates do not count: copies and the clocks of other machines change them.
    """
    folder = Path(output)
    try:
        made_from = read_object(folder / _SOURCES)
    except InputError:  # damaged
        return False
    return (folder / "report.html").exists() and made_from == _sources(
        paths, folder, sweep, references
    )


def _sources(
    paths: Sequence[str | os.PathLike[str]],
    output: Path,
    sweep: Mapping[str, Sequence[float]] | None = None,
    references: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the version of the package, the options, and checksums of all files of a report."""
    from fdc_jax.report import runs

    checksums: dict[str, dict[str, str]] = {}
    for folder in runs.folders(paths):
        files = checksums[os.path.relpath(folder, output)] = {}
        for name in _FILES:
            with contextlib.suppress(OSError, InputError):  # missing, or not to be read
                files[name] = sha256(folder / name)
    own = versions()
    options = {
        "sweep": sweep and {name: [*values] for name, values in sweep.items()},
        "references": {Path(path).name: sha256(path) for path in references},
    }
    return {"version": [own["fdc_jax"], own["commit"]], **options, "runs": checksums}
