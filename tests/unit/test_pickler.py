"""Functions that no import finds: their code, and the code inside it, keeps the name of the user's file."""

import ctypes
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
def fails():
    def inner():
        raise ValueError("no such sample")
    inner()

class Dataset:
    def __getitem__(self, index):
        return [1 / 0 for _ in range(index)]
"""


def program():
    module = types.ModuleType("__main__")
    exec(compile(SOURCE, FILE, "exec"), vars(module))
    return vars(module)


def there_and_back(obj):
    return pickle.loads(dumped(obj, ByValuePickler))


def files_of(call, *arguments):
    """Of the frames of what it raises, without this file's own."""
    try:
        call(*arguments)
    except Exception as error:
        return [frame.filename for frame in traceback.extract_tb(error.__traceback__)][1:]
    raise AssertionError("nothing was raised")


def codes_in(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def test_a_traceback_names_the_file_in_functions_and_in_functions_inside():
    assert files_of(there_and_back(program()["fails"])) == [FILE, FILE]


def test_a_traceback_names_the_file_in_methods():
    dataset = there_and_back(program()["Dataset"])()
    assert set(files_of(dataset.__getitem__, 1)) == {FILE}


def test_code_arrives_as_it_was():
    code = program()["fails"].__code__
    came = there_and_back(code)
    assert came == code
    assert [inner.co_filename for inner in codes_in(came)] == [FILE] * 2
    assert list(came.co_lines()) == list(code.co_lines())


def test_a_warning_names_the_file():
    namespace = {"warnings": warnings}
    exec(compile("def warns(): warnings.warn('odd')", FILE, "exec"), namespace)
    namespace["warns"].__module__ = "__main__"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        there_and_back(namespace["warns"])()
    assert [warning.filename for warning in caught] == [FILE]


# ---- functions with a cache, and arrays of ctypes

CACHED = """
import functools

class Dataset:
    @functools.lru_cache(maxsize=3)
    def twice(self, index):
        return 2 * index

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

fibonacci.unit = "rabbits"
"""


def test_a_cached_function_of_main_arrives_with_an_empty_cache():
    module = types.ModuleType("__main__")
    exec(CACHED, vars(module))
    module.fibonacci(5)
    got = there_and_back(module.fibonacci)
    assert got.cache_info() == (0, 0, None, 0)
    assert (got(10), got.unit, got.__name__) == (55, "rabbits", "fibonacci")
    assert got.cache_info().hits > 0, "what it calls is not itself"
    dataset = there_and_back(module.Dataset)()
    assert dataset.twice(4) == 8
    assert type(dataset).twice.cache_parameters() == {"maxsize": 3, "typed": False}


def test_cached_functions_without_a_name_arrive_and_those_of_modules_are_found():
    assert there_and_back(functools.lru_cache(lambda index: 3 * index))(2) == 6
    assert there_and_back(functools.lru_cache(functools.partial(max, 5)))(2) == 5
    assert there_and_back(functools.lru_cache(Counted().next))() == 1
    assert there_and_back(of_this_module) is of_this_module


class Counted:
    def next(self):
        return 1


@functools.cache
def of_this_module():
    pass


def test_arrays_of_ctypes_arrive():
    assert list(there_and_back((ctypes.c_int * 2)(7, 8))) == [7, 8]


class OnAccelerator:
    """A storage as `Pickler` sees it, of a device that this machine need not have."""

    device = torch.device("cuda", 1)

    def data_ptr(self):
        return 4096

    def cpu(self):
        return torch.arange(3).untyped_storage()


def test_a_storage_on_an_accelerator_is_refused_in_a_batch():
    with pytest.raises(TypeError, match=r"got a tensor on 'cuda:1'.*DataLoader\(\.\.\., device='cuda'\)"):
        Pickler()._storage(OnAccelerator(), torch.UntypedStorage)


def test_a_storage_on_an_accelerator_is_copied_once_for_a_replica():
    taking = ReplicaPickler()
    tokens = [taking._storage(OnAccelerator(), torch.UntypedStorage)[1][0] for _ in range(2)]
    assert tokens[0] is tokens[1]
    (span,) = taking.tokens.values()
    assert span.storage.tolist() == torch.arange(3).untyped_storage().tolist()
