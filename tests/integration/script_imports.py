"""What an epoch imports: nothing that the program has not, but for torch, Ray, NumPy and what these import.

python script_imports.py
"""

import sys

OPTIONAL = {"accelerate", "datasets", "h5py", "lightning", "pandas", "sqlite3", "tqdm", "transformers"}


class Imported:
    """What is imported in a worker."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return sorted(OPTIONAL & sys.modules.keys())


def own(samples):
    return samples


if __name__ == "__main__":
    import ray  # noqa: F401
    import torch.utils.data  # noqa: F401

    before = OPTIONAL & sys.modules.keys()
    assert "sqlite3" not in before
    import rayloader

    assert OPTIONAL & sys.modules.keys() == before
    for options in ({}, {"num_workers": 1, "workers": "fork"}, {"num_workers": 1, "workers": "ray"}):
        loader = rayloader.DataLoader(Imported(), None, collate_fn=own, **options)
        assert all(before.issuperset(imported) for imported in loader)
        loader.state_dict()
        assert OPTIONAL & sys.modules.keys() == before, OPTIONAL & sys.modules.keys()
    rayloader.shutdown()
    print("the end")
