"""What errors and lines of the log say of a cause."""

import traceback

import pytest

from rayloader.epoch.reports import briefly


def of_a_traceback(error, cause=None):
    try:
        raise error from cause
    except BaseException as raised:
        return "".join(traceback.format_exception(raised))


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("it was killed by SIGKILL", "it was killed by SIGKILL"),
        (of_a_traceback(SystemExit(3)), "SystemExit: 3"),
        (of_a_traceback(BaseExceptionGroup("parts", [GeneratorExit()])), "BaseExceptionGroup: parts (1 sub-exception)"),
        (
            of_a_traceback(BaseExceptionGroup("all", [ExceptionGroup("some", [ValueError(1)]), KeyboardInterrupt()])),
            "BaseExceptionGroup: all (2 sub-exceptions)",
        ),
        (of_a_traceback(SystemExit(3), ExceptionGroup("parts", [ValueError(1)])), "SystemExit: 3"),
    ],
)
def test_a_cause_is_told_in_one_line(cause, said):
    assert briefly(cause) == said
