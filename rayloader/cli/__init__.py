"""The command line: `rayloader doctor`, `bench`, `show` and `replay`, or `python -m rayloader`."""

from __future__ import annotations

import sys


def main() -> None:
    """The command `rayloader`."""
    try:
        from rayloader.cli.commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the command line needs the package {error.name}; run: pip install 'rayloader[cli]'")
    app()
