"""A program whose Ray lacks private names of `_compat_ray`: it loads, loses a worker, and starts anew.

    python script_lacking.py NAME ...

Prints what the log says of these names, and at the end "the end". Ray itself, which needs them, keeps them.
"""

import logging
import sys
from pathlib import Path

import ray

sys.path.append(str(Path(__file__).parents[1]))

import rayloader
from inside import kill_worker
from lacking import ray_without
from rayloader.actors import _compat_ray, session

names = sys.argv[1:]
found, member = _compat_ray._found, _compat_ray._member


def without(_, name, otherwise=None):
    return found(ray_without(ray, name) if name in names else ray, name, otherwise)


def check_epochs():
    loader = rayloader.DataLoader(range(40), batch_size=None, num_workers=2, prefetch_factor=2, workers="ray")
    for kills in (False, True, False):
        numbers = []
        for number in (iterator := iter(loader)):
            if kills and number == 9:
                kill_worker(iterator)
            numbers.append(number)
        assert numbers == list(range(40)), numbers


def main():
    said = []
    logging.getLogger("rayloader").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    _compat_ray._found = without
    _compat_ray._member = lambda owner, name: None if name in names else member(owner, name)
    _compat_ray.tell_lacks.cache_clear()
    _compat_ray.tell_lacks(ray)
    for shut_down in (ray.shutdown, rayloader.shutdown):  # what the public way sees of a session's end
        check_epochs()
        assert session.started_here()
        before = session.current()
        shut_down()
        assert session.current() is None
    assert before[0].startswith("session_"), before
    print(*(line for line in said if "private name" in line), sep="\n")
    print("the end")


if __name__ == "__main__":
    main()
