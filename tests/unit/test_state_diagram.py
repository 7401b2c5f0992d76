"""The diagram in docs/architecture.md is the one that the table of transitions gives."""

import runpy
from pathlib import Path

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate_states.py"))


def test_the_page_holds_the_generated_diagram() -> None:
    in_page = GENERATOR["BLOCK"].findall(GENERATOR["PAGE"].read_text())
    assert in_page == [GENERATOR["diagram"]()], "run: python docs/generate_states.py --write"


def test_every_transition_is_drawn() -> None:
    arrows = [line for line in GENERATOR["diagram"]().splitlines() if "-->" in line]
    drawn = sum(len(arrow.split(": ")[1].split(", ")) for arrow in arrows if ": " in arrow)
    assert drawn == 1 + sum(len(events) for events in GENERATOR["TRANSITIONS"].values())
