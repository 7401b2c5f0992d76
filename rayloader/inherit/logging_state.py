"""What a forked worker would inherit of the program's `logging` and `warnings`: levels, filters, and handlers' levels.

Promise: data only. The handlers themselves stay in the program; a worker's records go there, or to its standard error
in the program's format if the program can't be reached.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rayloader.transport.pickler import dumps_by_value


class LoggerState(NamedTuple):
    """One logger of the program."""

    level: int
    propagate: bool
    disabled: bool
    filters: bool  # whether it has any
    handled_from: int | None  # the lowest level that its own handlers accept; None: it has no handler


class WarningFilter(NamedTuple):
    """A filter of `warnings`."""

    action: Any  # one of the literals of `warnings.filterwarnings`
    message: str  # regular expression
    category: str  # module and name: a worker may not have imported that module
    module: str  # regular expression
    line: int


@dataclass(frozen=True, slots=True)
class LoggingState:
    """The state of the whole process."""

    loggers: dict[str, LoggerState]  # by name; "" is the root
    disabled_up_to: int  # `logging.disable`
    captures_warnings: bool  # `logging.captureWarnings`
    formatter: bytes  # of the root's handler, pickled; empty if it has none, or one that can't be pickled
    warning_filters: list[WarningFilter]
    level_names: dict[int, str]
    has_last_resort: bool
    logger_class: bytes  # pickled; empty if it can't be

    @classmethod
    def capture(cls) -> LoggingState:
        """The state of this process."""
        named = list(logging.root.manager.loggerDict.items())
        loggers = {name: _state_of(logger) for name, logger in named if isinstance(logger, logging.Logger)}
        return cls(
            loggers={"": _state_of(logging.root), **{n: s for n, s in loggers.items() if s != _UNTOUCHED}},
            disabled_up_to=logging.root.manager.disable,
            captures_warnings=warnings.showwarning.__module__ == "logging",
            formatter=_pickled_formatter(),
            warning_filters=[
                WarningFilter(action, _regex(message), _name_of(category), _regex(module), line)
                for action, message, categories, module, line in warnings.filters
                for category in (categories if isinstance(categories, tuple) else [categories])
            ],
            level_names=_level_names(),
            has_last_resort=logging.lastResort is not None,
            logger_class=_pickled(logging.getLoggerClass()),
        )

    def adopt(self, handler: Callable[[str, int], logging.Handler]) -> Callable[[], None]:
        """Makes this process log as the captured one.

        Args:
            handler: creates the replacement of a logger's handlers there, from its name and their lowest level.

        Returns:
            A function that restores the loggers.
        """
        before = {logger: (_state_of(logger), list(logger.handlers), list(logger.filters)) for logger in _all_loggers()}
        disabled, last, levels = logging.root.manager.disable, logging.lastResort, _level_names()
        logger_class = logging.getLoggerClass()
        logging.disable(self.disabled_up_to)
        _name_levels(self.level_names)
        if not self.has_last_resort:
            logging.lastResort = None
        with contextlib.suppress(Exception):  # a class that is not available here
            logging.setLoggerClass(pickle.loads(self.logger_class))
        self.settle(handler)

        def restore() -> None:
            logging.captureWarnings(False)
            logging.disable(disabled)
            logging.setLoggerClass(logger_class)
            logging.lastResort = last
            _name_levels(levels)
            for logger in _all_loggers():
                _set(logger, *before.get(logger, (_UNTOUCHED, [], [])))

        return restore

    def filter_warnings(self) -> None:
        """Makes this process filter warnings as the captured one; call it within `warnings.catch_warnings`."""
        warnings.resetwarnings()
        for action, message, category, module, line in self.warning_filters:
            warnings.filterwarnings(action, message, _category(category), module, line, append=True)
        logging.captureWarnings(self.captures_warnings)

    def settle(self, handler: Callable[[str, int], logging.Handler]) -> None:
        """Repeats `adopt` for loggers, after modules have been imported that may have created handlers themselves."""
        for name, state in self.loggers.items():
            logger = logging.getLogger(name or None)
            # The program's own filters are applied there, once.
            _set(logger, state, [] if state.handled_from is None else [handler(name, state.handled_from)], [])


class _ByName(type):
    """A metaclass: subclasses of its classes are all classes with a base of the same name."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        return cls.__name__ in map(_name_of, subclass.__mro__)


@functools.cache
def _category(name: str) -> type[Warning]:
    """A category of warnings with this name, without importing its module."""
    module, _, own_name = name.rpartition(".")
    if module == "builtins":
        return getattr(builtins, own_name)  # type: ignore[no-any-return]
    category: Any = _ByName(name, (Warning,), {})
    return category  # type: ignore[no-any-return]


def _name_of(kind: type) -> str:
    """The name of a class, the same in every process: a class pickled by value loses its qualified name."""
    by_value = kind.__module__ == "__main__" or "<locals>" in kind.__qualname__
    return f"{kind.__module__}.{kind.__name__ if by_value else kind.__qualname__}"


_UNTOUCHED = LoggerState(logging.NOTSET, True, False, False, None)


def _all_loggers() -> list[logging.Logger]:
    named = list(logging.root.manager.loggerDict.values())
    return [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]


def _state_of(logger: logging.Logger) -> LoggerState:
    levels = [handler.level for handler in logger.handlers]
    return LoggerState(logger.level, logger.propagate, logger.disabled, bool(logger.filters), min(levels, default=None))


def _set(logger: logging.Logger, state: LoggerState, handlers: list[logging.Handler], filters: list[Any]) -> None:
    if logger.level != state.level:  # setting it clears the cached levels of all loggers
        logger.setLevel(state.level)
    logger.propagate, logger.disabled = state.propagate, state.disabled
    logger.handlers[:] = handlers
    logger.filters[:] = filters


def _pickled_formatter() -> bytes:
    formatters = [handler.formatter for handler in logging.root.handlers if handler.formatter is not None]
    return _pickled(formatters[0]) if formatters else b""


def _pickled(thing: Any) -> bytes:
    """Empty if it can't be pickled: classes of the user's may hold anything."""
    with contextlib.suppress(Exception):
        return dumps_by_value(thing)
    return b""


def _level_names() -> dict[int, str]:
    names = {level: logging.getLevelName(level) for level in range(1, 101)}  # there is no public list of them
    return {level: name for level, name in names.items() if name != f"Level {level}"}


def _name_levels(names: dict[int, str]) -> None:
    for level, name in names.items():
        logging.addLevelName(level, name)


def _regex(pattern: Any) -> str:
    """The pattern of a filter's message or module: a compiled expression, an exact text, or None for all."""
    if pattern is None:
        return ""
    return str(pattern.pattern) if isinstance(pattern, re.Pattern) else rf"{re.escape(str(pattern))}\Z"
