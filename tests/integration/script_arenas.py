"""Holds batches of arenas while the workers are shut down, and until the interpreter ends.

python script_arenas.py
"""

import torch

import rayloader

data = torch.arange(32 * 1024).view(32, 1024)


def held():
    """All batches of an epoch; the later ones lie in arenas."""
    batches = list(rayloader.DataLoader(data, num_workers=2))
    with open("/proc/self/maps") as maps:
        assert "rayloader-arena-" in maps.read()
    return batches


first = held()
rayloader.shutdown()
assert torch.equal(torch.cat(first), data)
second = held()
second[-1].zero_()
assert torch.equal(torch.cat(first), data)
assert torch.equal(torch.cat(second[:-1]), data[:-1])
in_a_cycle = [first, second]
in_a_cycle.append(in_a_cycle)
print("the end")
