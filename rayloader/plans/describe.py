"""What a plan says of itself: a few lines, and one picture."""

from __future__ import annotations

from typing import NamedTuple

from rayloader.plans.inputs import Array

_BINS = 60


class Panel(NamedTuple):
    """A part of the picture: how often values come, or, with `steps`, how they go on.

    Attributes:
        title: of it.
        values: those of one line each, by its name.
        steps: at which the values are; None: they are counted.
    """

    title: str
    values: dict[str, Array]
    steps: Array | None = None


class Facts(NamedTuple):
    """What is told of a plan.

    Attributes:
        lines: by their headings.
        panels: of the picture.
    """

    lines: dict[str, str]
    panels: list[Panel]


def text_of(facts: Facts) -> str:
    """The lines, with their headings one below the other."""
    width = max(map(len, facts.lines))
    return "\n".join(f"{heading:<{width}}  {line}" for heading, line in facts.lines.items())


def write_picture(facts: Facts, path: str) -> None:
    """Writes the panels into a PNG file. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture of a plan needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(5 * len(facts.panels), 3.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(facts.panels), squeeze=False)[0], facts.panels, strict=True):
        axes.set_title(panel.title, fontsize="medium")
        for name, values in panel.values.items():
            if panel.steps is None:
                axes.hist(values, bins=_BINS, label=name, alpha=0.8, log=True)  # for the few that are far off
                axes.set_ylabel("how many")
            else:
                axes.plot(panel.steps, values, label=name)
                axes.set_xlabel("samples")
        if len(panel.values) > 1:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")
