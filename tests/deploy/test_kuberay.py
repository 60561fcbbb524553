"""The manifest for KubeRay, held against the schemas of what it declares."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml
from gradwire.fleet.plan import Plan

from tests.deploy.test_files import DEPLOY

STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
TEMPLATE = {"type": "object", "required": ["spec"]}
COUNT = {"type": "integer", "minimum": 0}


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object that has no other fields."""
    return {
        "type": "object", "properties": properties, "required": required.split(), "additionalProperties": False
    }  # fmt: skip


HEAD = closed(
    "rayStartParams template",
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, headService={"type": "object"},
    enableIngress={"type": "boolean"}, rayStartParams=STRINGS, template=TEMPLATE,
)  # fmt: skip
WORKERS = closed(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName={"type": "string"}, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT, numOfHosts=COUNT,
    rayStartParams=STRINGS, template=TEMPLATE, scaleStrategy={"type": "object"},
)  # fmt: skip
RAY_CLUSTER = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"}, kind={"const": "RayCluster"}, metadata={"type": "object", "required": ["name"]},
    spec=closed(
        "headGroupSpec",
        headGroupSpec=HEAD, workerGroupSpecs={"type": "array", "items": WORKERS}, rayVersion={"type": "string"},
        enableInTreeAutoscaling={"type": "boolean"}, autoscalerOptions={"type": "object"},
        headServiceAnnotations=STRINGS, suspend={"type": "boolean"},
    ),
)  # fmt: skip
"""The fields of KubeRay's ``raycluster_types.go`` (v1), of which a field without ``omitempty`` is required."""


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())}


def templates(documents: dict[str, Any]) -> list[dict[str, Any]]:
    spec = documents["RayCluster"]["spec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_the_cluster_keeps_to_kuberays_fields(documents: dict[str, Any]) -> None:
    jsonschema.validate(documents["RayCluster"], RAY_CLUSTER)
    misspelt = documents["RayCluster"] | {"spec": documents["RayCluster"]["spec"] | {"workerGroupSpec": []}}
    with pytest.raises(jsonschema.ValidationError, match="workerGroupSpec"):
        jsonschema.validate(misspelt, RAY_CLUSTER)


def test_pods_and_volumes_keep_to_kubernetes_schema(documents: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="in .venv-fleet only: 100 MB")
    kubernetes_validate.validate(documents["ConfigMap"], "1.37", strict=True)
    for template in templates(documents):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        kubernetes_validate.validate(pod, "1.37", strict=True)
        pod["spec"] = pod["spec"] | {"container": []}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(pod, "1.37", strict=True)


def test_each_engine_of_the_plan_fits_into_a_worker(documents: dict[str, Any]) -> None:
    plan = Plan.model_validate(yaml.safe_load(documents["ConfigMap"]["data"]["fleet.yaml"]))
    head, *workers = templates(documents)
    for group, worker in zip(plan.groups, workers, strict=True):
        (container,) = worker["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert int(limits["nvidia.com/gpu"]) >= group.gpus and int(limits["cpu"]) >= group.cpus
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert plan.ca_cert.rpartition("/")[0] in mounts
        assert any(str(group.options["state_dir"]).startswith(mount) for mount in mounts)
    for pod in (head, *workers):
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]} == volumes
