"""Where the program is."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator


def find_binary() -> str:
    """The path of the program ``corelane``.

    It is the one that ``CORELANE_BINARY`` names, else the one that was installed with this package (in an environment,
    for a user, or by ``pip install --target``), else the first on ``PATH``.

    :raises FileNotFoundError: there is none.
    """
    named = os.environ.get("CORELANE_BINARY")
    if named:
        if not os.access(named, os.X_OK):
            raise FileNotFoundError(f"CORELANE_BINARY is {named}, which is no program")
        return named
    for folder in _folders():
        path = os.path.join(folder, "corelane")
        if os.access(path, os.X_OK):
            return path
    found = shutil.which("corelane")
    if found is None:
        raise FileNotFoundError("the program corelane is not where this package was installed, nor on PATH")
    return found


def _folders() -> Iterator[str]:
    yield sysconfig.get_path("scripts")
    yield os.path.join(sys.prefix, "bin")
    scheme = getattr(sysconfig, "get_preferred_scheme", lambda _: "posix_user")("user")
    yield sysconfig.get_path("scripts", scheme=scheme)
    packages = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # pip install --target T: T/corelane and T/bin.
    yield os.path.join(packages, "bin")
    # pip install --prefix P: P/lib/pythonX.Y/site-packages and P/bin.
    yield os.path.join(packages, "..", "..", "..", "bin")
