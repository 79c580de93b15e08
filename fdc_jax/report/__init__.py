"""What people look at: tables on the screen, and the report about finished runs.

runs (`runs`) -> frames (`quantities`, `frames`, `analysis`) -> tables and figures (`tables`,
`reference`, `figures`) -> the screen (`console`) and the page (`page`).
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fdc_jax.errors import InputError, counted
from fdc_jax.machine.files import check_writable_folder, named_path, write_text


def write(
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    sweep: Mapping[str, Sequence[float]] | None = None,
    references: Sequence[str] = (),
    data: str | None = None,
    host: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Path:
    """Writes the report of some run folders: `report.html`, `tables/` and `figures/`.

    Folders that cannot be used are named on standard error and in the page, and skipped.

    Args:
        paths: run folders; another folder stands for all run folders at any depth in it.
        output: folder that receives the report, made when missing.
        sweep: settings of FDC to vary, see `fdc_jax.report.analysis`; by default the paper's.
        references: CSV files, see `fdc_jax.report.reference`; of one name the last counts.
        data: folder of the images of the runs, for pictures, see `fdc_jax.open_run`.
        host: the same of a run's own configuration, see there.
        quiet: print nothing.

    Returns:
        Path of the page.

    Raises:
        InputError: no folder is usable, a file given is not as expected, or `output` cannot be
            written.
    """
    # Plotting and pandas take seconds to import, which tables on the screen should not wait for.
    import tqdm

    from fdc_jax.report import analysis, classes, figures, page, pictures, reference, runs, tables

    def say(text: str) -> None:
        if not quiet:
            print(f"fdc_jax.report: {text}", file=sys.stderr, flush=True)

    folder, hidden = named_path("--output", output), quiet or not sys.stderr.isatty()
    check_writable_folder("--output", folder)
    # Everything that the caller gave is read before anything is computed.
    compared = {reference.name_of(path): (path, reference.read(path)) for path in references}
    groups, skipped = runs.load(paths, data, host)
    for each in skipped:
        say(f"skipped {each.path}: {each.reason}")
    if not groups:
        reason = f"{skipped[0].path}: {skipped[0].reason}" if skipped else "none was given"
        raise InputError(f"no usable run among {counted(len(skipped), 'folder')}: {reason}")
    for path, lines in compared.values():
        reference.check_matches(path, lines, groups)
    for group in tqdm.tqdm(groups, "analyses", disable=hidden, leave=False):
        analysis.analyse(group, sweep)
        for reason in group.missing:
            say(f"{group.name}: {reason}")
        runs.write_summary(group)
    built = tables.build(groups)
    built += [reference.table(path, lines, groups) for path, lines in compared.values()]
    for table in built:
        table.write(folder / "tables")
    drawn = figures.draw(groups)
    for drawing in drawn:
        figures.write(drawing, folder / "figures")
    shown = [pictures.load(group.runs[0]) for group in groups]
    of_classes: dict[int, str] = {}
    for place, group in enumerate(groups, 1):
        found = classes.load(group, shown[place - 1].class_names)
        if found is not None:
            found = classes.with_pictures(found, group) if len(groups) == 1 else found
            of_classes[place] = f"classes_{place}.html"
            write_text(folder / of_classes[place], page.render_classes(group, found))
    text = page.render(groups, skipped, built, drawn, shown, of_classes)
    write_text(folder / "report.html", text)
    if not quiet:
        count = sum(len(group.runs) for group in groups)
        counts = counted(count, "run"), counted(len(groups), "group")
        print(f"{' in '.join(counts)}: {folder / 'report.html'}")
    return folder / "report.html"
