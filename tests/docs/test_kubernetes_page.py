"""Names in the commands of the pages on Kubernetes are those of the manifests that `persia plan` writes."""

import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

from support.planned_pods import Manifests, container_of, plan_pods, save_rates  # noqa: E402

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
PAGES = {name: (GUIDE / name).read_text(encoding="utf-8") for name in ("kubernetes.md", "operations.md")}
COMMANDS = [line.strip() for page in PAGES.values() for line in re.findall(r"(kubectl [^`\n]*)", page)]
KINDS = {"job": "Job", "deployment": "Deployment", "service": "Service", "statefulset": "StatefulSet"}

RUN = """
[data]
kind = "synthetic"
options = { rows = 20_000, id_features = 2, ids_per_feature = 1000, dim = 4 }
[cluster]
kind = "ray"
[trainer]
publish = { url = "changes" }
"""
HOSTS = '[[hosts]]\nname = "hosts"\ncores = 8\nmemory = "20GB"\nnetwork = "10Gbit/s"\n'


@pytest.fixture(scope="module")
def manifests(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    files = [folder / name for name in ("run.toml", "hosts.toml", "rates.json", "k8s")]
    files[0].write_text(RUN)
    files[1].write_text(HOSTS)
    save_rates(files[2], files[0])
    plan_pods(*files, "--rows", "id_0=1000", "--rows", "id_1=200M")
    return Manifests(files[3])


def test_objects_exist(manifests):
    named = [name for line in COMMANDS for name in re.findall(r"(\w+)[ /](persia-[\w-]+)", line) if name[0] in KINDS]
    assert {kind for kind, _ in named} == {"job", "deployment"}
    for kind, name in named:
        assert name in manifests.of(KINDS[kind])
    assert "`persia-serve`, port 8080" in PAGES["kubernetes.md"]
    assert manifests.of("Service")["persia-serve"]["spec"]["ports"][0]["port"] == 8080


def test_selectors_select(manifests):
    assert "persia-rows" in manifests.of("StatefulSet")
    selectors = [line for line in COMMANDS if " -l " in line]
    assert selectors
    for line in selectors:
        kind, key, value = re.search(r"delete (\w+) -l ([\w./-]+)=([\w-]+)", line).groups()
        found = {name for name, each in manifests.of(KINDS[kind]).items() if each["metadata"]["labels"][key] == value}
        assert found == {"persia-hosts-hosts"}  # Not the row servers.


def test_namespaces_images_and_files_are_those_of_the_kustomization(manifests):
    namespaces = {name for line in COMMANDS for name in re.findall(r"(?:-n|create namespace) (\S+)", line)}
    assert namespaces == {manifests.kustomization["namespace"]}
    (image,) = [re.search(r"set image \S+ (\w+)=([\w./-]+):", line) for line in COMMANDS if "set image" in line]
    assert image[1] == container_of(manifests.pods()["persia-serve"])["name"]
    assert image[2] == manifests.kustomization["images"][0]["newName"]
    for line in COMMANDS:
        for name in re.findall(r"-f k8s/(\S+)", line):
            assert name in manifests.files


def test_secrets_are_those_that_pods_mount(manifests):
    created = {}
    for line in COMMANDS:
        if found := re.search(r"create secret generic (\S+) --from-file=(\w+)", line):
            created[found[1]] = found[2]
    volumes = [volume for template in manifests.pods().values() for volume in template["spec"]["volumes"]]
    used = {v["secret"]["secretName"]: v["secret"]["items"][0]["key"] for v in volumes if "secret" in v}
    assert created == used


@pytest.mark.processes
def test_a_kustomization_of_the_users_own_changes_the_values(manifests):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed.")
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGES["kubernetes.md"], re.DOTALL)
    own = manifests.folder.parent / "own"
    own.mkdir()
    (own / "kustomization.yaml").write_text(textwrap.dedent(text))
    done = subprocess.run(["kubectl", "kustomize", str(own)], capture_output=True, text=True, check=True)
    rendered = list(yaml.safe_load_all(done.stdout))
    assert {each["metadata"]["namespace"] for each in rendered} == {"recommender"}
    (servers,) = [each for each in rendered if each["kind"] == "Deployment"]
    assert servers["spec"]["replicas"] == 6
    templates = [each["spec"]["template"] for each in rendered if "template" in each.get("spec", {})]
    assert len(templates) == 4
    for each in templates:
        assert container_of(each)["image"] == "registry.example.com/team/persia:0.2.0"
        assert container_of(each)["envFrom"] == [{"secretRef": {"name": "storage"}}]
