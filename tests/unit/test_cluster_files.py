"""The files that start a cluster are valid, as far as can be said without a cloud, and describe one cluster.

cluster.yaml passes Ray's own check of a cluster launcher file. Three schemas check kuberay.yaml, a RayCluster, and
kuberay-job.yaml, a RayJob on such a cluster: `kuberay_schema.json` KubeRay's fields, Kubernetes' own the pods, and the
code with which Ray's autoscaler reads a RayCluster what nodes there are.
"""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config

from documents import ROOT

SCHEMA = json.loads(Path(__file__).with_name("kuberay_schema.json").read_text())
FILES = {name: yaml.safe_load((ROOT / f"{name}.yaml").read_text()) for name in ("cluster", "kuberay", "kuberay-job")}


def check(manifest: dict[str, Any]) -> dict[str, Any]:
    """The file as Ray reads it.

    Raises:
        jsonschema.ValidationError: it is none of these files, or its pods are none.
    """
    if "kind" not in manifest:
        config: dict[str, Any] = prepare_config(copy.deepcopy(manifest))
        validate_config(config)
        return config
    jsonschema.validate(manifest, SCHEMA)
    if manifest["kind"] == "RayJob":  # the operator makes the cluster of it
        manifest = {**manifest, "spec": manifest["spec"]["rayClusterSpec"]}
    for group in (manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, **group["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    return _derive_autoscaling_config_from_ray_cr(copy.deepcopy(manifest))


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_valid_and_its_data_nodes_alone_have_the_resource(name: str) -> None:
    read, nodes = check(FILES[name]), check(FILES["cluster"])["available_node_types"]
    types = dict(read["available_node_types"])
    head = types.pop(read["head_node_type"])
    assert "data_worker" not in head["resources"]
    data = types[{"kuberay": "cpu-data", "kuberay-job": "cpu-spot", "cluster": "cpu_data"}[name]]
    assert data["resources"]["data_worker"] == nodes["cpu_data"]["resources"]["data_worker"]
    assert (data["min_workers"], data["max_workers"]) == (0, read["max_workers"])
    assert (read["max_workers"], read["idle_timeout_minutes"]) == tuple(
        FILES["cluster"][key] for key in ("max_workers", "idle_timeout_minutes")
    )


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("cluster", ("available_node_types", "cpu_data", "resources"), {"data_worker": "sixteen"}),
        ("kuberay", ("spec", "workerGroupSpecs", 0, "maxReplicas"), "4"),
        ("kuberay", ("spec", "headGroupSpec", "template", "spec", "containers", 0, "ressources"), {}),
        ("kuberay-job", ("spec", "entrypoint"), ["python", "cluster.py"]),
    ],
)
def test_a_broken_copy_is_refused(name: str, path: tuple[str | int, ...], value: object) -> None:
    broken = copy.deepcopy(FILES[name])
    place: Any = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check(broken)


def test_they_name_the_versions_that_the_tests_run_with_and_the_example_and_ask_for_the_token() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in constraints if line.startswith(("ray=", "torch="))]
    commands = " ".join(FILES["cluster"]["setup_commands"]).replace("[default]", "")
    assert len(pins) == 2
    assert [pin for pin in pins if pin not in commands] == []
    spec = FILES["kuberay"]["spec"]
    groups = spec["headGroupSpec"], *spec["workerGroupSpecs"]
    images = [group["template"]["spec"]["containers"][0]["image"] for group in groups]
    for image in (*images, FILES["cluster"]["docker"]["head_image"]):
        assert f":{spec['rayVersion']}-" in image
    entrypoint = FILES["kuberay-job"]["spec"]["entrypoint"]
    assert (ROOT / "examples" / Path(entrypoint).name).exists()
    assert spec["authOptions"] == FILES["kuberay-job"]["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert "--env RAY_AUTH_MODE=token" in check(FILES["cluster"])["docker"]["run_options"]
