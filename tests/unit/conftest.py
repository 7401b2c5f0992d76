"""What tests without Ray have in common."""

import gc
import sys

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")  # no test depends on its speed

MANY = 100  # modules

_modules = len(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Modules that a test was the first to import live on: no collection of garbage need look at them again.

    Those of torch's compiler hold so many objects that each `gc.collect()` of the tests after it would take a second.
    """
    global _modules
    if len(sys.modules) > _modules + MANY:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()
