"""Packages without one of their names, for whom a test shows them to."""

from __future__ import annotations

from typing import Any


class Changed:
    """An object in which an attribute, given as a path of names, is another one, or missing; others are set in it."""

    def __init__(self, whole: Any, path: str, *new: Any) -> None:
        name, _, rest = path.partition(".")
        object.__setattr__(self, "parts", (whole, name, rest, new))

    def __getattribute__(self, name: str) -> Any:
        whole, changed, rest, new = object.__getattribute__(self, "parts")
        if name != changed:
            return getattr(whole, name)
        if rest:
            return Changed(getattr(whole, name), rest, *new)
        if not new:
            raise AttributeError(f"module 'x' has no attribute '{name}'")
        return new[0]

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "parts")[0], name, value)


def ray_without(ray: Any, name: str) -> Any:
    """Ray without one of the names of `rayloader.actors._compat_ray`."""
    return Changed(ray, name)
