"""Draws the states of a task from `TRANSITIONS` in rayloader/driver/messages.py, as a Mermaid diagram.

    python docs/generate_states.py            # print the diagram
    python docs/generate_states.py --write    # put it into docs/architecture.md

tests/unit/test_state_diagram.py holds the page to the table.
"""

import re
import sys
from pathlib import Path

from rayloader.driver.messages import (
    TRANSITIONS,
    TaskState,
)

PAGE = Path(__file__).with_name("architecture.md")
BLOCK = re.compile(r"```mermaid\nstateDiagram-v2\n.*?```", re.DOTALL)


def diagram() -> str:
    """The fenced diagram: an arrow from state to state, labelled with the events that lead along it."""
    lines = ["stateDiagram-v2", f"    [*] --> {TaskState.QUEUED.name}: IndicesDrawn"]
    for before, transitions in TRANSITIONS.items():
        labels: dict[TaskState, list[str]] = {}
        for event, after in transitions.items():
            labels.setdefault(after, []).append(event.__name__)
        lines += [f"    {before.name} --> {after.name}: {', '.join(events)}" for after, events in labels.items()]
        if not transitions:
            lines.append(f"    {before.name} --> [*]")
    return "\n".join(["```mermaid", *lines, "```"])


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(BLOCK.sub(diagram(), PAGE.read_text(), count=1))
    else:
        print(diagram())
