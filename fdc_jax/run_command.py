"""The command `fdc run`, in a clone `python main.py`: flags, help, and how it ends.

Loads no JAX until the command line is parsed, so that `--help` is quick.
"""

import ast
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import ConfigDict, config_flags

from fdc_jax import errors
from fdc_jax.errors import InputError, nearest
from fdc_jax.machine.conversion import NOUNS

if TYPE_CHECKING:  # loads JAX
    from fdc_jax.run.config import Config

TITLE = "fdc_jax.run"
FLAGS = flags.FLAGS
_LONGEST_NAME = 200  # characters of a flag


class _Parser(flags.ArgumentParser):
    """Reads the values of a flag by a function."""

    def __init__(self, read: Callable[..., object]):
        self.parse = read


def _sizes(value: object) -> object:
    """Returns the value of `config.classes_per_task`, a number or a list of numbers."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (SyntaxError, ValueError) as error:
        raise ValueError("expected a whole number, or a list such as 10,5,5") from error


# The parser of ml_collections takes `--config.classes_per_task 5` for a switch and a stray word.
config_flags.register_flag_parser_for_type(object, _Parser(_sizes))


def _define_config(values: flags.FlagValues, argv: list[str]) -> None:
    """Defines the flag `--config`; `--config.FIELD` follow from its value."""
    text = "a file, or the name of one of the package; after a colon a learner: digits:inflora"
    config_flags.DEFINE_config_file(
        "config", help_string=text, flag_values=values, lock_config=True, sys_argv=argv
    )

    def load(name: str) -> ConfigDict:
        from fdc_jax.run import configuration  # loads JAX

        config = configuration.load(name)
        known = configuration.flatten(config)
        for field in re.findall(r"^--?(?:no)?config\.([\w.]+)", "\n".join(argv), re.MULTILINE):
            if field not in known:
                section = [name for name in known if name.startswith(f"{field}.")]
                near = nearest(field, section or known)
                raise InputError(f"--config.{field}: no such field{near}")
        return config

    values["config"].parser = _Parser(load)


flags.DEFINE_string("workdir", None, "folder of the run; by default runs/NAME of configs/NAME.py")
flags.DEFINE_bool("dry_run", False, "check data, weights and folder, say hours and GiB, and end")
flags.DEFINE_bool("quiet", False, "print nothing but errors")
flags.DEFINE_bool("traceback", False, "show where an error arose")
flags.DEFINE_string(
    "distributed",
    None,
    "join other processes: auto finds those of a TPU pod, SLURM or MPI job; HOST:PORT,0/2 is "
    "process 0 of 2 by an address of process 0",
)


def configured(arguments: Sequence[str]) -> "Config":
    """Returns the settings of `--config=NAME --config.FIELD=VALUE ...`; raises InputError."""
    values = flags.FlagValues()
    _parsed(values, ["", *arguments])
    return _settings(values)


def _settings(values: flags.FlagValues) -> "Config":
    """Returns the settings of a parsed command line; raises InputError."""
    from fdc_jax.run import configuration

    if values["config"].value is None:
        raise InputError(f"--config: expected a file, or one of {', '.join(configuration.named())}")
    return configuration.typed(values["config"].value)


def _parsed(values: flags.FlagValues, argv: list[str]) -> None:
    """Parses a command line; raises InputError."""
    for file in re.findall(r"^--?flagfile[=\n](.*)", "\n".join(argv), re.MULTILINE):
        if not os.path.isfile(os.path.expanduser(file)):  # absl would read a device for ever
            raise InputError(f"--flagfile={file}: expected a regular file")
    try:
        argv = [*argv[:1], *values.read_flags_from_files(argv[1:])]
        errors.refuse_repeated(argv)
        for word in argv:
            if len(word.partition("=")[0]) > _LONGEST_NAME and word.startswith("-"):
                raise InputError(f"{word}: no such flag")  # absl would compare it by recursion
        _define_config(values, argv)
        rest = values(argv)
    except InputError:
        raise
    except flags.Error as error:
        text = " ".join(str(error).split())
        if error.__context__ and errors.outcome(error.__context__):
            raise error.__context__ from None
        if wrong := re.fullmatch(r"flag --([\w.]+)=(.*?): (?:expected (.*)|.*)", text):
            name, value, expected = wrong.groups()
            expected = expected or NOUNS.get(values[name].parser.flag_type(), "another value")
            text = f"--{name}: expected {expected}, found {value!r:.100}"
        raise InputError(text) from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # of ml_collections
        raise InputError(f"--config: {errors.line(error)}") from error
    if rest[1:]:
        raise InputError(f"unexpected argument {rest[1]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` if None; returns 0 or the code of an error."""
    argv = sys.argv if arguments is None else ["", *arguments]
    # Before NumPy loads, for the reason in `fdc_jax.posthoc`. XLA's start-up notes are of no use.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with errors.Ending(TITLE, "--traceback" in argv) as ending:
        chosen = [text for text in argv if text not in ("--help", "-h")]
        _parsed(FLAGS, chosen)
        if chosen != argv:
            print(usage(FLAGS.config))
            return 0
        from fdc_jax.machine import devices, processes
        from fdc_jax.run import seeds

        config = _settings(FLAGS)
        workdir = f"runs/{_name(config)}" if FLAGS.workdir is None else FLAGS.workdir
        settings = config, workdir, FLAGS.quiet
        devices.keep_freed_memory()
        with errors.plain_warnings(TITLE, FLAGS.quiet), processes.joined(FLAGS.distributed, ending):
            if FLAGS.dry_run:
                print(seeds.check(*settings))
            else:
                seeds.run(*settings)
                processes.on_first(show)(*settings)
    return ending.code


def show(config: "Config", workdir: str, quiet: bool = False) -> None:
    """Prints the accuracies of a finished run and writes its report, if wanted."""
    from fdc_jax import report
    from fdc_jax.report import console, runs
    from fdc_jax.run import configuration, seeds

    folders = list(seeds.folders_of(config, workdir).values())
    group = runs.load(folders)[0][0]
    lines = [f"results: {folder / 'results.json'}" for folder in folders]
    runs.write_summary(group)
    if not quiet:
        console.show(group)
    if config.report:
        try:
            hosts = {config.benchmark: configuration.of_host(config)}
            output = Path(workdir) / "report"
            page = report.write([workdir], output, sweep={}, hosts=hosts, quiet=True)
            lines.append(f"report: {page}")
        except InputError as error:  # the results stand without it
            logging.getLogger(__name__).warning("no report was written: %s", error)
    if not quiet:
        print("\n".join(lines))


def _name(config: "Config") -> str:
    """Returns the name of a run: that of its configuration's file, or of the user's own images."""
    name = Path(config_flags.get_config_filename(FLAGS["config"]).partition(":")[0]).stem
    return config.benchmark if name == "own" else name


def usage(chosen: ConfigDict | None = None) -> str:
    """Returns the flags, and the fields of a configuration, by default of `base.get_config`."""
    from fdc_jax.run import base, configuration

    lines = [f"usage: {Path(sys.argv[0]).name} --config=NAME [--config.FIELD=VALUE ...]"]
    lines += ["example: python -m fdc_jax run --config=digits --config.train.epochs=5", ""]
    lines += [FLAGS.module_help(sys.modules[__name__]), "", "Fields and their defaults:", ""]
    return "\n".join(lines + configuration.help_lines(chosen or base.get_config()))
