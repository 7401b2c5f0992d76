"""What a plan says of itself: a few lines, and one picture."""

from __future__ import annotations

from typing import Any, NamedTuple

from rayloader.plans.inputs import Array

_BINS = 60
_NAMED = 8  # lines of a panel that are told apart; the others are gray
_WIDTH, _HEIGHT, _DPI = 8, 2.8, 100  # inches of a panel, one below the other: the picture is 800 pixels wide


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
    targets: dict[str, Array] | None = None


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
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(facts.panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(facts.panels), squeeze=False)[:, 0], facts.panels, strict=True):
        axes.set_title(panel.title)
        axes.set_xlabel(panel.across)
        axes.set_ylabel(panel.up)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
        if panel.steps is None:
            _draw_counts(axes, panel)
        else:
            _draw_lines(axes, panel)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        if len(panel.values) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=_DPI, format="png")


def _draw_counts(axes: Any, panel: Panel) -> None:
    most = max(values.max() for values in panel.values.values())
    for name, values in panel.values.items():
        axes.hist(values, bins=_BINS, range=(0, most or 1), label=name, alpha=0.7)


def _draw_lines(axes: Any, panel: Panel) -> None:
    for number, (name, values) in enumerate(panel.values.items()):
        color = f"C{number}" if number < _NAMED else "lightgray"
        label = name if number < _NAMED else "others" if number == _NAMED else None
        axes.plot(panel.steps, values, color=color, label=label)
        if panel.targets is not None and number < _NAMED:
            axes.plot(panel.steps, panel.targets[name], color="black", linestyle=":", linewidth=1, zorder=3)
    if panel.targets is not None:
        axes.plot([], [], color="black", linestyle=":", linewidth=1, label="target")
