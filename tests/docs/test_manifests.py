"""The cluster files of the guide, as far as that can be told without the clusters."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "cluster.md"
MANIFESTS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)]


def the(key):
    (found,) = [manifest for manifest in MANIFESTS if key in manifest]
    return found


def test_the_launcher_file_fits_the_schema_of_ray_up():
    ray = importlib.util.find_spec("ray")
    if ray is None:
        pytest.skip('Ray is not installed: pip install "persia[ray]"')
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    config = the("cluster_name")
    jsonschema.validate(config, schema)
    kinds = config["available_node_types"]
    assert config["head_node_type"] in kinds
    assert sum(kind.get("min_workers", 0) for kind in kinds.values()) == config["max_workers"] == 138
    for kind in kinds.values():
        assert kind["node_config"]["disks"][0]["boot"]  # Ray fills nothing in where there are node types.


def test_the_ray_job_is_whole():
    job = the("apiVersion")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len({group["groupName"] for group in groups[1:]}) == 2
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        # Ray takes what a node has from these.
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        (keys,) = container["env"]
        assert keys["value"].startswith(mounts["keys"] + "/")
        assert pod["volumes"][0]["secret"]["defaultMode"] == 0o400
        if group is not groups[0]:
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
