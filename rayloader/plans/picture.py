"""The picture of a plan: panels, one below the other, in a PNG file, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

Array = npt.NDArray[Any]

_BINS = 60
_WIDTH, _HEIGHT, _DPI = 8, 2.8, 100  # inches of a panel: the picture is 800 pixels wide


class Panel(NamedTuple):
    """A part of the picture: how often values come, or, with `steps`, how they go on.

    Attributes:
        title: of it.
        across: what is on the horizontal axis, in words.
        up: what is on the vertical axis.
        values: those of one line each, by its name.
        steps: at which the values are; None: they are counted.
        targets: what the values of each line should be.
    """

    title: str
    across: str
    up: str
    values: dict[str, Array]
    steps: Array | None = None
    targets: Sequence[Array] = ()


def write_picture(panels: Sequence[Panel], path: str) -> None:
    """Writes the panels into a PNG file. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture of a plan needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        axes.set_title(panel.title)
        axes.set_xlabel(panel.across)
        axes.set_ylabel(panel.up)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
        if panel.steps is None:
            names, values = [*panel.values], [*panel.values.values()]
            axes.hist(values, bins=_BINS, label=names, histtype="stepfilled", alpha=0.7)
        for name, line in panel.values.items() if panel.steps is not None else ():
            axes.plot(panel.steps, line, label=name)
        for number, target in enumerate(panel.targets):
            axes.plot(panel.steps, target, "k:", linewidth=1, label=None if number else "target")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        if len(panel.values) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=_DPI, format="png")
