"""The league's command.

    python -m league images [FOLDER] [--source=CIFAR100] [--data_dir=TFDS]
    python -m league export FOLDER [--config.FIELD=VALUE ...]
    python -m league record WORKDIR [--facts=FACTS.json] [--output=FOLDER]
    python -m league record DUMP.npz --images=FOLDER --facts=FACTS.json [--output=FOLDER]
    python -m league check FOLDER ...
    python -m league page

`images` writes the images that runs of this package learn, `export` the same for other code;
`record` writes records, `check` computes their numbers again, `page` writes README.md anew.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fdc_jax import command
from fdc_jax.data import sources
from fdc_jax.errors import Ending, InputError
from fdc_jax.machine.files import read_json, user_cache
from fdc_jax.run.setup import open_images
from league import images, page, records, settings, submissions


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` by default; returns 0 or the exit code of an error."""
    parser = argparse.ArgumentParser(prog="python -m league", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)

    def flags(name: str, run: Callable[[Any], None], text: str) -> Callable[..., Any]:
        added = commands.add_parser(name, help=text, allow_abbrev=False)
        added.set_defaults(run=run)
        return added.add_argument

    add = flags("images", _images, "write the images that runs of this package learn")
    add("folder", nargs="?", default=settings.IMAGES, help="a new folder (default %(default)s)")
    add("--source", default="", help="folder or archive of CIFAR-100")
    add("--data_dir", default="", help="where TFDS has prepared CIFAR-100")
    add = flags("export", _export, "write the images for other code")
    add("folder", help="a new folder")
    add = flags("record", _record, "write records of a run, or of what other code predicted")
    add("source", help="a finished work directory, or an .npz of predictions")
    add("--images", help="the exported folder that an .npz is about")
    add("--facts", help="a JSON file of the facts in fields.json")
    add("--output", default=page.RECORDS / "cifar100", help="folder of records")
    flags("check", _check, "compute the numbers of records again")("folders", nargs="+")
    flags("page", lambda _: page.write(), "write README.md and its figure anew")
    options, options.fields = parser.parse_known_args(arguments)
    known = "--config." if options.run is _export else "no flag"
    if unknown := [word for word in options.fields if not word.startswith(known)]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    with Ending("league") as ending:
        options.run(options)
    return ending.code


def _check_new(folder: str) -> None:
    if Path(folder).exists():
        raise InputError(f"{folder}: expected a new folder, found one")


def _images(options: argparse.Namespace) -> None:
    _check_new(options.folder)
    where = {"source": options.source, "data_dir": options.data_dir, "quiet": False}
    splits = sources.open_splits("cifar100", user_cache(), **where)
    images.write_listed(options.folder, splits, read_json(images.LIST))


def _export(options: argparse.Namespace) -> None:
    _check_new(options.folder)
    config = command.configured([f"--config={settings.__file__}", *options.fields])
    images.export(options.folder, open_images(config))


def _record(options: argparse.Namespace) -> None:
    dumped = options.source.lower().endswith(".npz")
    if dumped != bool(options.images):
        raise InputError(f"{options.source}: expected --images=FOLDER for an .npz, and only there")
    facts = read_json(Path(options.facts)) if options.facts else {}
    if dumped:
        made = [submissions.of_dump(options.source, options.images, facts)]
    else:
        made = submissions.of_run(options.source, facts)
    for record in made:
        print(f"{record['accuracy']:6.2f} %  {records.write(record, options.output)}")


def _check(options: argparse.Namespace) -> None:
    for folder in options.folders:
        print(f"{len(records.read(folder))} records in {folder} add up")


if __name__ == "__main__":
    sys.exit(main())
