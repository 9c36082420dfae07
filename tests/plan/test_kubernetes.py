"""Manifests of `persia plan --kubernetes`, as far as that can be told without a cluster.

Each object fits the schema of its kind; what objects name exists; and commands, ports, routes and variables are those
of the programs that they are for.
"""

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import click
import pytest
import typer

from persia.cli.app import app
from persia.cluster.ray.layout import REGIONS, HostLayout, RayNode, demands_of
from persia.errors import ConfigError

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")

from support.planned_pods import Manifests, container_of, plan_pods, save_rates  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text(encoding="utf-8"))
MIB = 1 << 20
SERVING = {"persia serve": "persia-serve", "persia serve-rows": "persia-rows"}
VARIABLES = {"HOME", "PYTHONPATH"}
"""Environment variables that are not persia's."""

RUN = """
imports = ["shared"]
[data]
kind = "synthetic"
batch_size = 256
options = { rows = 20_000, id_features = 2, ids_per_feature = 1000, dim = 4 }
[mode]
kind = "hybrid"
staleness = 2
[cluster]
kind = "ray"
ps = 4
nn_workers = 4
embedding_workers = 2
"""
HOSTS = """
[[hosts]]
name = "row_hosts"
roles = ["embedding_ps"]
count = 4
cores = 8
memory = "10GB"
network = "10Gbit/s"
[[hosts]]
name = "gpus"
count = 2
cores = 16
memory = "20GB"
network = "10Gbit/s"
gpus = 2
"""
CASES = {
    "volume": ["--set", "trainer.publish.url=changes", "--set", "model.kind=own:Net"],
    "urls": ["--set", "trainer.checkpoint_dir=s3://bucket/run", "--set", "trainer.publish.url=kafka://broker/rows"],
    "training": ["--set", "cluster.ray.regions=/mnt/regions"],
    "parts": ["--set", "trainer.publish.url=changes", "--rows", "id_1=2e8"],
}
ROWS = ["--rows", "id_0=1e6", "--rows", "id_1=1e7"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Returns a function that plans in a folder with a configuration, and returns what was printed."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "run.toml").write_text(RUN)
    (folder / "hosts.toml").write_text(HOSTS)
    (folder / "shared.py").write_text("# Imported by the configuration.\n")
    (folder / "own.py").write_text("class Net:\n    pass\n")
    config, hosts, rates = folder / "run.toml", folder / "hosts.toml", folder / "rates.json"
    save_rates(rates, config, ["model.kind=own:Net"])

    def run(target, *options):
        printed = plan_pods(config, hosts, rates, target, *ROWS, "--json", str(folder / "plan.json"), *options)
        return printed, json.loads((folder / "plan.json").read_text())

    return run


class Written(Manifests):
    """The files of a case, what the command printed, and its plan."""

    def __init__(self, folder, printed, plan):
        super().__init__(folder)
        self.printed, self.plan = printed, plan


@pytest.fixture(scope="module", params=CASES)
def written(request, planned, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return Written(folder, *planned(folder, *CASES[request.param]))


@pytest.fixture(scope="module")
def volume(planned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("volume")
    return Written(folder, *planned(folder, *CASES["volume"]))


def problems(each):
    name = SCHEMA["kinds"][f"{each['apiVersion']}/{each['kind']}"]
    required = ["metadata", *([] if each["kind"] == "ServiceAccount" else ["spec"])]
    schema = {"$ref": f"#/$defs/{name}", "required": required, "$defs": SCHEMA["$defs"]}
    found = jsonschema.Draft202012Validator(schema).iter_errors(each)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def test_objects_fit_the_schemas_of_their_kinds(written):
    assert written.objects
    for each in written.objects:
        assert problems(each) == []


CONTAINER = ["spec", "template", "spec", "containers", 0]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["spec", "replica"], 2, "'replica' was unexpected"),
        (["spec", "replicas"], "2", "'2' is not of type 'integer'"),
        (["spec", "selector"], None, "'selector' is a required property"),
        ([*CONTAINER, "image"], ["persia"], "is not of type 'string'"),
        ([*CONTAINER, "livenessProbe", "httpGet", "port"], None, "'port' is a required"),
        ([*CONTAINER, "ports", 0, "containerport"], 1, "'containerport' was unexpected"),
    ],
)
def test_the_schema_refuses(volume, path, value, message):
    each = json.loads(json.dumps(volume.of("Deployment")["persia-serve"]))
    assert problems(each) == []
    *parents, name = path
    inner = each
    for step in parents:
        inner = inner[step]
    if value is None:
        del inner[name]
    else:
        inner[name] = value
    assert message in " ".join(problems(each))


def test_what_objects_name_exists(written):
    pods = written.pods()
    labels = {name: template["metadata"]["labels"] for name, template in pods.items()}
    configs = {each["name"] for each in written.kustomization["configMapGenerator"]}
    for name, template in pods.items():
        spec, container = template["spec"], container_of(template)
        assert spec["serviceAccountName"] in written.of("ServiceAccount")
        owner = next(
            each for each in written.objects if each["metadata"]["name"] == name and "template" in each["spec"]
        )
        if owner["kind"] != "Job":
            assert owner["spec"]["selector"]["matchLabels"] == labels[name]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        claims = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == volumes.keys() | claims
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(set(paths)) == len(paths)
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in configs
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in written.of("PersistentVolumeClaim")
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            action = container[probe].get("httpGet") or container[probe]["tcpSocket"]
            assert action["port"] in ports
        for each in container.get("env", []):
            assert each["name"] in VARIABLES or f'"{each["name"]}"' in (ROOT / "src/persia/rpc/keys.py").read_text()
            if each["name"] == "PERSIA_CURVE_KEYS":
                (mount,) = [m["name"] for m in container["volumeMounts"] if f"{m['mountPath']}/keys" == each["value"]]
                assert volumes[mount]["secret"]["secretName"] == "persia-keys"
    for each in written.objects:
        spec, kind = each.get("spec", {}), each["kind"]
        if kind == "Service":
            (name,) = [name for name, found in labels.items() if found == spec["selector"]]
            exposed = {port["name"]: port["containerPort"] for port in container_of(pods[name])["ports"]}
            assert all(exposed[port["name"]] == port["port"] for port in spec["ports"])
        if kind == "StatefulSet":
            assert spec["serviceName"] in written.of("Service")
        if kind == "PodDisruptionBudget":
            assert spec["selector"]["matchLabels"] in labels.values()
    policy = written.of("NetworkPolicy")["persia-training"]["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    selected = policy["podSelector"]["matchLabels"].items()
    assert {name for name, found in labels.items() if selected <= found.items()} == labels.keys() - SERVING.values()


def words_of(written):
    """Command lines of all containers, with those of their scripts and hooks."""
    for template in written.pods().values():
        container = container_of(template)
        assert container["command"][:2] == ["tini", "--"]
        command = container["command"][2:]
        if command[:2] == ["sh", "-ec"]:
            (script,) = command[2:]
            for line in script.splitlines():
                line = line.replace("${HOSTNAME##*-}", "0").replace("${head%% *}", "10.0.0.1")
                assert line.count("head=$(getent hosts persia-train) && ") == line.count("until ")
                words = shlex.split(line.replace("head=$(getent hosts persia-train) && ", ""))
                if words[0] in ("exec", "until"):
                    words = words[1:]
                if "do" in words:
                    assert words[words.index("do") :] == ["do", "sleep", "2;", "done"]
                    words = [word.rstrip(";") for word in words[: words.index("do")]]
                yield words
        else:
            yield command
        if "lifecycle" in container:
            yield container["lifecycle"]["preStop"]["exec"]["command"]


def parsed(group, words):
    """Parses a command line without running it; returns its name and arguments.

    Raises:
        click.UsageError: the command does not exist, or an argument is not one of it.
    """
    context, command, names = click.Context(group), group, []
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, list(words))
        context = click.Context(command, info_name=name, parent=context)
        names.append(name)
    return " ".join(names), command.make_context(names[-1], list(words)).params


def test_commands_are_those_of_the_programs(written):
    ray = pytest.importorskip("ray.scripts.scripts", reason='Ray is not installed: pip install "persia-recsys[ray]"')
    programs = {"persia": typer.main.get_command(app), "ray": ray.cli}
    names = Counter()
    for words in words_of(written):
        if words[0] in programs:
            name, _ = parsed(programs[words[0]], words[1:])
            names[f"{words[0]} {name}"] += 1
        else:
            assert words[0] in ("ulimit", "sleep")
    kinds = len(written.plan["hosts"])
    serving = {name: 1 for name, pod in SERVING.items() if pod in written.pods()}
    assert names == {
        "ray start": 1 + kinds, "ray health-check": kinds, "persia train": 1, "persia cluster wait-hosts": 1,
        "persia cluster wait-end": kinds, "persia cluster regions": kinds, **serving,
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [["train", "a.toml", "--continues"], ["clusters", "wait-end"], ["cluster", "wait-hosts", "many"], ["serve"]],
)
def test_the_parser_refuses(words):
    with pytest.raises(Exception, match=r"No such|valid integer|Missing"):
        parsed(typer.main.get_command(app), words)


def test_ports_and_routes_are_those_of_the_programs(volume):
    constants = pytest.importorskip("ray._private.ray_constants")
    from persia.serve.http.app import ROUTES
    from persia.serve.http.request_gate import OPEN

    server = container_of(volume.pods()["persia-serve"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["path"] in ROUTES & OPEN
    assert server["readinessProbe"]["httpGet"]["path"] == "/health"
    assert server["livenessProbe"]["httpGet"]["path"] == "/live"
    ports = {}
    for words in words_of(volume):
        for option, port in re.findall(r"--(port|dashboard-agent-listen-port)[= ](\d+)", " ".join(words)):
            ports[words[0], option] = int(port)
    assert ports["persia", "port"] == server["ports"][0]["containerPort"]
    driver = container_of(volume.pods()["persia-train"])
    assert ports["ray", "port"] == driver["ports"][0]["containerPort"] == constants.DEFAULT_PORT
    agent = pytest.importorskip("ray.dashboard.modules.reporter.healthz_agent")
    for name, template in volume.pods().items():
        if name.startswith("persia-hosts"):
            container = container_of(template)
            assert container["ports"][0]["containerPort"] == ports["ray", "dashboard-agent-listen-port"]
            path = container["livenessProbe"]["httpGet"]["path"]
            assert f'@routes.get("{path}")' in inspect.getsource(agent)


def amounts(container):
    limits = container["resources"]["limits"]
    assert container["resources"]["requests"] == limits
    return int(limits["cpu"]), int(limits["memory"].removesuffix("Mi")) * MIB


def started(words):
    return dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)


def test_hosts_have_what_the_plan_says(volume):
    sets = volume.of("StatefulSet")
    assert sets.keys() == {"persia-hosts-row-hosts", "persia-hosts-gpus"}
    starts = [started(words) for words in words_of(volume) if words[:2] == ["ray", "start"] and "--block" in words]
    for host, start in zip(volume.plan["hosts"], starts, strict=True):
        kind = host["kind"]
        each = sets[f"persia-hosts-{kind['name'].replace('_', '-')}"]
        container = container_of(each["spec"]["template"])
        cores, memory = amounts(container)
        assert (each["spec"]["replicas"], cores) == (host["number"], kind["cores"])
        assert kind["memory"] - MIB < memory <= kind["memory"]
        assert (int(start["num-cpus"]), int(start["memory"])) == (cores, memory)
        assert json.loads(start["resources"]) == {kind["name"]: 1}
        assert container["resources"]["limits"].get("nvidia.com/gpu") == (str(kind["gpus"]) if kind["gpus"] else None)
        assert start.get("num-gpus") == (str(kind["gpus"]) if kind["gpus"] else None)
        (shared,) = [v for v in each["spec"]["template"]["spec"]["volumes"] if v["name"] == "shm"]
        assert shared["emptyDir"]["medium"] == "Memory"
        size = int(shared["emptyDir"]["sizeLimit"].removesuffix("Mi")) * MIB
        servers = host["roles"].get("embedding_ps", 0)
        assert servers / host["number"] * host["reserved"] < size < memory


def test_roles_are_on_the_hosts_of_the_plan(volume, planned):
    """As a cluster places them, on hosts with the resources that their pods declare to Ray."""
    from persia.cli.configured_run import read_config

    run = read_config(str(volume.folder / "config.toml"), None)
    nodes = [RayNode("driver", "driver", {"CPU": 0.0}, {"CPU": 0.0}, {})]
    hosts = [words for words in words_of(volume) if words[:2] == ["ray", "start"] and "--block" in words]
    for host, words in zip(volume.plan["hosts"], hosts, strict=True):
        start = started(words)
        total = {
            "CPU": float(start["num-cpus"]), "memory": float(start["memory"]), REGIONS: 0.95 * float(start["memory"]),
            "GPU": float(start.get("num-gpus", 0)), **json.loads(start["resources"]),
        }  # fmt: skip
        name = host["kind"]["name"]
        nodes += [RayNode(f"{name}.{i}", f"{name}.{i}", total, total, {}) for i in range(host["number"])]
    (wait,) = [words for words in words_of(volume) if "wait-hosts" in words]
    assert int(wait[3]) == len(nodes) == 7
    cluster = run.cluster
    counts = {
        "embedding_ps": cluster.ps, "embedding_worker": cluster.embedding_workers,
        "data_loader": cluster.data_loaders, "nn_worker": cluster.nn_workers,
    }  # fmt: skip
    assert counts == {role["role"]: role["processes"] for role in volume.plan["roles"]}
    layout = HostLayout(demands_of(cluster.place, counts, cluster.ray), nodes)
    found = {role: {layout.node_of(role, rank).split(".")[0] for rank in range(n)} for role, n in counts.items()}
    assert found == {
        "embedding_ps": {"row_hosts"}, "embedding_worker": {"gpus"}, "data_loader": {"gpus"}, "nn_worker": {"gpus"},
    }  # fmt: skip
    assert len({layout.node_of("embedding_ps", rank) for rank in range(4)}) == 4


def test_the_configuration_is_the_run_in_pods(written):
    from persia.cli.configured_run import read_config

    run = read_config(str(written.folder / "config.toml"), None)
    assert (run.cluster.kind, run.cluster.ray.address) == ("ray", "auto")
    (train,) = [words for words in words_of(written) if words[:2] == ["persia", "train"]]
    assert train[2] == "/etc/persia/run/config.toml"
    assert train[train.index("--output") + 1] == run.trainer.checkpoint_dir
    assert "--continue" in train
    served = [words for words in words_of(written) if words[:2] == ["persia", "serve"]]
    assert [words[2] for words in served] == ([] if run.trainer.publish is None else [run.trainer.publish.url])
    places = [run.trainer.checkpoint_dir, *(words[2] for words in served)]
    local = [place for place in places if "://" not in place]
    assert all(place.startswith("/srv/persia/") for place in local)
    assert bool(local) == ("persia-storage" in written.of("PersistentVolumeClaim"))
    files = set(written.kustomization["configMapGenerator"][0]["files"])
    assert {"config.toml", "shared.py"} <= files <= written.files.keys()
    assert ("trainer.publish" in written.printed) == (run.trainer.publish is None)


def test_urls_stay(planned, tmp_path):
    written = Written(tmp_path, *planned(tmp_path, *CASES["urls"]))
    (train,) = [words for words in words_of(written) if words[:2] == ["persia", "train"]]
    (serve,) = [words for words in words_of(written) if words[:2] == ["persia", "serve"]]
    assert (train[4], serve[2]) == ("s3://bucket/run", "kafka://broker/rows")
    assert "storage.yaml" not in written.files


def test_rows_on_disk_have_a_claim(tmp_path):
    (tmp_path / "clicks.csv").write_text("id_0,id_1,click\n1,2,1\n")
    data = 'kind = "csv"\npath = "clicks.csv"\n[schema]\nlabels = ["click"]\nid_features = [\n'
    data += '  { name = "id_0", dim = 4, kind = "number" }, { name = "id_1", dim = 4, kind = "number" }]\n'
    data += 'tables = [{ name = "id_1", dim = 4, spill = "/mnt/ssd", capacity = 100_000_000 },\n'
    data += '  { name = "id_0", dim = 4, spill = "/mnt/other", capacity = 1_000_000 }]'
    run, count = re.subn(
        r'kind = "synthetic".*?(?=\n\[mode)', data, RUN.replace('imports = ["shared"]', ""), flags=re.DOTALL
    )
    assert count == 1
    (tmp_path / "run.toml").write_text(run)
    (tmp_path / "hosts.toml").write_text(HOSTS.replace('"10GB"', '"1GB"\ndisk = "100GB"', 1))
    save_rates(tmp_path / "rates.json", tmp_path / "run.toml")
    files = [tmp_path / name for name in ("run.toml", "hosts.toml", "rates.json", "out")]
    printed = plan_pods(*files, "--rows", "id_0=1e6", "--json", str(tmp_path / "plan.json"))
    written = Written(tmp_path / "out", printed, json.loads((tmp_path / "plan.json").read_text()))
    assert "clicks.csv: it must be in the image, or below /srv/persia" in printed
    rows = written.of("StatefulSet")["persia-hosts-row-hosts"]
    mounts = [each for each in container_of(rows["spec"]["template"])["volumeMounts"] if each["name"] == "disk"]
    found = {mount["mountPath"]: mount["subPath"] for mount in mounts}
    assert found == {"/mnt/other": "rows-0", "/mnt/ssd": "rows-1"}
    (claim,) = rows["spec"]["volumeClaimTemplates"]
    size = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) << 30
    (host,) = [each for each in written.plan["hosts"] if "embedding_ps" in each["roles"]]
    assert host["disk"] < size < 2 * host["disk"] + (2 << 30)
    assert problems(rows) == []


def test_row_servers_have_what_does_not_fit_into_a_server(planned, tmp_path):
    written = Written(tmp_path, *planned(tmp_path, *CASES["parts"]))
    rows = written.of("StatefulSet")["persia-rows"]
    parts = rows["spec"]["replicas"]
    (serve,) = [words for words in words_of(written) if words[:2] == ["persia", "serve"]]
    (part,) = [words for words in words_of(written) if words[:2] == ["persia", "serve-rows"]]
    assert part[2] == serve[2]
    assert part[part.index("--part") + 1] == f"0/{parts}"
    port = part[part.index("--address") + 1].rpartition(":")[2]
    addresses = [serve[i + 1] for i, word in enumerate(serve) if word == "--rows"]
    name = rows["spec"]["serviceName"]
    assert addresses == [f"tcp://persia-rows-{number}.{name}:{port}" for number in range(parts)]
    assert int(port) == container_of(rows["spec"]["template"])["ports"][0]["containerPort"]
    largest = max(host["kind"]["memory"] for host in written.plan["hosts"])
    served = 201_000_000 * (4 * 4 + 35)
    _, memory = amounts(container_of(rows["spec"]["template"]))
    assert 3 * served / parts < memory <= largest
    assert amounts(container_of(written.pods()["persia-serve"]))[1] < 2 * served < largest + 2 * served
    (rule,) = written.of("NetworkPolicy")["persia-rows"]["spec"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"] == written.pods()["persia-serve"]["metadata"]["labels"]
    assert rows["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_a_network_of_the_user_is_in_every_pod(volume):
    assert volume.files["own.py"].startswith("class Net")
    assert "own.py" in volume.kustomization["configMapGenerator"][0]["files"]
    (serve,) = [words for words in words_of(volume) if words[:2] == ["persia", "serve"]]
    assert serve[serve.index("--import") + 1] == "own"
    server = container_of(volume.pods()["persia-serve"])
    path = {each["name"]: each["value"] for each in server["env"]}["PYTHONPATH"]
    assert path in [mount["mountPath"] for mount in server["volumeMounts"]]


def test_pods_stop_cleanly(written):
    """The driver has time for its checkpoint, hosts for the driver, and servers for their last requests."""
    pods = written.pods()
    driver = pods.pop("persia-train")
    assert driver["spec"]["restartPolicy"] == "Never"
    job = written.of("Job")["persia-train"]["spec"]
    assert job["podReplacementPolicy"] == "Failed"
    stopped, evicted = job["podFailurePolicy"]["rules"]
    assert stopped["action"] == evicted["action"] == "Ignore"
    assert stopped["onExitCodes"]["containerName"] == container_of(driver)["name"]
    assert stopped["onExitCodes"]["values"] == [143]
    seconds = driver["spec"]["terminationGracePeriodSeconds"]
    assert seconds >= 60 + 2 * written.plan["checkpoint_seconds"] > 62
    server, _ = pods.pop("persia-serve", None), pods.pop("persia-rows", None)
    for template in pods.values():
        hook = container_of(template)["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[:3] == ["persia", "cluster", "wait-end"]
        assert template["spec"]["terminationGracePeriodSeconds"] > seconds
        assert int(hook[hook.index("--timeout") + 1]) > seconds
    if server is not None:
        container = container_of(server)
        drain = int(container["command"][container["command"].index("--drain-seconds") + 1])
        leave = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert 0 < drain + leave < server["spec"]["terminationGracePeriodSeconds"]


def test_rows_are_not_lost_to_evictions_and_updates(volume):
    budgets = {name: each["spec"]["maxUnavailable"] for name, each in volume.of("PodDisruptionBudget").items()}
    assert budgets == {"persia-hosts-row-hosts": 0, "persia-hosts-gpus": 1, "persia-serve": 1}
    sets = volume.of("StatefulSet")
    assert {each["spec"]["updateStrategy"]["type"] for each in sets.values()} == {"OnDelete"}
    apart = sets["persia-hosts-row-hosts"]["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    (term,) = apart["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "hosts-row-hosts"
    update = volume.of("Deployment")["persia-serve"]["spec"]["strategy"]["rollingUpdate"]
    assert update == {"maxSurge": 1, "maxUnavailable": 0}


def test_regions_on_a_disk_have_a_claim(planned, tmp_path):
    written = Written(tmp_path, *planned(tmp_path, *CASES["training"]))
    sets = written.of("StatefulSet")
    rows = sets["persia-hosts-row-hosts"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container_of(rows["spec"]["template"])["volumeMounts"]}
    assert mounts["/mnt/regions"] == "disk"
    (claim,) = rows["spec"]["volumeClaimTemplates"]
    size = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) << 30
    (host,) = [each for each in written.plan["hosts"] if "embedding_ps" in each["roles"]]
    assert size > host["memory"]
    assert "volumeClaimTemplates" not in sets["persia-hosts-gpus"]["spec"]
    (clean,) = {tuple(words) for words in words_of(written) if words[:3] == ["persia", "cluster", "regions"]}
    assert clean[-2:] == ("--directory", "/mnt/regions")


def test_pods_have_few_rights(written):
    assert all(each["automountServiceAccountToken"] is False for each in written.of("ServiceAccount").values())
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (user,) = re.findall(r"--uid (\d+)", dockerfile)
    assert re.search(r"apt-get install [^&]*\btini\b", dockerfile)
    for template in written.pods().values():
        spec, container = template["spec"], container_of(template)
        assert spec["automountServiceAccountToken"] is False
        security = spec["securityContext"]
        assert security["runAsUser"] == security["fsGroup"] == int(user)
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        secrets = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        assert {secret["defaultMode"] for secret in secrets} == {0o400}


@pytest.mark.processes
def test_kustomize_renders(volume):
    """With kubectl's own kustomize, which needs no cluster."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed.")
    done = subprocess.run(["kubectl", "kustomize", str(volume.folder)], capture_output=True, text=True, check=True)
    rendered = list(yaml.safe_load_all(done.stdout))
    kinds = Counter(each["kind"] for each in rendered)
    assert kinds == Counter(each["kind"] for each in volume.objects) - Counter(PersistentVolumeClaim=1) + Counter(
        ConfigMap=1
    )
    for each in rendered:
        assert each["metadata"]["namespace"] == "persia"
        if each["kind"] != "ConfigMap":
            assert problems(each) == []
        template = each.get("spec", {}).get("template")
        if template is not None:
            assert container_of(template)["image"] == "registry.example.com/persia:latest"
    (config,) = [each for each in rendered if each["kind"] == "ConfigMap"]
    assert config["metadata"]["name"] == "persia-run"
    assert config["data"].keys() == {"config.toml", "shared.py", "own.py"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--set", "cluster.kind=embedded"], "Manifests are of a cluster: set cluster.kind = 'ray'"),
        (["--hosts", "clash.toml"], "needs distinct names of kinds of hosts"),
        (["--hosts", "long.toml"], "of at most 34 characters"),
        (["--hosts", "end.toml"], "the last a letter or digit"),
        (["--hosts", "small.toml"], "Set `spill` and `capacity` of id_0, id_1"),
    ],
)
def test_what_has_no_manifests(planned, tmp_path, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clash.toml").write_text(HOSTS.replace('"gpus"', '"row-hosts"'))
    (tmp_path / "long.toml").write_text(HOSTS.replace('"gpus"', f'"{"g" * 35}"'))
    (tmp_path / "end.toml").write_text(HOSTS.replace('"gpus"', '"gpus_"'))
    (tmp_path / "small.toml").write_text(HOSTS.replace('"10GB"', '"100MB"\ndisk = "100GB"', 1))
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned(tmp_path / "out", *overrides)
    assert not os.path.exists(tmp_path / "out")


def test_a_directory_that_cannot_be_made(planned, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Cannot write to .*file: .* Give another directory"):
        planned(tmp_path / "file")
