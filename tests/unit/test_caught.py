"""What users are shown of errors: exceptions that torch's loader would lose arrive, causes and tracebacks are brief.

Exceptions that torch's loader can send: tests/conformance.
"""

import functools
import pickle
import signal
import traceback

import pytest

import rayloader
from rayloader.actors import pool
from rayloader.epoch.reports import briefly
from rayloader.protocol import Caught

WHERE = "in DataLoader worker process 1"


class MessageProperty(Exception):
    def __init__(self, text, code=0):
        super().__init__(text)
        self.text = text

    @property
    def message(self):
        return self.text


class Told(Exception):
    message = "said"

    def __init__(self, text):
        super().__init__(f"{self.message}: {text}")


class Slotted(Exception):
    __slots__ = ("text",)

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return "no text"


class OfTwo(Exception):
    message = "said"

    def __init__(self, code, reason=""):
        if not reason:
            raise LookupError("of two")
        super().__init__(code, reason)


class Hostile(Exception):
    """Cannot have a note; Python's own way to write a traceback fails with it."""

    __dict__ = property(lambda self: {})

    def __getattribute__(self, name):
        if name in ("__notes__", "__cause__"):
            raise ValueError(name)
        return super().__getattribute__(name)


class OwnGroup(ExceptionGroup):
    def derive(self, parts):
        return OwnGroup(self.message, parts)


class OddGroup(ExceptionGroup):
    """Is made in another way, and has another `message`."""

    message = 7

    def __new__(cls, code):
        return super().__new__(cls, "odd", [KeyError(code)])


def several(_=""):
    return ExceptionGroup(
        "several", [ValueError("one"), ExceptionGroup("inner", [MessageProperty("two"), KeyError(3)])]
    )


def caught(make):
    """The exception as the user's side of a loader has it, by way of a pickle."""
    try:
        raise make("a reason")
    except Exception as error:
        return pickle.loads(pickle.dumps(Caught(error, WHERE)))


def raised(wrapper):
    try:
        wrapper.reraise()
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("make", "arrives_as"),
    [
        *((kind, kind) for kind in (MessageProperty, Told, Slotted)),
        (lambda text: OfTwo(text, 5), RuntimeError),
        (Hostile, RuntimeError),
    ],
)
def test_an_exception_that_torch_would_lose_keeps_text_and_frames_and_its_type_where_a_string_makes_it(
    make, arrives_as
):
    error = raised(caught(make))
    assert type(error) is arrives_as
    shown = "".join(traceback.format_exception(error))
    name = type(make("a reason")).__name__
    assert f"Caught {name} {WHERE}.\nOriginal Traceback (most recent call last):\n" in shown
    assert 'raise make("a reason")' in shown
    assert error.__context__ is None or error.__suppress_context__


def test_a_group_arrives_as_a_group_with_the_types_of_its_parts():
    error = raised(caught(several))
    assert (type(error), error.message) == (ExceptionGroup, "several")
    one, inner = error.exceptions
    assert type(one) is ValueError
    assert str(one).startswith(f"Caught ValueError {WHERE}.\nOriginal ValueError: one")
    assert (type(inner), inner.message) == (ExceptionGroup, "inner")
    assert [type(part) for part in inner.exceptions] == [MessageProperty, KeyError]
    (note,) = error.__notes__
    assert note.startswith(f"Caught ExceptionGroup {WHERE}.\nOriginal   + Exception Group Traceback")
    assert 'raise make("a reason")' in note


@pytest.mark.parametrize(
    ("make", "kind"), [(lambda text: OwnGroup("own", [KeyError(text)]), OwnGroup), (OddGroup, ExceptionGroup)]
)
def test_any_kind_of_group_is_a_group(make, kind):
    error = raised(caught(make))
    assert type(error) is kind
    assert [type(part) for part in error.exceptions] == [KeyError]
    assert "a reason" in str(error.exceptions[0])


def test_of_types_that_cannot_be_sent_the_text_arrives():
    def refuse(kind):
        if kind is not ValueError:
            raise TypeError("never")

    wrapper = Caught(several(), WHERE)
    wrapper.drop_types(refuse)
    error = raised(pickle.loads(pickle.dumps(wrapper)))
    one, inner = error.exceptions
    kinds = [type(part) for part in (error, one, inner, *inner.exceptions)]
    assert kinds == [ExceptionGroup, ValueError, ExceptionGroup, RuntimeError, RuntimeError]
    assert "Caught MessageProperty" in str(inner.exceptions[0])


def test_an_interrupt_while_it_is_made_again_passes():
    class Interrupted(Exception):
        def __init__(self, text):
            raise KeyboardInterrupt

    wrapper = Caught(KeyError("a reason"), WHERE)
    wrapper.exc_type = Interrupted
    with pytest.raises(KeyboardInterrupt):
        wrapper.made_again()


# ---- causes and tracebacks


def of_a_traceback(error, cause=None):
    try:
        raise error from cause
    except BaseException as raised:
        return "".join(traceback.format_exception(raised))


GROUP = BaseExceptionGroup("all", [ExceptionGroup("some", [ValueError(1)]), KeyboardInterrupt()])


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("it was killed by SIGKILL", "it was killed by SIGKILL"),
        (of_a_traceback(GROUP), "BaseExceptionGroup: all (2 sub-exceptions)"),
        (of_a_traceback(SystemExit(3), ExceptionGroup("parts", [ValueError(1)])), "SystemExit: 3"),
    ],
)
def test_a_cause_is_told_in_one_line(cause, said):
    assert briefly(cause) == said


@pytest.mark.parametrize(
    ("fails", "kind", "last"),
    [
        (functools.partial(signal.default_int_handler, signal.SIGINT), KeyboardInterrupt, "loader.py"),
        (int, ValueError, "pool.py"),
    ],
)
def test_a_traceback_has_all_lines_of_an_error_in_this_package_and_one_of_an_interrupt(monkeypatch, fails, kind, last):
    """What fails is written in C, so that it is in no line itself."""
    monkeypatch.setattr(pool.session, "ensure", lambda *_: "no number")
    monkeypatch.setattr(pool, "Pool", fails)
    with pytest.raises(kind) as caught:
        iter(rayloader.DataLoader([1, 2], num_workers=1, workers="ray"))
    files = [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files[-1] == last
    assert len(files) > 3 if last == "pool.py" else files == ["test_caught.py", "loader.py"]
