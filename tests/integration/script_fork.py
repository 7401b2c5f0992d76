"""Forks while an iterator is live: the child is told that it cannot go on, the parent does.

python script_fork.py
"""

import gc
import os
import sys
import traceback

import rayloader

loader = rayloader.DataLoader(range(6), None, num_workers=2)
iterator = iter(loader)
assert next(iterator) == 0
pid = os.fork()
if pid == 0:
    status = 1
    try:
        next(iterator)
    except rayloader.RaySessionError as error:
        print(error, file=sys.stderr)
        status = 3 if isinstance(error, RuntimeError) and "forked" in str(error) else 2
    except BaseException:
        traceback.print_exc()
    del iterator, loader  # the parent's workers must not notice
    gc.collect()
    os._exit(status)  # as multiprocessing's children end; Ray's own exit handlers hang in a fork
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 3, status
assert list(iterator) == [1, 2, 3, 4, 5]
assert list(loader) == [0, 1, 2, 3, 4, 5]
print("the end")
