"""Functions that no import finds: their code, and the code inside it, keeps the name of the user's file."""

import functools
import pickle
import traceback
import types
import warnings

import pytest
import torch

from rayloader.transport.pickler import ByValuePickler, Pickler, dumped
from rayloader.transport.replica import ReplicaPickler

FILE = "users_program.py"
SOURCE = """
import functools, warnings

def fails():
    def inner():
        raise ValueError("no such sample")
    inner()

def warns():
    warnings.warn("odd")

class Dataset:
    def __getitem__(self, index):
        return [1 / 0 for _ in range(index)]

    @functools.lru_cache(maxsize=3)
    def twice(self, index):
        return 2 * index

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

fibonacci.unit = "rabbits"
"""


@pytest.fixture
def program():
    module = types.ModuleType("__main__")
    exec(compile(SOURCE, FILE, "exec"), vars(module))
    return module


def there_and_back(obj):
    return pickle.loads(dumped(obj, ByValuePickler))


def files_of(call, *arguments):
    """Of the frames of what it raises, without this file's own."""
    try:
        call(*arguments)
    except Exception as error:
        return [frame.filename for frame in traceback.extract_tb(error.__traceback__)][1:]
    raise AssertionError("nothing was raised")


def test_tracebacks_and_warnings_name_the_file(program):
    came = there_and_back(program.fails)
    assert files_of(came) == [FILE, FILE]
    assert (came.__code__, [*came.__code__.co_lines()]) == (
        program.fails.__code__,
        [*program.fails.__code__.co_lines()],
    )
    assert set(files_of(there_and_back(program.Dataset)().__getitem__, 1)) == {FILE}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        there_and_back(program.warns)()
    assert [warning.filename for warning in caught] == [FILE]


# ---- functions with a cache


def test_a_cached_function_arrives_with_an_empty_cache_and_those_of_modules_are_found(program):
    program.fibonacci(5)
    got = there_and_back(program.fibonacci)
    assert got.cache_info() == (0, 0, None, 0)
    assert (got(10), got.unit, got.__name__) == (55, "rabbits", "fibonacci")
    assert got.cache_info().hits > 0, "what it calls is not itself"
    dataset = there_and_back(program.Dataset)()
    assert dataset.twice(4) == 8
    assert type(dataset).twice.cache_parameters() == {"maxsize": 3, "typed": False}
    assert there_and_back(functools.lru_cache(lambda index: 3 * index))(2) == 6
    assert there_and_back(functools.lru_cache(functools.partial(max, 5)))(2) == 5
    assert there_and_back(of_this_module) is of_this_module


@functools.cache
def of_this_module():
    pass


# ---- accelerators


class OnAccelerator:
    """A storage as `Pickler` sees it, of a device that this machine need not have."""

    device = torch.device("cuda", 1)

    def data_ptr(self):
        return 4096

    def cpu(self):
        return torch.arange(3).untyped_storage()


def test_a_storage_on_an_accelerator_is_refused_in_a_batch_and_copied_once_for_a_replica():
    with pytest.raises(TypeError, match=r"got a tensor on 'cuda:1'.*DataLoader\(\.\.\., device='cuda'\)"):
        Pickler()._storage(OnAccelerator(), torch.UntypedStorage)
    taking = ReplicaPickler()
    one, other = (taking._storage(OnAccelerator(), torch.UntypedStorage)[1][0] for _ in range(2))
    assert one is other
    assert taking.tokens[one].storage.tolist() == torch.arange(3).untyped_storage().tolist()
