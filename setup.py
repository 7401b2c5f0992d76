"""What pyproject.toml cannot say: the README as the page of a package index, where links to files lead nowhere."""

import re
from pathlib import Path

from setuptools import setup


def without_links_to_files(text: str) -> str:
    """Names the files that a text links to; links to the web stay."""

    def name(link: re.Match[str]) -> str:
        words, file = link[1], link[2].partition("#")[0]
        return words if file in ("", words) else f"{words} (`{file}`)"

    return re.sub(r"\[([^\]]+)\]\((?!\w+:)([^)\s]+)\)", name, text)


NOTE = "\n\nThe files that this page names are in the source distribution.\n"

if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=without_links_to_files(readme).rstrip() + NOTE,
        long_description_content_type="text/markdown",
    )
