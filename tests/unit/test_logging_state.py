"""What a worker takes over of the program's `warnings`, without importing what the program has imported."""

import sys
import warnings

import pytest

from rayloader.inherit.logging_state import LoggingState


def a_category(name="Late", bases=(UserWarning,)):
    """A class of a module that nobody can import."""
    return type(name, bases, {"__module__": "a_module_that_is_not_there"})


def adopted(*filters):
    """What these filters are in a worker; to be called where warnings are caught."""
    warnings.resetwarnings()
    for category in filters:
        warnings.simplefilter("error", category)
    state = LoggingState.capture()
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    state.filter_warnings()


def test_a_category_is_known_by_its_name():
    with warnings.catch_warnings():
        adopted(a_category())
        with pytest.raises(UserWarning, match="it is"):
            warnings.warn("it is one", a_category(), stacklevel=1)
        with pytest.raises(UserWarning, match="also"):
            warnings.warn("also below it", type("Below", (a_category(),), {}), stacklevel=1)
        with warnings.catch_warnings(record=True) as others:
            warnings.simplefilter("always", append=True)
            warnings.warn("another name", a_category("Other"), stacklevel=1)
            warnings.warn("the same name in another module", type("Late", (UserWarning,), {}), stacklevel=1)
    assert len(others) == 2
    assert "a_module_that_is_not_there" not in sys.modules


def test_categories_of_python_include_their_subclasses():
    with warnings.catch_warnings():
        adopted(UserWarning)
        with pytest.raises(UserWarning, match="below"):
            warnings.warn("below it", a_category(), stacklevel=1)
        assert warnings.filters[0][2] is UserWarning


def test_categories_that_are_filtered_together():
    with warnings.catch_warnings():
        adopted((a_category("One"), a_category("Two")))
        for name in ("One", "Two"):
            with pytest.raises(UserWarning, match="filtered"):
                warnings.warn("filtered", a_category(name), stacklevel=1)


def test_a_category_of_the_main_module_is_known_where_it_has_come_by_value():
    there = type("Bad", (UserWarning,), {"__module__": "__main__", "__qualname__": "Errors.Bad"})
    local = type("Local", (UserWarning,), {"__module__": "a_module", "__qualname__": "make.<locals>.Local"})
    with warnings.catch_warnings():
        adopted(there, local)
        for module, name in (("__main__", "Bad"), ("a_module", "Local")):
            with pytest.raises(UserWarning, match="came"):
                warnings.warn("came", type(name, (UserWarning,), {"__module__": module}), stacklevel=1)
