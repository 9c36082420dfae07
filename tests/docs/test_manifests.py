"""The cluster files of the guide, as far as that can be told without the clusters."""

import ast
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from persia.cluster import RayOptions
from persia.cluster.ray.layout import REGIONS, HostLayout, RayNode, demands_of
from persia.cluster.ray.placement import read_place

yaml = pytest.importorskip("yaml")
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "deploy.md"
MANIFESTS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)]

GIB = 1 << 30


def the(key):
    (found,) = [manifest for manifest in MANIFESTS if key in manifest]
    return found


def test_the_launcher_file_fits_the_schema_of_ray_up():
    ray = importlib.util.find_spec("ray")
    if ray is None:
        pytest.skip('Ray is not installed: pip install "persia-recsys[ray]"')
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
        # Files of a secret belong to root, so the group of the image's user needs to read them.
        assert pod["securityContext"] == {"fsGroup": 1000}
        assert pod["volumes"][0]["secret"]["defaultMode"] == 0o440
        if group is not groups[0]:
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def laid_out(section, nodes):
    """Roles of the program in a section of the guide, each with the groups of its hosts and how many it has on each."""
    text = GUIDE.read_text().split(f"## {section}")[1].split("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    call = ast.parse(program).body[0].value
    arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg != "options"}
    counts = {
        "embedding_ps": arguments["ps"],
        **{role: arguments[f"{role}s"] for role in ("embedding_worker", "data_loader", "nn_worker")},
    }
    layout = HostLayout(demands_of(read_place(arguments["place"]), counts, RayOptions()), nodes)
    found = {}
    for role, count in counts.items():
        hosts = Counter(layout.node_of(role, rank) for rank in range(count))
        found[role] = {(name.split("-")[0], len(hosts), number) for name, number in hosts.items()}
    return found


def nodes_of(name, count, resources, labels):
    return [RayNode(f"{name}-{i:03}", f"{name}-{i:03}", resources, resources, labels) for i in range(count)]


def test_roles_are_on_their_groups_of_the_ray_job():
    nodes = nodes_of("head", 1, {"CPU": 0.0, "memory": 16 * GIB}, {})
    for group in the("apiVersion")["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        memory = int(limits["memory"].removesuffix("Gi")) * GIB
        resources = {"CPU": float(limits["cpu"]), "memory": memory, REGIONS: memory / 2}
        resources["GPU"] = float(limits.get("nvidia.com/gpu", 0))
        nodes += nodes_of(group["groupName"], group["replicas"], resources, group["labels"])
    assert laid_out("Kubernetes (KubeRay)", nodes) == {
        "embedding_ps": {("memory", 4, 1)},
        "embedding_worker": {("memory", 4, 1)},
        "data_loader": {("memory", 4, 1)},
        "nn_worker": {("gpu", 2, 4)},
    }


def test_roles_are_on_their_types_of_hosts_of_the_launcher_file():
    nodes = []
    for name, kind in the("cluster_name")["available_node_types"].items():
        nodes += nodes_of(name, kind.get("min_workers", 1), kind["resources"], kind.get("labels", {}))
    assert laid_out("Google Cloud, sized like the paper's", nodes) == {
        "embedding_ps": {("ps", 30, 1)},
        "embedding_worker": {("embedding_worker", 100, 1)},
        "data_loader": {("embedding_worker", 100, 1)},
        "nn_worker": {("nn_worker", 8, 8)},
    }
