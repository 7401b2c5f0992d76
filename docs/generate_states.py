"""Draws the states of a task from `TRANSITIONS` in rayloader/epoch/messages.py, as a picture for docs/architecture.md.

    python docs/generate_states.py            # print the SVG
    python docs/generate_states.py --write    # put it into docs/static/states.svg

tests/unit/test_state_diagram.py holds the picture to the table. Where the states stand, and how the arrows run between
them, is written down here; an arrow that is new in the table has to be given its way. All arrows to GONE, a bar on the
right, are alike.
"""

import sys
from pathlib import Path

from rayloader.epoch.messages import TRANSITIONS, TaskState

PICTURE = Path(__file__).parent / "static" / "states.svg"

# Pixels. The height of a line of text is FONT, and a box is HIGH.
WIDTH, HEIGHT, FONT, HIGH = 600, 330, 13, 30
# Left edge, top and width of each state's box; GONE is a bar.
BOXES = {
    TaskState.QUEUED: (20, 40, 124),
    TaskState.OUTSTANDING: (20, 105, 124),
    TaskState.LOST: (210, 165, 84),
    TaskState.READY: (20, 225, 124),
    TaskState.DELIVERED: (20, 285, 124),
    TaskState.GONE: (490, 40, 90),
}
BAR_HIGH = 275
# The way of each other arrow, and where its label begins.
WAYS = {
    (TaskState.QUEUED, TaskState.OUTSTANDING): ("M60,70 V103", (68, 92)),
    (TaskState.OUTSTANDING, TaskState.READY): ("M60,135 V223", (68, 208)),
    (TaskState.OUTSTANDING, TaskState.LOST): ("M110,135 V180 H208", (118, 175)),
    (TaskState.LOST, TaskState.OUTSTANDING): ("M250,165 V128 H146", (258, 152)),
    (TaskState.READY, TaskState.DELIVERED): ("M60,255 V283", (68, 273)),
}
# Of the arrows to GONE, below the middle of the box that they leave, for another arrow comes in there.
HIGHER = {TaskState.OUTSTANDING: -7}

HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"
     font-size="{FONT}" role="img" aria-label="The states of a task">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path
  d="M0,0 L8,4 L0,8 z" fill="#333"/></marker></defs>
<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>"""


def labels_of(before: TaskState) -> dict[TaskState, str]:
    """The events that lead from a state to each other one."""
    found: dict[TaskState, list[str]] = {}
    for event, after in TRANSITIONS[before].items():
        found.setdefault(after, []).append(event.__name__)
    return {after: ", ".join(events) for after, events in found.items()}


def box(state: TaskState) -> str:
    """A state with its name."""
    left, top, width = BOXES[state]
    high = BAR_HIGH if state is TaskState.GONE else HIGH
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{high}" rx="6" fill="#eef3fb" stroke="#47689c"/>\n'
        f'<text x="{left + width // 2}" y="{top + high // 2 + 5}" text-anchor="middle" fill="#111">{state.name}</text>'
    )


def arrow(way: str, label: str, at: tuple[int, int]) -> str:
    """An arrow, and what leads along it."""
    return (
        f'<path d="{way}" fill="none" stroke="#333" marker-end="url(#tip)"/>\n'
        f'<text x="{at[0]}" y="{at[1]}" fill="#333">{label}</text>'
    )


def way_of(before: TaskState, after: TaskState) -> tuple[str, tuple[int, int]]:
    """How an arrow runs, and where its label begins."""
    if after is not TaskState.GONE:
        return WAYS[before, after]
    left, top, width = BOXES[before]
    start, level = left + width, top + HIGH // 2 + HIGHER.get(before, 0)
    return f"M{start},{level} H{BOXES[after][0] - 2}", (start + 8, level - 5)


def picture() -> str:
    """The whole SVG."""
    parts = [HEAD, '<circle cx="60" cy="12" r="5" fill="#333"/>']
    parts.append(arrow("M60,17 V38", "IndicesDrawn", (72, 30)))
    parts += [box(state) for state in TaskState]
    for before in TRANSITIONS:
        parts += [
            arrow(way_of(before, after)[0], label, way_of(before, after)[1])
            for after, label in labels_of(before).items()
        ]
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PICTURE.write_text(picture())
    else:
        print(picture())
