"""cluster.yaml passes Ray's own check of a cluster launcher file, and says what its comments promise.

Only the check runs: nothing is launched and Ray is not started.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray._private.authentication.authentication_token_setup import _get_default_token_path
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster() -> dict[str, Any]:
    """The file as `ray up` reads it."""
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def check(config: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` does with the file before it calls the cloud.

    Returns:
        The configuration with Ray's defaults filled in.
    """
    config = prepare_config(copy.deepcopy(config))
    validate_config(config)
    return config


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    filled = check(cluster)
    assert filled["setup_commands"] == cluster["setup_commands"]
    assert filled["worker_start_ray_commands"]
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("available_node_types", "cpu_data", "resources"), {"data_worker": "sixteen"}),
        (("available_node_types", "cpu_data", "instance"), "c6i.4xlarge"),
        (("max_worker",), 4),
        (("idle_timeout_minutes",), "five"),
    ],
)
def test_ray_refuses_a_broken_copy(cluster: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    *parents, last = path
    place = cluster
    for key in parents:
        place = place[key]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        check(cluster)


def test_ray_refuses_a_head_that_is_no_node_type(cluster: dict[str, Any]) -> None:
    cluster["head_node_type"] = "cpu_head"
    with pytest.raises(ValueError, match="head_node_type"):
        check(cluster)


def with_spot_nodes(cluster: dict[str, Any]) -> None:
    """The change that the file's comment names."""
    data, spot = (cluster["available_node_types"][name] for name in ("cpu_data", "cpu_spot"))
    data["max_workers"], spot["max_workers"] = spot["max_workers"], data["max_workers"]


def without_cpus_on_the_head(cluster: dict[str, Any]) -> None:
    """Likewise."""
    cluster["available_node_types"][cluster["head_node_type"]]["resources"] = {"CPU": 0}


VARIANTS: list[Callable[[dict[str, Any]], None]] = [lambda _: None, with_spot_nodes, without_cpus_on_the_head]


@pytest.mark.parametrize("change", VARIANTS, ids=["the file", "spot nodes", "no CPUs on the head"])
def test_data_nodes_scale_from_none_and_only_they_have_the_resource(
    cluster: dict[str, Any], change: Callable[[dict[str, Any]], None]
) -> None:
    change(cluster)
    types = check(cluster)["available_node_types"]
    head = types.pop(cluster["head_node_type"])
    used = {name for name, kind in types.items() if kind["max_workers"]}
    assert used == {"cpu_spot" if change is with_spot_nodes else "cpu_data"}
    for kind in types.values():
        assert (kind["min_workers"], kind["max_workers"]) in ((0, cluster["max_workers"]), (0, 0))
        assert "data_worker" in kind["resources"]
    assert head["max_workers"] == 0
    assert "data_worker" not in head["resources"]
    assert (head["resources"].get("CPU") == 0) is (change is without_cpus_on_the_head)


def test_spot_nodes_are_data_nodes_of_another_market(cluster: dict[str, Any]) -> None:
    data, spot = (cluster["available_node_types"][name] for name in ("cpu_data", "cpu_spot"))
    assert spot["resources"] == data["resources"]
    assert spot["node_config"] == {**data["node_config"], "InstanceMarketOptions": {"MarketType": "spot"}}


def test_it_installs_the_versions_that_the_tests_run_with(cluster: dict[str, Any]) -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in constraints if line.startswith(("ray=", "torch="))]
    commands = " ".join(cluster["setup_commands"]).replace("[default]", "")
    assert len(pins) == 2
    for pin in pins:
        assert pin in commands


def test_every_node_asks_for_the_token_and_has_it(cluster: dict[str, Any]) -> None:
    filled = check(cluster)
    assert "--env RAY_AUTH_MODE=token" in filled["docker"]["run_options"]
    assert Path("~/.ray/auth_token").expanduser() == _get_default_token_path()
    assert filled["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_only_the_head_itself_reaches_its_dashboard(cluster: dict[str, Any]) -> None:
    """Beside that, the commands are Ray's own."""
    theirs = yaml.safe_load((Path(ray.__file__).parent / "autoscaler" / "aws" / "defaults.yaml").read_text())
    ours = [command.replace("127.0.0.1", "0.0.0.0") for command in cluster["head_start_ray_commands"]]
    assert ours == theirs["head_start_ray_commands"]
