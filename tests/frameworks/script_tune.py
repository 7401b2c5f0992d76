"""Trials of Ray Tune that use loaders with default arguments. The trials hold all CPUs.

python script_tune.py FOLDER   for what is written meanwhile
"""

import sys

import ray
from ray import tune

import rayloader


def trial(config):
    loader = rayloader.DataLoader(range(100), batch_size=config["batch_size"], shuffle=True, num_workers=1)
    for _ in range(2):
        assert sorted(sample for batch in loader for sample in batch.tolist()) == [*range(100)]
    tune.report({"batches": len(loader)})


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    results = tune.Tuner(
        trial,
        param_space={"batch_size": tune.grid_search([10, 20])},
        run_config=tune.RunConfig(storage_path=sys.argv[1]),
    ).fit()
    assert not results.errors, results.errors
    assert sorted(results.get_dataframe()["batches"]) == [5, 10]
    print("the end")
