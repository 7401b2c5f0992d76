"""What a forked worker would inherit of the program's `logging` and `warnings`: levels, filters, and who has handlers.

Promise: data only. The handlers themselves stay in the program; a worker's records go there, or to its standard error
in the program's format where the program can't be reached.
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

from rayloader.transport import by_value


class LoggerState(NamedTuple):
    """One logger of the program."""

    level: int
    propagate: bool
    disabled: bool
    filters: bool  # it has some
    handled_from: int | None  # the lowest level that one of its own handlers takes; None: it has no handler


class WarningFilter(NamedTuple):
    """A filter of `warnings`."""

    action: Any  # one of the literals of `warnings.filterwarnings`
    message: str  # regular expression
    category: str  # module and name: a worker may not have imported that module
    module: str  # regular expression
    line: int


@dataclass(frozen=True, slots=True)
class LoggingState:
    """Of the whole process."""

    loggers: dict[str, LoggerState]  # by name; "" is the root
    disabled_up_to: int  # `logging.disable`
    captures_warnings: bool  # `logging.captureWarnings`
    formatter: bytes  # of the root's handler, pickled; empty where it has none, or one that can't be pickled
    warning_filters: list[WarningFilter]
    level_names: dict[int, str]
    has_last_resort: bool
    logger_class: bytes  # pickled; empty where it can't be

    @classmethod
    def capture(cls) -> LoggingState:
        """Of this process."""
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
        """Has this process log as that one.

        Args:
            handler: makes what stands for the handlers that a logger has there, from its name and their lowest level.

        Returns:
            Puts the loggers back.
        """
        before = {logger: (_state_of(logger), list(logger.handlers), list(logger.filters)) for logger in _all_loggers()}
        disabled, last, levels = logging.root.manager.disable, logging.lastResort, _level_names()
        logger_class = logging.getLoggerClass()
        logging.disable(self.disabled_up_to)
        _name_levels(self.level_names)
        if not self.has_last_resort:
            logging.lastResort = None
        with contextlib.suppress(Exception):  # a class that can't be had here
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
        """Has this process filter warnings as that one; `warnings.catch_warnings` is to put its filters back."""
        warnings.resetwarnings()
        for action, message, category, module, line in self.warning_filters:
            warnings.filterwarnings(action, message, _category(category), module, line, append=True)
        logging.captureWarnings(self.captures_warnings)

    def settle(self, handler: Callable[[str, int], logging.Handler]) -> None:
        """The same for loggers, once more where modules have been imported that may have made handlers themselves."""
        for name, state in self.loggers.items():
            logger = logging.getLogger(name or None)
            # Filters of the program's are asked there, once.
            _set(logger, state, [] if state.handled_from is None else [handler(name, state.handled_from)], [])


class _ByName(type):
    """A class of classes whose subclasses are those that have a base of its name."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        return cls.__name__ in map(_name_of, subclass.__mro__)


@functools.cache
def _category(name: str) -> type[Warning]:
    """The category of warnings of this name, without importing its module."""
    module, _, own_name = name.rpartition(".")
    if module == "builtins":
        return getattr(builtins, own_name)  # type: ignore[no-any-return]
    category: Any = _ByName(name, (Warning,), {})
    return category  # type: ignore[no-any-return]


def _name_of(kind: type) -> str:
    """What a class is called in every process: one that travels by value loses where it stood."""
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
    if logger.level != state.level:  # it has all loggers forget what they are enabled for
        logger.setLevel(state.level)
    logger.propagate, logger.disabled = state.propagate, state.disabled
    logger.handlers[:] = handlers
    logger.filters[:] = filters


def _pickled_formatter() -> bytes:
    formatters = [handler.formatter for handler in logging.root.handlers if handler.formatter is not None]
    return _pickled(formatters[0]) if formatters else b""


def _pickled(thing: Any) -> bytes:
    """Nothing where it can't be pickled: classes of the user's may hold anything."""
    with contextlib.suppress(Exception):
        return by_value.dumps(thing)
    return b""


def _level_names() -> dict[int, str]:
    names = {level: logging.getLevelName(level) for level in range(1, 101)}  # there is no public list of all
    return {level: name for level, name in names.items() if name != f"Level {level}"}


def _name_levels(names: dict[int, str]) -> None:
    for level, name in names.items():
        logging.addLevelName(level, name)


def _regex(pattern: Any) -> str:
    """Of a message or module in a filter: a compiled expression, a text that must be met exactly, or None for all."""
    if pattern is None:
        return ""
    return str(pattern.pattern) if isinstance(pattern, re.Pattern) else rf"{re.escape(str(pattern))}\Z"
