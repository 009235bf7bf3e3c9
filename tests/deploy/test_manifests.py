"""Tests that the kustomizations in deploy/kubernetes build, fit Kubernetes' schemas, and are consistent in themselves.

No cluster is needed, and none has run these manifests: schemas and this project's parsers check them.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from specdec.inference import VERSION
from specdec.inference.cli.app import main
from specdec.inference.config import ROOT
from tests.deploy.consistency import arguments_of, faults, pod_of
from tests.deploy.kustomize import (
    COMPILED,
    KUBERNETES,
    KUSTOMIZATIONS,
    OVERLAYS,
    Manifest,
    complaints,
    manifests,
    need_kubectl,
    of_kind,
    with_components,
)
from tests.test_tutorials import check_role, regime

pytestmark = pytest.mark.deploy

VERSIONS = ("1.34", "1.36")
"""Kubernetes versions to check: the oldest and the newest; what both accept, all versions between them accept."""
TRN2_CPUS = 191
"""CPUs of a trn2.48xlarge that pods may use; the kubelet reserves less than one of its 192."""
EVERY_NODE_CPUS = 0.5
"""CPUs that are taken on every node, by the kubelet and by pods that run everywhere, rounded up."""
SCHEMAS = Path(__file__).parent / "schemas"


@pytest.fixture(autouse=True)
def in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in the repository's root, where paths in manifests exist; skip it if kubectl cannot build them."""
    need_kubectl()
    monkeypatch.chdir(ROOT)


def validated(documents: list[Manifest], version: str, folder: Path) -> str:
    """Return the errors of kubernetes-validate about manifests of kinds that are built into Kubernetes; "" if none."""
    file = folder / "all.yaml"
    each_once = {json.dumps(each): each for each in documents}.values()
    file.write_text(yaml.dump_all(each_once, Dumper=yaml.CSafeDumper))
    return complaints("kubernetes-validate", "--strict", "--quiet", "--no-warn", "-k", version, file)


def custom_faults(kind: str, documents: list[Manifest]) -> str:
    """Return one line for each custom resource of this kind that breaks its schema; empty if none does."""
    schema = json.loads((SCHEMAS / f"{kind}.json").read_text())
    checker = jsonschema.validators.validator_for(schema)(schema)
    found = ((number, error) for number, each in enumerate(documents) for error in checker.iter_errors(each))
    return "\n".join(f"{kind} {number}: {error.message}" for number, error in found)


def core(documents: list[Manifest]) -> list[Manifest]:
    """Return the manifests whose kind is built into Kubernetes."""
    return [each for each in documents if not (SCHEMAS / f"{each['kind']}.json").exists()]


def custom(documents: list[Manifest]) -> list[Manifest]:
    return [each for each in documents if (SCHEMAS / f"{each['kind']}.json").exists()]


def check_custom(documents: list[Manifest]) -> set[str]:
    """Check all custom resources by the schemas of their kinds; return the kinds.

    Each schema must also find an unknown field.
    """
    kinds = {each["kind"] for each in custom(documents)}
    for kind in sorted(kinds):
        found = of_kind(documents, kind)
        assert custom_faults(kind, found) == ""
        unheard_of = {**found[0], "spec": {**found[0]["spec"], "unheardOf": 1}}
        assert "unheardOf" in custom_faults(kind, [unheard_of])
    return kinds


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_manifests_of_each_folder_are_consistent(folder: str) -> None:
    assert faults(manifests(KUBERNETES / folder)) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_all_of_it(version: str, tmp_path: Path) -> None:
    documents = [each for folder in KUSTOMIZATIONS for each in core(manifests(KUBERNETES / folder))]
    assert len(documents) > 60
    assert validated(documents, version, tmp_path) == ""


def test_custom_resources_fit_their_schemas() -> None:
    documents = [each for folder in KUSTOMIZATIONS for each in custom(manifests(KUBERNETES / folder))]
    assert {"NodePool", "EC2NodeClass", "PodMonitor", "PrometheusRule"} <= check_custom(documents)


def test_every_kind_has_a_schema() -> None:
    """Every kind of manifest has a schema: kubernetes-validate would only warn of one that it does not know."""
    known = {each["apiVersion"] for folder in KUSTOMIZATIONS for each in core(manifests(KUBERNETES / folder))}
    groups = "v1 apps/v1 batch/v1 policy/v1 autoscaling/v2 networking.k8s.io/v1 resource.k8s.io/v1 scheduling.k8s.io/v1"
    assert known <= set(groups.split())


@pytest.mark.parametrize("name", COMPILED)
def test_a_compile_job_is_its_server_but_for_compiling(name: str) -> None:
    server = of_kind(serving := manifests(KUBERNETES / "overlays" / name), "StatefulSet")[0]
    compiling = manifests(KUBERNETES / "compile" / name)
    job = of_kind(compiling, "Job")[0]
    served, compiled = arguments_of(server, serving), arguments_of(job, compiling)
    assert (served.pop("--compile"), compiled.pop("--compile")) == ("never", "only")
    assert served == compiled
    assert of_kind(compiling, "StatefulSet", "Deployment", "Service") == []
    classes = of_kind(manifests(KUBERNETES / "nodes" / "reserved"), "PriorityClass")
    assert pod_of(server)["priorityClassName"] in {each["metadata"]["name"] for each in classes}
    assert "priorityClassName" not in pod_of(job)


@pytest.mark.parametrize("name", COMPILED)
def test_a_server_waits_for_a_model_of_its_own_image(name: str) -> None:
    """A server's init container, which waits for the compiled model, has the server's own image.

    Regression: a server waited for any specdec.json, so one of a new SDK took what the old SDK had compiled.
    """
    [waiting] = pod_of(server := of_kind(manifests(KUBERNETES / "overlays" / name), "StatefulSet")[0])["initContainers"]
    assert waiting["image"] == pod_of(server)["containers"][0]["image"]
    [line] = re.findall(r"^until python3 main.py (.*); do$", waiting["args"][0], re.MULTILINE)
    check_role(line.split())


def cpus(workload: Manifest) -> float:
    """Return the CPUs that the first container of a workload's pod requests; init containers do not count."""
    return float(pod_of(workload)["containers"][0]["resources"]["requests"]["cpu"])


def test_a_compile_job_fits_beside_two_servers_and_drafts() -> None:
    """The Job that compiles a model fits on a node beside two servers and draft workers, and requests no devices.

    Regression: the Job requested CPUs and devices that two servers had, so each upgrade took the service down.
    """
    distributed = manifests(KUBERNETES / "overlays" / "trn2-distributed")
    fused = of_kind(manifests(KUBERNETES / "overlays" / "trn2-fused"), "StatefulSet")[0]
    near = next(each for each in of_kind(distributed, "Deployment") if each["metadata"]["name"] == "draft-near")
    job = of_kind(manifests(KUBERNETES / "compile" / "trn2-fused"), "Job")[0]
    assert "resourceClaims" not in pod_of(job)
    assert pod_of(job)["restartPolicy"] == "Never", "its log would go with its pod"
    assert cpus(of_kind(distributed, "StatefulSet")[0]) + cpus(fused) + cpus(near) + cpus(job) <= TRN2_CPUS


def test_far_drafts_fit_the_nodes_that_are_made_for_them() -> None:
    """A pod with a draft worker fits on the smallest node of the node pool for drafts, beside every node's own pods.

    Regression: these pods requested all 16 CPUs of a node, some of which daemons need, and stayed pending.
    """
    [pool] = of_kind(manifests(KUBERNETES / "nodes" / "drafts"), "NodePool")
    template = pool["spec"]["template"]
    sizes = {each["key"]: each["values"] for each in template["spec"]["requirements"]}
    distributed = of_kind(manifests(KUBERNETES / "overlays" / "trn2-distributed"), "Deployment")
    far = next(each for each in distributed if each["metadata"]["name"] == "draft-far")
    assert cpus(far) <= min(map(int, sizes["karpenter.k8s.aws/instance-cpu"])) - EVERY_NODE_CPUS
    assert pod_of(far)["nodeSelector"].items() <= template["metadata"]["labels"].items()
    assert {each["key"] for each in template["spec"]["taints"]} == {each["key"] for each in pod_of(far)["tolerations"]}
    assert "spot" in sizes["karpenter.sh/capacity-type"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_servers_of_every_overlay_ask_for_tokens(name: str) -> None:
    """Every server in every overlay requires access tokens from its clients; only the demo's gateway does not.

    Regression: three overlays had no tokens, and relied on network policies, which EKS does not enforce.
    """
    documents = manifests(KUBERNETES / "overlays" / name)
    for workload in of_kind(documents, "StatefulSet", "Deployment"):
        arguments = arguments_of(workload, documents)
        is_open = name == "cpu-demo" and arguments["--role"] == "gateway"  # a demo's curl needs no token
        assert ("--auth_file" in arguments) == (not is_open)
        assert ("--token_file" in arguments) == (arguments["--role"] in ("draft", "gateway"))


@pytest.mark.parametrize("name", COMPILED)
def test_nothing_but_its_operator_moves_a_server_that_loads_for_an_hour(name: str) -> None:
    documents = manifests(KUBERNETES / "overlays" / name)
    [server] = of_kind(documents, "StatefulSet")
    annotations = server["spec"]["template"]["metadata"]["annotations"]
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"
    budgets = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "PodDisruptionBudget")}
    assert budgets["target"]["maxUnavailable"] == 0
    assert budgets["target"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    for folder in ("nodes/reserved", "nodes/dynamic"):
        [pool] = of_kind(manifests(KUBERNETES / folder), "NodePool")
        drifted = [
            each for each in pool["spec"]["disruption"]["budgets"] if "Drifted" in each.get("reasons", ["Drifted"])
        ]
        assert drifted[0]["nodes"] == "0"


def images_of(documents: list[Manifest]) -> dict[str, set[str]]:
    """Return the tags of the images in a deployment's manifests, by the image's name without its registry."""
    tags: dict[str, set[str]] = {}
    for workload in of_kind(documents, "StatefulSet", "Deployment", "Job"):
        for container in (*pod_of(workload)["containers"], *pod_of(workload).get("initContainers", [])):
            name, _, tag = container["image"].rpartition("/")[2].partition(":")
            tags.setdefault(name, set()).add(tag)
    return tags


def test_one_place_sets_the_version_of_all_images(tmp_path: Path) -> None:
    """One file, version.env, sets the tag of all images of this project.

    Regression: a tag named a variant and no version, so nodes kept an old image under the same tag.
    """
    copy = tmp_path / "deploy"
    shutil.copytree(KUBERNETES.parent, copy)
    (copy / "kubernetes" / "components" / "version" / "version.env").write_text("VERSION=2.3.4-rc1\n")
    for folder in KUSTOMIZATIONS:
        ours = images_of(manifests(KUBERNETES / folder))
        ours.pop("python", None)
        assert set(ours) <= {"specdec-cpu", "specdec-cuda", "specdec-neuron", "specdec-vllm"}
        assert set().union(*ours.values()) <= {VERSION}, folder
        later = images_of(manifests(copy / "kubernetes" / folder))
        assert {name: tags for name, tags in later.items() if name != "python"} == {
            name: {"2.3.4-rc1"} for name in ours
        }


IMAGES = {
    "overlays/trn2-distributed": {"cpu", "neuron"},
    "overlays/gpu": {"cuda"},
    "overlays/gpu-vllm": {"cpu", "vllm"},
    "overlays/vllm-serve": {"cpu", "vllm"},
    "compile/trn2-fused": {"neuron"},
}


def test_an_image_is_what_its_role_needs() -> None:
    found = {folder: set(images_of(manifests(KUBERNETES / folder))) for folder in IMAGES}
    assert found == {folder: {f"specdec-{name}" for name in names} for folder, names in IMAGES.items()}


def test_vllm_and_the_pool_beside_it_have_one_mailbox(capsys: pytest.CaptureFixture[str]) -> None:
    """The manifests of vLLM's server and of the draft pool beside it fit together.

    vLLM's configuration file is what `vllm-config` prints, both containers mount the folder of the socket between them
    (the mailbox), and vLLM alone has the device.
    """
    documents = manifests(KUBERNETES / "overlays" / "vllm-serve")
    pool, vllm = pod_of(of_kind(documents, "StatefulSet")[0])["containers"]
    assert main(["--role", "vllm-config", "--gamma", "8", "--mailbox", "/mailbox/box"]) == 0
    [config] = (each for each in of_kind(documents, "ConfigMap") if "specdec.yaml" in each["data"])
    assert config["data"]["specdec.yaml"] == capsys.readouterr().out
    assert "--mailbox=/mailbox/box" in pool["args"]
    assert "--config=/etc/specdec/specdec.yaml" in vllm["args"]
    for container in (pool, vllm):
        assert {"name": "mailbox", "mountPath": "/mailbox"} in container["volumeMounts"]
    assert ("nvidia.com/gpu" in vllm["resources"]["limits"], len(pool["resources"]["limits"])) == (True, 1)


def test_services_that_are_compared_differ_in_nothing_but_drafts() -> None:
    """The servers that the benchmark compares, with and without drafts, differ in nothing else; none caches prefixes.

    Regression: the server without drafts reused a cached prefix, while the other read each prompt whole.
    """
    found = set()
    for name in COMPILED:
        server = of_kind(serving := manifests(KUBERNETES / "overlays" / name), "StatefulSet")[0]
        flags = arguments_of(server, serving)
        role = flags.pop("--role")
        found.add(regime(["--role", role, *(f"{flag}={value}" if value else flag for flag, value in flags.items())]))
    assert found == {(False, 0.0)}


def test_every_overlay_keeps_apart_from_the_others() -> None:
    namespaces, volumes = set(), set()
    for name in OVERLAYS:
        documents = manifests(KUBERNETES / "overlays" / name)
        namespaces.add(documents[0]["metadata"]["name"])
        volumes |= {each["metadata"]["name"] for each in of_kind(documents, "PersistentVolume")}
        apart = {each["metadata"].get("namespace") for each in documents} - {documents[0]["metadata"]["name"]}
        assert apart == {None}
    assert len(namespaces) == len(OVERLAYS)
    assert len(volumes) == len(COMPILED)


@pytest.mark.parametrize(("component", "fault"), [("xxl", "16 devices are 64 logical cores"), ("device-plugin", "")])
def test_a_server_may_get_its_devices_from_another_component(component: str, fault: str, tmp_path: Path) -> None:
    """A server's Neuron devices may come from another component; the checks find a wrong number of devices.

    The component replaces claims/xl of the overlay trn2-fused, whose server uses 32 logical cores; a whole instance has
    64.
    """
    overlay = (KUBERNETES / "overlays" / "trn2-fused" / "kustomization.yaml").read_text()
    copy = tmp_path / "overlay"
    copy.mkdir()
    (copy / "namespace.yaml").write_text((KUBERNETES / "overlays" / "trn2-fused" / "namespace.yaml").read_text())
    up = "/".join([".."] * len(copy.resolve().relative_to("/").parts))
    here = f"{up}/{KUBERNETES.relative_to('/')}"
    text = overlay.replace("../../", f"{here}/").replace("claims/xl\n", f"claims/{component}\n")
    (copy / "kustomization.yaml").write_text(text)
    documents = manifests(copy)
    assert validated(core(documents), "1.34", tmp_path) == ""
    found = faults(documents)
    assert bool(found) == bool(fault)
    assert all(fault in each for each in found)


def built_with(folder: Path, component: str, *overlays: str) -> list[list[Manifest]]:
    """Build overlays with one more component, check them as all overlays are checked, and return their manifests."""
    built = [with_components(folder, f"overlays/{each}", f"components/{component}") for each in overlays]
    assert [faults(documents) for documents in built] == [[]] * len(overlays)
    assert validated([each for documents in built for each in core(documents)], "1.34", folder) == ""
    for documents in built:
        check_custom(documents)
    return built


def test_the_component_tls_leaves_no_server_without_a_certificate(tmp_path: Path) -> None:
    for documents in built_with(
        tmp_path, "tls", "cpu-demo", "trn2-distributed", "trn2-fused", "gpu-vllm", "vllm-serve"
    ):
        assert len(of_kind(documents, "Certificate")) > 1
        for workload in of_kind(documents, "StatefulSet", "Deployment"):
            arguments = arguments_of(workload, documents)
            assert "--insecure" not in arguments
            assert "--tls_cert" in arguments or "--tls_ca" in arguments


def test_a_route_from_outside_leads_to_the_api(tmp_path: Path) -> None:
    """With the component `route`, clients outside the cluster reach the API, and no time limit cuts a stream.

    Regression: no overlay could be reached from outside of its cluster.
    """
    for documents in built_with(tmp_path, "route", "cpu-demo", "gpu"):
        [route] = of_kind(documents, "HTTPRoute")
        [rule] = route["spec"]["rules"]
        ports = {each["metadata"]["name"]: each["spec"]["ports"] for each in of_kind(documents, "Service")}
        assert [ports[each["name"]][0]["port"] for each in rule["backendRefs"]] == [rule["backendRefs"][0]["port"]]
        assert rule["timeouts"] == {"request": "0s"}


GONE = "(gone)"
"""Value in `MISTAKES` by which the field is removed."""
POD = "spec template spec"
SERVER = f"StatefulSet {POD} containers 0"
MISTAKES: dict[tuple[str, str, object], str] = {
    ("cpu-demo", "StatefulSet spec template metadata labels app.kubernetes.io/name", "spec"): "no pod has",
    ("trn2-fused", "ResourceClaimTemplate metadata name", "x"): "no ResourceClaimTemplate xl-trn2",
    ("trn2-fused", f"StatefulSet {POD} resourceClaims", GONE): "claims neurons, which the pod does not",
    ("trn2-fused", "ResourceClaimTemplate spec spec devices requests 0 exactly count", 4): (
        "4 devices are 16 logical cores, tp_degree is 32"
    ),
    ("trn2-baseline", "PersistentVolumeClaim metadata name", "x"): "no PersistentVolumeClaim models",
    ("cpu-demo", f"{SERVER} livenessProbe httpGet port", "grpc"): "at port grpc",
    ("cpu-demo", f"{SERVER} readinessProbe httpGet path", "/healthz"): "no server answers GET /healthz",
    ("cpu-demo", f"StatefulSet {POD} volumes 0 secret items", GONE): "there is no file /access/auth.toml",
    ("cpu-demo", f"{SERVER} ports 1 containerPort", 8001): "port http is 8001, --http_port 8000",
    ("cpu-demo", f"{SERVER} args +", "--max-model-len=1024"): "--max-model-len",
    ("cpu-demo", "ConfigMap data TARGET_MODEL", GONE): "a variable is not set",
    ("cpu-demo", "ConfigMap data TARGETS", "target-0.target:50051"): "no replica has the name target-0.target:50051",
    ("cpu-demo", "StatefulSet spec replicas", 1): "no replica has the name target-1.targets:50051",
    ("cpu-demo", f"Deployment/gateway {POD} containers 0 args +", "--target_host=api"): (
        "gateway: no replica has the name api:50051"
    ),
    ("trn2-distributed", f"Deployment/gateway {POD} containers 0 args +", "--connect_timeout_s=240"): (
        "gateway ends after 240 s, while a target may load for 3600"
    ),
    ("cpu-demo", f"StatefulSet {POD} terminationGracePeriodSeconds", 30): "may need 67",
    ("cpu-demo", f"StatefulSet {POD} securityContext runAsNonRoot", False): "it may run as root",
}
"""Mistakes to make, as (overlay, path of the field, wrong value), each with a part of the expected complaint."""


def spoil(documents: list[Manifest], place: str, value: object) -> None:
    """Change one field of the manifests, in place.

    `place` is a kind, or KIND/NAME, and the path of the field in that manifest, separated by spaces; "+" at its end
    appends to a list. The value GONE removes the field.
    """
    kind, *path = place.split()
    kind, _, name = kind.partition("/")
    holder: Any = next(each for each in of_kind(documents, kind) if name in ("", each["metadata"]["name"]))
    *parents, last = (int(part) if part.isdigit() else part for part in path)
    for part in parents:
        holder = holder[part]
    if last == "+":
        holder.append(value)
    elif value == GONE:
        del holder[last]
    else:
        holder[last] = value


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake[1]} {mistake[2]}")
def test_the_check_of_manifests_finds_each_planted_mistake(mistake: tuple[str, str, object]) -> None:
    overlay, place, value = mistake
    documents = manifests(KUBERNETES / "overlays" / overlay)
    spoil(documents, place, value)
    assert any(MISTAKES[mistake] in fault for fault in faults(documents)), faults(documents)
