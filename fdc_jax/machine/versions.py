"""Versions of the package and of its libraries; importing this loads nothing else."""

__version__ = "0.3.0"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorflow-datasets", "numpy")


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, this package and its main libraries, and the commit."""
    import importlib.metadata
    import platform

    own = {"python": platform.python_version(), "fdc_jax": __version__, "commit": _commit()}
    return own | {name: importlib.metadata.version(name) for name in _PACKAGES}


def _commit() -> str | None:
    """Returns the checked-out commit, with `-dirty` after changes; None if it is unknown."""
    import subprocess
    from pathlib import Path

    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
        command.append("--exclude=*")  # the commit, not its distance from a tag
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None
