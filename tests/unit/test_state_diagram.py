"""The picture in docs/architecture.md is the one that the table of transitions gives."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATOR = runpy.run_path(str(ROOT / "docs" / "generate_states.py"))


def test_the_picture_is_the_generated_one_and_the_page_shows_it() -> None:
    assert GENERATOR["PICTURE"].read_text() == GENERATOR["picture"](), "run: python docs/generate_states.py --write"
    assert "](static/states.svg)" in (ROOT / "docs" / "architecture.md").read_text()


def test_every_state_and_transition_is_drawn() -> None:
    texts = re.findall(r"<text [^>]*>([^<]+)</text>", GENERATOR["picture"]())
    drawn = sorted(name for text in texts for name in text.split(", "))
    states = [state.name for state in GENERATOR["TaskState"]]
    events = [event.__name__ for events in GENERATOR["TRANSITIONS"].values() for event in events]
    assert drawn == sorted([*states, *events, "IndicesDrawn"])
