"""What must do without Ray, and without packages that a program may have: loaders without actors, in all contexts.

python script_no_ray.py
"""

import multiprocessing
import sys
import warnings

import torch
from torch.utils.data import get_worker_info

OPTIONAL = {"accelerate", "datasets", "h5py", "lightning", "pandas", "sqlite3", "tqdm", "transformers"}
before = OPTIONAL & sys.modules.keys()
assert "sqlite3" not in before

from rayloader import DataLoader, shutdown  # noqa: E402

loader = DataLoader(range(4), 2)
for _ in range(2):
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
assert get_worker_info() is None

loader = DataLoader(range(8), 2, shuffle=True, generator=torch.Generator().manual_seed(1))
iterator = iter(loader)
next(iterator)
state, rest = loader.state_dict(), [batch.tolist() for batch in iterator]
loader.load_state_dict(state)
assert [batch.tolist() for batch in loader] == rest
assert len(rest) == 3
assert len(DataLoader(range(4), 2, num_workers=2)) == 2

loader = DataLoader(range(4), 2, num_workers=2, collate_fn=lambda _: OPTIONAL & sys.modules.keys(), workers="fork")
assert list(loader) == [before, before], "in workers"
loader.state_dict()

methods = multiprocessing.get_all_start_methods()
assert "spawn" in methods
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for method in methods:
        for context in (method, multiprocessing.get_context(method), torch.multiprocessing.get_context(method)):
            loader = DataLoader(range(4), 2, num_workers=2, multiprocessing_context=context)
            assert loader.multiprocessing_context.get_start_method() == method
assert caught == []

shutdown()
assert before == OPTIONAL & sys.modules.keys()
assert not any(name == "ray" or name.startswith("ray.") for name in sys.modules)
print("the end")
