"""The folders in which a command looks for modules; importing this loads nothing else."""

import os
import sys


def leave_out_current_folder() -> None:
    """Takes the current directory off the search path of this process and of its children.

    Files of a stranger may lie there. The folder stays if the package itself lies in it, as in a
    clone, or if PYTHONPATH names it; an empty entry of PYTHONPATH is no name.
    """
    os.environ["PYTHONSAFEPATH"] = "1"  # for `python -c` and `python -m` of children
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    kept = {os.path.realpath(path) for path in (package, *named) if path}
    try:
        current = os.getcwd()
    except OSError:  # it was deleted
        current = ""
    sys.path[:] = [
        path
        for path in sys.path
        if path not in ("", current) or os.path.realpath(path or ".") in kept
    ]
