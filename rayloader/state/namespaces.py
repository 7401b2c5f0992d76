"""What is bound in modules.

Promise: no code of the user's runs.
"""

from __future__ import annotations

import types
from typing import Any

_DICT = vars(types.ModuleType)["__dict__"]


def namespace_of(module: Any) -> dict[str, Any]:
    """A module's globals; none where `sys.modules` holds something else.

    By the slot of `ModuleType`: to ask a lazy module for an attribute imports it, and subclasses may define `__dict__`.
    """
    namespace = _DICT.__get__(module) if issubclass(type(module), types.ModuleType) else None
    return namespace if isinstance(namespace, dict) else {}
