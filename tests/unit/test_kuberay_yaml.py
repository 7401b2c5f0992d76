"""kuberay.yaml is a RayCluster that KubeRay, Kubernetes and Ray's autoscaler can read: the cluster of cluster.yaml.

kuberay-job.yaml is a RayJob on such a cluster. Three schemas check both: `kuberay_schema.json` KubeRay's fields,
Kubernetes' own the pods, and the code with which Ray's autoscaler reads a RayCluster what nodes there are. No
Kubernetes is asked.
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

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads(Path(__file__).with_name("kuberay_schema.json").read_text())


@pytest.fixture
def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "kuberay.yaml").read_text())


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    """cluster.yaml."""
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def check(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest as Ray's autoscaler reads it.

    Raises:
        jsonschema.ValidationError: it is no RayCluster, or its pods are none.
    """
    jsonschema.validate(manifest, SCHEMA)
    if manifest["kind"] == "RayJob":  # the operator makes the cluster of it
        manifest = {**manifest, "spec": manifest["spec"]["rayClusterSpec"]}
    for group in (manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, **group["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    return _derive_autoscaling_config_from_ray_cr(copy.deepcopy(manifest))


HEAD = ("spec", "headGroupSpec")
HEAD_CONTAINER = (*HEAD, "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kind",), "RayClusters"),
        (("spec", "autoscalerOptions", "idleTimeoutSeconds"), "five minutes"),
        (("spec", "authOptions", "mode"), "tokens"),
        (("spec", "workers"), []),
        (("spec", "workerGroupSpecs", 0, "maxReplicas"), "4"),
        ((*HEAD, "rayStartParams", "num-cpus"), 4),
        ((*HEAD_CONTAINER, "ressources"), {}),
        ((*HEAD_CONTAINER, "image"), 2.6),
        ((*HEAD_CONTAINER, "resources", "limits"), [4]),
    ],
)
def test_a_broken_copy_is_refused(manifest: dict[str, Any], path: tuple[str | int, ...], value: object) -> None:
    *parents, last = path
    place: Any = manifest
    for key in parents:
        place = place[key]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        check(manifest)


def test_it_is_the_cluster_of_cluster_yaml(manifest: dict[str, Any], cluster: dict[str, Any]) -> None:
    ours = check(manifest)
    launched = cluster["available_node_types"]
    head, data = (ours["available_node_types"][name] for name in (ours["head_node_type"], "cpu-data"))
    assert data["resources"]["data_worker"] == launched["cpu_data"]["resources"]["data_worker"]
    assert data["resources"]["data_worker"] == data["resources"]["CPU"], "one for each CPU"
    assert "data_worker" not in head["resources"]
    assert head["resources"]["GPU"] == 1
    for key in ("min_workers", "max_workers"):
        assert data[key] == launched["cpu_data"][key]
    for key in ("max_workers", "idle_timeout_minutes"):
        assert ours[key] == cluster[key]


@pytest.fixture
def job() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "kuberay-job.yaml").read_text())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "entrypoint"), ["python", "cluster.py"]),
        (("spec", "shutdownAfterJobFinishes"), "yes"),
        (("spec", "rayClusterSpec", "workers"), []),
        (("spec", "rayVersion"), "2.60.0"),
    ],
)
def test_a_broken_copy_of_the_job_is_refused(job: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    *parents, last = path
    place: Any = job
    for key in parents:
        place = place[key]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        check(job)


def test_the_job_runs_the_example_on_the_same_cluster_with_spot_pods_and_no_work_on_the_head(
    manifest: dict[str, Any], job: dict[str, Any]
) -> None:
    ours = check(job)
    head = ours["available_node_types"][ours["head_node_type"]]
    assert head["resources"]["CPU"] == 0
    assert job["spec"]["entrypoint"].endswith("/examples/cluster.py")
    assert (ROOT / "examples" / "cluster.py").exists()

    spec = job["spec"]["rayClusterSpec"]
    start = spec["headGroupSpec"]["rayStartParams"]
    assert start.pop("num-cpus") == "0"
    assert start.pop("dashboard-host") == "0.0.0.0", "whoever submits it is another pod"
    (group,) = spec["workerGroupSpecs"]
    pods = group["template"]["spec"]
    assert pods.pop("nodeSelector") == {"cloud.google.com/gke-spot": "true"}
    assert [one["key"] for one in pods.pop("tolerations")] == ["cloud.google.com/gke-spot"]
    assert group["groupName"] == "cpu-spot"
    group["groupName"] = "cpu-data"
    theirs = copy.deepcopy(manifest["spec"])
    theirs["headGroupSpec"]["rayStartParams"].pop("dashboard-host")
    assert spec == theirs, "all else is that of kuberay.yaml"


def test_its_pods_have_one_ray_and_ask_for_the_token(manifest: dict[str, Any], cluster: dict[str, Any]) -> None:
    spec = manifest["spec"]
    images = [
        group["template"]["spec"]["containers"][0]["image"]
        for group in (*spec["workerGroupSpecs"], spec["headGroupSpec"])
    ]
    assert all(f":{spec['rayVersion']}-" in image for image in images)
    assert f"rayproject/ray:{spec['rayVersion']}-" in cluster["docker"]["head_image"]
    assert spec["authOptions"] == {"mode": "token"}
