"""Exceptions on their way from a worker: as torch raises them again, and where torch loses them, still there."""

import asyncio
import json
import pickle
import traceback

import pytest
from torch._utils import ExceptionWrapper

from rayloader.protocol import Caught

WHERE = "in DataLoader worker process 1"


class Plain(Exception):
    pass


class TwoArguments(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


class ByMessage(Exception):
    message = "said"

    def __init__(self, message):
        super().__init__(message)


class OtherKind(Exception):
    def __new__(cls, text):
        return super().__new__(cls, text) if "\n" not in text else ValueError(text)


class MessageProperty(Exception):
    def __init__(self, text, code=0):
        super().__init__(text)
        self.text = text

    @property
    def message(self):
        return self.text


class MessageOfTwo(Exception):
    message = "said"

    def __init__(self, code, reason):
        super().__init__(code, reason)


class OtherMessage(Exception):
    message = "bad record"

    def __init__(self, path):
        super().__init__(f"{self.message}: {path}")


class PickyMessage(Exception):
    message = "said"

    def __init__(self, message):
        if "\n" in message:
            raise LookupError("one line only")
        super().__init__(message)


class Silent(Exception):
    """Has another text than it is made of."""

    def __init__(self, text):
        super().__init__("no text")


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")


class Slotted(Exception):
    __slots__ = ("text",)

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return "no text"


class NoNotes(Exception):
    """Cannot have a note, nor show its text."""

    __dict__ = property(lambda self: {})

    def __str__(self):
        return "no text"

    @property
    def __notes__(self):
        return ()


class Hostile(Exception):
    """Python's own way to write a traceback fails with it."""

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
        return super().__new__(cls, "odd", [Plain(code)])


def several():
    return ExceptionGroup(
        "several", [ValueError("one"), ExceptionGroup("inner", [MessageProperty("two"), KeyError(3)])]
    )


def failing_group():
    async def fail():
        raise Plain("in a task")

    async def run():
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    asyncio.run(run())


def caught(make, kind=Caught):
    """The exception as one side of a loader has it, by way of a pickle."""
    try:
        raise_here(make)
    except Exception as error:
        if kind is ExceptionWrapper:
            return ExceptionWrapper(where=WHERE)
        return pickle.loads(pickle.dumps(Caught(error, WHERE)))


def raise_here(make):
    raise make()


def raised(wrapper):
    try:
        wrapper.reraise()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


TORCH_CAN = [
    lambda: Plain("a reason"),
    lambda: Plain("a reason\nin two lines"),
    lambda: KeyError("missing"),
    lambda: OSError(2, "no file", "name"),
    lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "a reason"),
    lambda: json.JSONDecodeError("unexpected", "text", 1),
    lambda: SyntaxError("bad", ("file", 1, 2, "text")),
    lambda: StopIteration("enough"),
    lambda: TwoArguments(7, "no such thing"),
    lambda: ByMessage("said"),
    lambda: OtherKind("said"),
]


@pytest.mark.parametrize("make", TORCH_CAN)
def test_where_torch_can_the_exception_is_torchs(make):
    ours, torchs = raised(caught(make)), raised(caught(make, ExceptionWrapper))
    assert (type(ours), ours.args, str(ours), repr(ours)) == (type(torchs), torchs.args, str(torchs), repr(torchs))
    assert vars(ours) == vars(torchs)
    assert ours.__cause__ is None


LOST = {
    MessageProperty: lambda: MessageProperty("a reason", 5),
    OtherMessage: lambda: OtherMessage("a reason"),
    Silent: lambda: Silent("a reason"),
    Unspeakable: lambda: Unspeakable("a reason"),
    Slotted: lambda: Slotted("a reason"),
}
UNBUILT = [
    lambda: MessageOfTwo("a reason", 5),
    lambda: PickyMessage("a reason"),
    lambda: NoNotes("a reason"),
    lambda: Hostile("a reason"),
]


def check_shown(error, make):
    """The worker's text and frames are in what Python prints of it."""
    shown = "".join(traceback.format_exception(error))
    assert f"Caught {type(make()).__name__} {WHERE}.\nOriginal Traceback (most recent call last):\n" in shown
    assert "raise make()" in shown
    assert error.__context__ is None or error.__suppress_context__


@pytest.mark.parametrize("kind", LOST)
def test_an_exception_that_torch_would_lose_keeps_its_type_where_that_can_be_made_of_a_string(kind):
    error = raised(caught(LOST[kind]))
    assert type(error) is kind
    check_shown(error, LOST[kind])


@pytest.mark.parametrize("make", UNBUILT)
def test_an_exception_that_cannot_be_made_again_is_a_runtime_error(make):
    error = raised(caught(make))
    assert isinstance(error, (RuntimeError, Hostile))
    check_shown(error, make)


def test_a_group_arrives_as_a_group_with_the_types_of_its_parts():
    error = raised(caught(several))
    assert type(error) is ExceptionGroup
    assert error.message == "several"
    one, inner = error.exceptions
    assert type(one) is ValueError
    assert str(one).startswith(f"Caught ValueError {WHERE}.\nOriginal ValueError: one")
    assert (type(inner), inner.message) == (ExceptionGroup, "inner")
    assert [type(part) for part in inner.exceptions] == [MessageProperty, KeyError]
    (note,) = error.__notes__
    assert note.startswith(f"Caught ExceptionGroup {WHERE}.\nOriginal   + Exception Group Traceback")
    assert "raise make()" in note


@pytest.mark.parametrize(
    ("make", "kind", "parts"),
    [
        (lambda: OwnGroup("own", [Plain("one")]), OwnGroup, [Plain]),
        (lambda: OddGroup("one"), ExceptionGroup, [Plain]),
        (failing_group, ExceptionGroup, [Plain]),
    ],
)
def test_any_kind_of_group_is_a_group(make, kind, parts):
    error = raised(caught(make))
    assert type(error) is kind
    assert [type(part) for part in error.exceptions] == parts
    assert "a task" in str(error.exceptions[0]) or "one" in str(error.exceptions[0])


def test_of_types_that_cannot_be_sent_the_text_arrives():
    def refuse(kind):
        if kind is not ValueError:
            raise TypeError("never")

    wrapper = Caught(several(), WHERE)
    wrapper.drop_types(refuse)
    error = raised(pickle.loads(pickle.dumps(wrapper)))
    one, inner = error.exceptions
    assert [type(part) for part in (error, one, inner, *inner.exceptions)] == [
        *(ExceptionGroup, ValueError, ExceptionGroup),
        *(RuntimeError, RuntimeError),
    ]
    assert "Caught MessageProperty" in str(inner.exceptions[0])


def test_an_interrupt_while_it_is_made_again_passes():
    class Interrupted(Exception):
        def __init__(self, text):
            raise KeyboardInterrupt

    wrapper = Caught(Plain("a reason"), WHERE)
    wrapper.exc_type = Interrupted
    with pytest.raises(KeyboardInterrupt):
        wrapper.made_again()
