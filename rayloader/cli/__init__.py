"""The command line: `rayloader doctor`, `bench`, `show` and `replay`, or `python -m rayloader`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def main() -> None:
    """The command `rayloader`."""
    try:
        app = application()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the command line needs the package {error.name}; run: pip install 'rayloader[cli]'")
    app()


def application() -> typer.Typer:
    """All commands."""
    import typer

    from rayloader.cli import bench, doctor, given, states

    app = typer.Typer(
        name="rayloader",
        help="Look whether rayloader works here, how many workers a loader needs, and what a run has saved.",
        add_completion=False,
        no_args_is_help=True,
    )
    app.callback()(given.before_each)
    for command in (doctor.doctor, bench.bench, states.show, states.replay):
        app.command()(command)
    return app
