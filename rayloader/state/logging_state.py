"""What a forked worker would inherit of the program's `logging` and `warnings`: levels, filters, and who has handlers.

Promise: data only. The handlers themselves stay in the program; a worker's records go there, or to its standard error
in the program's format where the program can't be reached.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle


class LoggerState(NamedTuple):
    """One logger of the program."""

    level: int
    propagate: bool
    disabled: bool
    handled_from: int | None  # the lowest level that one of its own handlers takes; None: it has no handler


class WarningFilter(NamedTuple):
    """A filter of `warnings`."""

    action: Any  # one of the literals of `warnings.filterwarnings`
    message: str  # regular expression
    category: bytes  # pickled: a class of the user's may be unknown elsewhere
    module: str  # regular expression
    line: int

    @classmethod
    def of(cls, action: str, message: Any, category: Any, module: Any, line: int) -> WarningFilter:
        """What stands in `warnings.filters`."""
        return cls(action, _regex(message), cloudpickle.dumps(category), _regex(module), line)


@dataclass(frozen=True, slots=True)
class LoggingState:
    """Of the whole process."""

    loggers: dict[str, LoggerState]  # by name; "" is the root
    disabled_up_to: int  # `logging.disable`
    captures_warnings: bool  # `logging.captureWarnings`
    formatter: bytes  # of the root's handler, pickled; empty where it has none, or one that can't be pickled
    warning_filters: list[WarningFilter]

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
            warning_filters=[WarningFilter.of(*known) for known in warnings.filters],
        )

    def adopt(self, handler: Callable[[str, int], logging.Handler]) -> Callable[[], None]:
        """Has this process log as that one.

        Args:
            handler: makes what stands for the handlers that a logger has there, from its name and their lowest level.

        Returns:
            Puts the loggers back.
        """
        before = {logger: (_state_of(logger), list(logger.handlers)) for logger in _all_loggers()}
        disabled = logging.root.manager.disable
        logging.disable(self.disabled_up_to)
        self.settle(handler)

        def restore() -> None:
            logging.disable(disabled)
            for logger in _all_loggers():
                _set(logger, *before.get(logger, (_UNTOUCHED, [])))

        return restore

    @contextlib.contextmanager
    def filtering_warnings(self) -> Iterator[None]:
        """Has this process filter warnings as that one."""
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for action, message, category, module, line in self.warning_filters:
                with contextlib.suppress(Exception):  # a module of the user's that can't be imported here
                    warnings.filterwarnings(action, message, pickle.loads(category), module, line, append=True)
            logging.captureWarnings(self.captures_warnings)
            try:
                yield
            finally:
                logging.captureWarnings(False)

    def settle(self, handler: Callable[[str, int], logging.Handler]) -> None:
        """The same for loggers, once more where modules have been imported that may have made handlers themselves."""
        for name, state in self.loggers.items():
            logger = logging.getLogger(name or None)
            _set(logger, state, [] if state.handled_from is None else [handler(name, state.handled_from)])


_UNTOUCHED = LoggerState(logging.NOTSET, True, False, None)


def _all_loggers() -> list[logging.Logger]:
    named = list(logging.root.manager.loggerDict.values())
    return [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]


def _state_of(logger: logging.Logger) -> LoggerState:
    levels = [handler.level for handler in logger.handlers]
    return LoggerState(logger.level, logger.propagate, logger.disabled, min(levels, default=None))


def _set(logger: logging.Logger, state: LoggerState, handlers: list[logging.Handler]) -> None:
    logger.setLevel(state.level)
    logger.propagate, logger.disabled = state.propagate, state.disabled
    logger.handlers[:] = handlers


def _pickled_formatter() -> bytes:
    for handler in logging.root.handlers:
        if handler.formatter is not None:
            with contextlib.suppress(Exception):  # a class of the user's may raise anything
                return pickle.dumps(handler.formatter)
    return b""


def _regex(pattern: Any) -> str:
    """Of a message or module in a filter: a compiled expression, a text that must be met exactly, or None for all."""
    if pattern is None:
        return ""
    return str(pattern.pattern) if isinstance(pattern, re.Pattern) else rf"{re.escape(str(pattern))}\Z"
