"""Several processes that a framework starts: batches, losses and states of each are those of its part."""

import pytest
import ray

from framework_data import run_script

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("ray_session")]
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize("framework", ["Accelerate", "Lightning"])
def test_two_ranks(framework):
    """See the script."""
    environment = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "OMP_NUM_THREADS": "1"}
    launcher = LAUNCHER if framework == "Accelerate" else []
    assert run_script("script_ranks.py", framework, launcher=launcher, **environment).count("the end") == 2


@pytest.mark.parametrize("case", ["restarted", "unprepared", "tuned"])
def test_trainers_and_trials_of_ray(case, tmp_path):
    """See the script."""
    address = "local" if case == "tuned" else ray.get_runtime_context().gcs_address
    assert "the end" in run_script("script_ray_train.py", tmp_path, case, RAY_ADDRESS=address)
