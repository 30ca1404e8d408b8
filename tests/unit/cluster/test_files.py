"""The files for `ray up` and Kubernetes, by their readers' schemas and by each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from paceline.cluster import session
from paceline.deploy import app
from paceline.deploy.cluster_app import for_cluster
from paceline.deploy.config.config import PacelineConfig

FILES = Path(__file__).parents[3] / "cluster"
ROOT = FILES.parent
RAY_UP = ("local", "aws", "gcp")
MANIFESTS = ("rayservice-cpu", "rayservice-gpu")
# What `paceline serve` gives every process of its own Ray must be there on a cluster too.
ENVIRONMENT = (
    session._ENVIRONMENT
    | app._SERVE_ENV
    | session.thread_environment(1)
    | {"RAY_AUTH_MODE": "token"}
)
OF_RAY = {"CPU", "GPU"}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FILES / f"{name}.yaml").read_text())
    return found


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file, by kind."""
    text = (FILES / "kubernetes" / f"{name}.yaml").read_text()
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def groups(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kind of pod of a RayService."""
    cluster = manifests(name)["RayService"]["spec"]["rayClusterConfig"]
    yield "head", cluster["headGroupSpec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group


def config_of(serve: dict[str, Any]) -> PacelineConfig:
    """The config that a file for `serve deploy` deploys, as a cluster gets it."""
    checked = ServeDeploySchema.model_validate(serve)
    (application,) = checked.applications
    assert application.import_path == "paceline.deploy.cluster_app:build"
    config = PacelineConfig.model_validate(application.args)
    assert config.replay.persist
    assert (config.drafts.general, config.drafts.placement) == ("auto", "pool")
    return for_cluster(config)


def asked(config: PacelineConfig) -> set[str]:
    """Custom resources that some role asks for."""
    roles = config.placement.model_dump(exclude={"surge"}).values()
    return {name for amounts in roles for name in amounts} - OF_RAY


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_takes_the_file(name: str) -> None:
    config = prepare_config(read(name))
    validate_config(config)
    mounts = dict(config["file_mounts"])
    assert mounts.pop("~/.ray/auth_token") == "~/.ray/auth_token"
    assert mounts == {"~/install": "dist/install"}


def test_rays_schema_is_one_that_refuses() -> None:
    with pytest.raises(jsonschema.ValidationError, match="setup_comands"):
        validate_config(prepare_config(read("local") | {"setup_comands": []}))


@pytest.mark.parametrize("name", RAY_UP)
def test_every_host_starts_ray_with_the_same_environment(name: str) -> None:
    config = read(name)
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        stop, start = commands
        assert stop == "ray stop"
        exports = re.match(r"export ([^;]*); ulimit -n 65536; ray start ", start)
        assert exports is not None
        assert dict(pair.split("=", 1) for pair in exports[1].split()) == ENVIRONMENT
    assert "--autoscaling-config=" in config["head_start_ray_commands"][1]
    assert "$RAY_HEAD_IP" in config["worker_start_ray_commands"][1]


@pytest.mark.parametrize("name", RAY_UP)
def test_hosts_install_as_the_makefile_and_the_image_do(name: str) -> None:
    """The pinned torch is there before DeepSpeed is, which is built beside it."""
    commands = read(name)["setup_commands"]
    torch, ours, again = (command for command in commands if "bin/pip install" in command)
    pinned = re.search(r"\$\((grep [^)]*) ~/install/constraints\.txt\)", torch)
    assert pinned is not None
    asked = f"{pinned[1]} {ROOT / 'constraints.txt'}"
    found = subprocess.run(asked, shell=True, capture_output=True, text=True, check=True).stdout
    makefile = (ROOT / "Makefile").read_text()
    assert re.fullmatch(r"torch==[\d.]+\n", found)
    assert {"setuptools", "wheel"} <= set(torch.split())
    for part in ("--no-build-isolation", "DS_BUILD_OPS"):
        assert part in makefile
        assert part in ours
    assert ours.startswith("DS_BUILD_OPS=0 ")
    assert "--constraint ~/install/constraints.txt " in ours
    assert commands.index(torch) < commands.index(ours) < commands.index(again)
    config = config_of(read("serve"))
    for model in (config.target.path, config.router.path):
        assert commands.index(again) < commands.index(f"~/paceline/bin/paceline models {model}")


@pytest.mark.parametrize("name", RAY_UP)
def test_a_rebuilt_wheel_is_installed_even_of_the_same_version(name: str, tmp_path: Path) -> None:
    """The newest of those that earlier `ray up`s have left; its dependencies stay."""
    pip, install = tmp_path / "paceline/bin/pip", tmp_path / "install"
    pip.parent.mkdir(parents=True)
    pip.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    pip.chmod(0o755)
    install.mkdir()
    for age, version in enumerate(("0.1.0", "0.2.0", "0.10.0")):
        wheel = install / f"paceline-{version}-py3-none-any.whl"
        wheel.touch()
        os.utime(wheel, (1000 - age, 1000 - age))
    for command in read(name)["setup_commands"]:
        if "paceline-*.whl" in command:
            subprocess.run(["bash", "-c", command], env=os.environ | {"HOME": str(tmp_path)})
    newest = f"{install}/paceline-0.1.0-py3-none-any.whl"
    first, again = (tmp_path / "calls").read_text().splitlines()
    assert first.endswith(f" {newest}")
    assert again == f"install --quiet --force-reinstall --no-deps {newest}"


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_a_cloud_has_a_type_for_every_role_and_trainers_come_and_go(name: str) -> None:
    types = read(name)["available_node_types"]
    given = {resource for kind in types.values() for resource in kind["resources"]} - OF_RAY
    assert asked(config_of(read("serve-gpu"))) <= given
    training = types["training"]
    assert training["min_workers"] == 0 < training["max_workers"]
    assert re.search("spot|preemptible", json.dumps(training["node_config"]))
    assert not re.search("spot|preemptible", json.dumps(types["serving"]["node_config"]))


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_a_cloud_s_shared_folder_is_mounted_and_then_ours(name: str) -> None:
    commands = read(name)["setup_commands"]
    (mount,) = (at for at, command in enumerate(commands) if "sudo mount -t nfs" in command)
    assert "nfs-common" in commands[0]
    assert "sudo chown" in commands[mount + 1]
    assert "test -w /srv/paceline ||" in commands[mount + 1]


def test_a_cloud_grows_with_the_target_s_replicas() -> None:
    config = config_of(read("serve-gpu"))
    assert config.target.autoscaling is not None
    most = config.target.autoscaling.max_replicas
    for name in ("aws", "gcp"):
        assert read(name)["available_node_types"]["serving"]["max_workers"] == most
    spec = manifests("rayservice-gpu")["RayService"]["spec"]
    config = config_of(yaml.safe_load(spec["serveConfigV2"]))
    assert config.target.autoscaling is not None
    cluster = spec["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is True
    (serving,) = (g for g in cluster["workerGroupSpecs"] if g["groupName"] == "serving")
    assert serving["maxReplicas"] == config.target.autoscaling.max_replicas
    assert serving["minReplicas"] == config.target.autoscaling.min_replicas


def test_a_pod_without_its_head_finishes_its_requests(tmp_path: Path) -> None:
    """`ray drain-node` fails there; the replicas are waited for and Ray is stopped all the same."""
    calls = tmp_path / "calls"
    for name, body in {
        "ray": f'echo "ray $1" >> {calls}; [ "$1" != drain-node ]',
        "pgrep": f'echo pgrep >> {calls}; [ "$(grep -c pgrep {calls})" -lt 3 ]',
        "sleep": "true",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(FILES / "kubernetes" / "drain.sh"), "30"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0
    assert calls.read_text().split("\n")[:-1] == ["ray drain-node", *["pgrep"] * 3, "ray stop"]
    assert "RAY_AUTH_MODE" in done.stderr


def test_the_fractions_of_a_gpu_leave_room_for_the_experts() -> None:
    config = config_of(read("serve-gpu"))
    assert config.placement.target["GPU"] + len(config.drafts.experts) * config.drafts.num_gpus <= 1
    assert config.placement.trainer_is_apart


def test_local_hosts_have_room_for_every_role_and_replica() -> None:
    lines = re.findall(r'# +(\S+) +(\{".*\})\n', (FILES / "local.yaml").read_text())
    hosts = {address: json.loads(resources) for address, resources in lines}
    provider = read("local")["provider"]
    assert list(hosts) == [provider["head_ip"], *provider["worker_ips"]]
    config = config_of(read("serve"))
    assert asked(config) == {name for resources in hosts.values() for name in resources}
    assert config.placement.target["serving"] == 1
    room = sum(resources.get("serving", 0) for resources in hosts.values())
    assert room == config.target.num_replicas


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifest_has_fields_of_the_crd_alone(name: str) -> None:
    schema = yaml.safe_load(Path(__file__).with_name("rayservice_schema.yaml").read_text())
    service = manifests(name)["RayService"]
    jsonschema.validate(service, schema)
    service["spec"]["rayClusterConfig"]["workerGroupSpec"] = []
    with pytest.raises(jsonschema.ValidationError, match="workerGroupSpec"):
        jsonschema.validate(service, schema)


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_have_what_the_application_asks_for(name: str) -> None:
    service = manifests(name)["RayService"]["spec"]
    config = config_of(yaml.safe_load(service["serveConfigV2"]))
    given: set[str] = set()
    for _, group in groups(name):
        # KubeRay puts the value on a command line as it stands: JSON within a quoted string
        given |= json.loads(json.loads(group["rayStartParams"]["resources"])).keys()
    assert asked(config) <= given
    replicas = {kind: group.get("replicas", 1) for kind, group in groups(name)}
    assert replicas["front"] == config.ingress.num_replicas
    bounds = config.target.autoscaling
    assert replicas["serving"] == (
        config.target.num_replicas if bounds is None else bounds.min_replicas
    )
    assert config.placement.trainer_is_apart


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_carry_secrets_storage_and_environment(name: str) -> None:
    claim = manifests(name)["PersistentVolumeClaim"]["metadata"]["name"]
    cluster = manifests(name)["RayService"]["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    operators = {"RAY_AUTH_MODE"}  # and the token: set by it, from a secret of its own
    for kind, group in groups(name):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        given = {variable["name"]: variable for variable in container["env"]}
        plain = {key: given[key].get("value") for key in given if "value" in given[key]}
        assert plain == {k: v for k, v in ENVIRONMENT.items() if k not in operators}, kind
        secrets = {key for key in given if "secretKeyRef" in given[key].get("valueFrom", {})}
        assert secrets == {"PACELINE_API_KEYS"}
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
        assert container["volumeMounts"][0]["mountPath"] == "/srv/paceline"
        assert pod["securityContext"]["runAsNonRoot"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_serves_drains_before_it_is_killed(name: str) -> None:
    for kind, group in groups(name):
        pod = group["template"]["spec"]
        hook = pod["containers"][0].get("lifecycle", {}).get("preStop")
        if kind in ("front", "serving"):
            *_, script, seconds = hook["exec"]["command"]
            assert Path(script).name == "drain.sh"
            assert int(seconds) + 5 + 20 < pod["terminationGracePeriodSeconds"]
        else:
            assert hook is None


@pytest.mark.parametrize("name", MANIFESTS)
def test_requests_go_to_the_pods_with_an_ingress(name: str) -> None:
    service = manifests(name)["Service"]["spec"]
    serve = yaml.safe_load(manifests(name)["RayService"]["spec"]["serveConfigV2"])
    labels = {kind: group["template"]["metadata"]["labels"] for kind, group in groups(name)}
    chosen = [kind for kind in labels if service["selector"].items() <= labels[kind].items()]
    assert chosen == ["front"]
    (port,) = service["ports"]
    front = dict(groups(name))["front"]["template"]["spec"]["containers"][0]
    assert (
        port["targetPort"]
        == serve["applications"][0]["args"]["port"]
        == front["ports"][0]["containerPort"]
    )
    assert front["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": port["targetPort"]}


def test_the_two_manifests_differ_in_gpus_alone() -> None:
    cpu, gpu = (dict(groups(name)) for name in MANIFESTS)
    assert cpu.keys() == gpu.keys()
    for kind in ("serving", "training"):
        limits = gpu[kind]["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == "1"
    assert not re.search("nvidia|cuda", json.dumps(manifests("rayservice-cpu")))


def test_the_image_is_made_of_what_is_there_and_does_not_run_as_root() -> None:
    text = (FILES / "kubernetes" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    instructions = [line.split(maxsplit=1) for line in lines]
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "CMD"}
    assert {word for word, _ in instructions} <= known
    for word, rest in instructions:
        if word == "COPY" and not rest.startswith("--from="):
            *sources, _ = rest.split()
            assert [source for source in sources if not (ROOT / source).exists()] == []
        if word == "FROM":
            assert re.match(r"python:3\.\d+-slim-bookworm", rest)
    users = [rest for word, rest in instructions if word == "USER"]
    assert users == ["paceline"]
    spec = manifests("rayservice-cpu")["RayService"]["spec"]
    config = config_of(yaml.safe_load(spec["serveConfigV2"]))
    for model in (config.target.path, config.router.path):
        fetched = instructions.index(["RUN", f"paceline models {model}"])
        assert fetched > instructions.index(["USER", "paceline"])  # into the home that serves
    scripts = [spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1]
               for _, group in groups("rayservice-cpu")
               if "lifecycle" in (spec := group["template"]["spec"])["containers"][0]]  # fmt: skip
    assert set(scripts) == {"/home/paceline/drain.sh"}
    assert (FILES / "kubernetes" / "drain.sh").exists()
