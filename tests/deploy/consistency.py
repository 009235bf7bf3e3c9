"""Checks of a deployment's manifests beyond schemas: they refer only to what exists, and their command lines parse.

`faults` reads the manifests of one namespace, and returns a sentence for each inconsistency.
"""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.inference.config import ROOT, targets
from specdec.inference.errors import ConfigError
from tests.deploy.kustomize import Manifest, of_kind
from tests.test_tutorials import check_role

WORKLOADS = ("StatefulSet", "Deployment", "Job")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
PATHS = ("/livez", "/readyz")
HEALTH_NAMES = ("liveness", "readiness")
FORCED_END_S = 2
"""Most seconds that a server takes to end after its grace period, in which requests finish (docs/reliability.md)."""
CORES_PER_DEVICE = 8
BY_HAND = "access"
"""Name of the Secret that the script access.sh makes; no manifest has it, since manifests may not contain tokens."""


def faults(documents: list[Manifest]) -> list[str]:
    """Return a sentence for each inconsistency in the manifests of one namespace; none if there is no fault."""
    found = [*_unmatched_selectors(documents), *_missing_references(documents)]
    found += _impatience(documents)
    for workload in of_kind(documents, *WORKLOADS):
        name = f"{workload['kind']} {workload['metadata']['name']}"
        found += [f"{name}: {fault}" for fault in _workload_faults(workload, documents)]
    return found


def pod_of(workload: Manifest) -> Manifest:
    """Return the pod specification of a Deployment, StatefulSet or Job."""
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def arguments_of(workload: Manifest, documents: list[Manifest]) -> dict[str, str]:
    """Return the flags of a workload's server and their values, with variables replaced by the manifests' values.

    Return {} if the container runs no server of this project.
    """
    container = pod_of(workload)["containers"][0]
    if "command" in container:
        return {}
    variables = variables_of(workload, documents)
    words = [_expanded(word, variables) for word in container["args"]]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def variables_of(workload: Manifest, documents: list[Manifest]) -> dict[str, str]:
    """Return the environment variables that the manifests give to a workload's server."""
    container = pod_of(workload)["containers"][0]
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(documents, "ConfigMap")}
    variables: dict[str, str] = {}
    for source in container.get("envFrom", []):
        variables |= maps.get(source["configMapRef"]["name"], {})
    return variables | {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME) in a word as the kubelet does; variables that are not set stay as they are."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), word)


def _labels(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def _chosen(selector: Manifest, documents: list[Manifest]) -> list[Manifest]:
    """Return the workloads whose pods a label selector matches."""
    wanted = selector.get("matchLabels", {})
    among = selector.get("matchExpressions", [])
    return [
        each
        for each in of_kind(documents, *WORKLOADS)
        if wanted.items() <= _labels(each).items()
        and all(_labels(each).get(one["key"]) in one["values"] for one in among)
    ]


def _selectors(document: Manifest) -> Iterator[Manifest]:
    spec = document.get("spec", {})
    if document["kind"] == "Service":
        yield {"matchLabels": spec["selector"]}
    elif document["kind"] in ("PodDisruptionBudget", "PodMonitor"):
        yield spec["selector"]
    elif document["kind"] == "NetworkPolicy":
        yield spec["podSelector"]
        for rule in (*spec.get("ingress", []), *spec.get("egress", [])):
            peers = rule.get("from", rule.get("to", []))
            yield from (peer["podSelector"] for peer in peers if set(peer) == {"podSelector"})


def _unmatched_selectors(documents: list[Manifest]) -> Iterator[str]:
    has_servers = bool(of_kind(documents, "StatefulSet", "Deployment"))
    for document in documents if has_servers else ():  # a compile Job stands beside the policies of its servers
        name = f"{document['kind']} {document['metadata']['name']}"
        for selector in _selectors(document):
            chosen = _chosen(selector, documents)
            if not chosen and not _is_for_absent_role(document, documents):
                yield f"{name}: no pod has {selector}"
            yield from (f"{name}: {fault}" for each in chosen for fault in _unknown_ports(document, selector, each))


def _is_for_absent_role(document: Manifest, documents: list[Manifest]) -> bool:
    """Return whether a network policy is for a role of which the manifests have no server.

    The target's policy always admits draft workers and gateways.
    """
    has_others = any("--attach" in arguments_of(each, documents) for each in of_kind(documents, "Deployment"))
    return document["kind"] == "NetworkPolicy" and document["metadata"]["name"] == "target" and not has_others


def _unknown_ports(document: Manifest, selector: Manifest, workload: Manifest) -> Iterator[str]:
    names = {port["name"] for each in pod_of(workload)["containers"] for port in each.get("ports", [])}
    spec = document["spec"]
    if document["kind"] == "Service":
        wanted = [port["targetPort"] for port in spec["ports"]]
    elif document["kind"] == "NetworkPolicy" and selector == spec["podSelector"]:
        wanted = [port["port"] for rule in spec.get("ingress", []) for port in rule["ports"]]
    else:
        wanted = []
    yield from (f"{workload['metadata']['name']} has no port {port}" for port in wanted if port not in names)


def _missing_references(documents: list[Manifest]) -> Iterator[str]:
    there = {(each["kind"], each["metadata"]["name"]) for each in documents} | {("Secret", BY_HAND)}
    there |= {("Secret", each["spec"]["secretName"]) for each in of_kind(documents, "Certificate")}
    for document in documents:
        for kind, name in _references(document):
            if (kind, name) not in there:
                yield f"{document['kind']} {document['metadata']['name']}: there is no {kind} {name}"


def _references(document: Manifest) -> Iterator[tuple[str, str]]:
    spec = document.get("spec", {})
    if document["kind"] == "PersistentVolumeClaim":
        yield "PersistentVolume", spec["volumeName"]
    if document["kind"] == "HorizontalPodAutoscaler":
        yield spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]
    if document["kind"] == "NodePool":
        yield "EC2NodeClass", spec["template"]["spec"]["nodeClassRef"]["name"]
    if document["kind"] == "Certificate":
        yield "Issuer", spec["issuerRef"]["name"]
    if document["kind"] == "Issuer" and "ca" in spec:
        yield "Secret", spec["ca"]["secretName"]
    if document["kind"] == "StatefulSet":
        yield "Service", spec["serviceName"]
    if document["kind"] in WORKLOADS:
        yield from _pod_references(pod_of(document))


def _pod_references(pod: Manifest) -> Iterator[tuple[str, str]]:
    yield "ServiceAccount", pod["serviceAccountName"]
    for claim in pod.get("resourceClaims", []):
        yield "ResourceClaimTemplate", claim["resourceClaimTemplateName"]
    for volume in pod["volumes"]:
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        yield from (("ConfigMap", source["configMapRef"]["name"]) for source in container.get("envFrom", []))


def _workload_faults(workload: Manifest, documents: list[Manifest]) -> Iterator[str]:
    pod, arguments = pod_of(workload), arguments_of(workload, documents)
    selector = workload["spec"].get("selector", {}).get("matchLabels", {})
    if not selector.items() <= _labels(workload).items():
        yield f"its selector {selector} does not match its pods"
    yield from _pod_faults(pod)
    if arguments:
        yield from _argument_faults(arguments, documents)
        yield from _port_faults(pod["containers"][0], arguments)
        yield from _grace_faults(pod, arguments)
        yield from _file_faults(pod, arguments)
        yield from _device_faults(pod, arguments, documents)


def _pod_faults(pod: Manifest) -> Iterator[str]:
    if pod["securityContext"].get("runAsNonRoot") is not True:
        yield "it may run as root"
    volumes = {volume["name"] for volume in pod["volumes"]}
    claims = {claim["name"] for claim in pod.get("resourceClaims", [])}
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        name, security = container["name"], container["securityContext"]
        if security != security | {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}:
            yield f"{name} may write to its root, or gain privileges"
        if security["capabilities"] != {"drop": ["ALL"]}:
            yield f"{name} has capabilities"
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        yield from (f"{name} mounts {each}, which is no volume" for each in sorted(mounts - volumes))
        resources = container.get("resources", {})
        wanted = {claim["name"] for claim in resources.get("claims", [])}
        yield from (f"{name} claims {each}, which the pod does not" for each in sorted(wanted - claims))
        if "memory" not in resources.get("limits", {}) or "cpu" not in resources.get("requests", {}):
            yield f"{name} says not what it needs"


def check_arguments(arguments: Mapping[str, str]) -> None:
    """Check the flags of a server of this project, by their names with leading dashes.

    Raise SystemExit, ConfigError or AssertionError if the server would refuse them.
    """
    rest = [f"{name}={value}" if value else name for name, value in arguments.items() if name != "--role"]
    check_role(["--role", arguments["--role"], *rest])


def needed_s(arguments: Mapping[str, str]) -> float:
    """Return the most seconds that a server with these flags takes to end after SIGTERM."""
    return float(arguments.get("--drain_delay_s", 0)) + float(arguments.get("--grace_s", 0)) + FORCED_END_S


def _argument_faults(arguments: Mapping[str, str], documents: list[Manifest]) -> Iterator[str]:
    """Yield a sentence for each wrong flag, each unset variable, and each address that no Service makes reachable."""
    role = arguments["--role"]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            check_arguments(arguments)
    except (SystemExit, ConfigError, AssertionError) as error:
        yield f"{role} does not take its flags: {error} {complaint.getvalue().strip()}"
    yield from (f"{name} is {value}: a variable is not set" for name, value in arguments.items() if "$(" in value)
    if of_kind(documents, "Service"):
        yield from (f"no replica has the name {address}" for address in _dialled(arguments) - _replicas(documents))


def _dialled(arguments: Mapping[str, str]) -> set[str]:
    named = arguments.get("--attach", arguments.get("--target_host", ""))
    return set(targets(named, int(arguments.get("--port", 50051))))


def _replicas(documents: list[Manifest]) -> set[str]:
    """Return all gRPC addresses: HOST:PORT of each replica, and dns:///SERVICE:PORT of each headless Service."""
    served = set()
    for service in of_kind(documents, "Service"):
        name, ports = service["metadata"]["name"], [port["port"] for port in service["spec"]["ports"]]
        hosts = [f"dns:///{name}"] if service["spec"].get("clusterIP") == "None" else []
        for each in of_kind(documents, "StatefulSet"):
            if each["spec"]["serviceName"] == name:
                hosts += [f"{each['metadata']['name']}-{i}.{name}" for i in range(each["spec"].get("replicas", 1))]
        served |= {f"{host}:{port}" for host in hosts for port in ports}
    return served


def _impatience(documents: list[Manifest]) -> Iterator[str]:
    """Yield a sentence for each gateway that waits for a target for less time than the target may take to load."""
    for target in of_kind(documents, "StatefulSet"):
        probe = pod_of(target)["containers"][0]["startupProbe"]
        loading_s = probe["periodSeconds"] * probe["failureThreshold"]
        for gateway in of_kind(documents, "Deployment"):
            waits_s = float(arguments_of(gateway, documents).get("--connect_timeout_s", "inf"))
            if waits_s < loading_s:
                yield f"{gateway['metadata']['name']} ends after {waits_s:g} s, while a target may load for {loading_s}"


def _port_faults(container: Manifest, arguments: Mapping[str, str]) -> Iterator[str]:
    ports = {port["name"]: str(port["containerPort"]) for port in container.get("ports", [])}
    if ports and arguments.get("--host") != "0.0.0.0":
        yield "it listens on loopback"
    http = "--http_port" if "--http_port" in arguments else "--metrics_port"
    flags = {"http": http, "grpc": "--port", "probes": "--probe_port"}
    for name, number in ports.items():
        if arguments.get(flags[name]) != number:
            yield f"port {name} is {number}, {flags[name]} {arguments.get(flags[name])}"
    for kind in PROBES:
        if kind in container:
            yield from (f"{kind}: {fault}" for fault in _probe_faults(container[kind], ports))
        elif ports and (arguments["--role"], kind) != ("pool", "readinessProbe"):  # vLLM beside it needs no pool
            yield f"it has no {kind}"


def _probe_faults(probe: Manifest, ports: Mapping[str, str]) -> Iterator[str]:
    if "grpc" in probe:
        if str(probe["grpc"]["port"]) != ports.get("grpc") or probe["grpc"].get("service") not in HEALTH_NAMES:
            yield f"gRPC health is not at {probe['grpc']}"
        return
    asked = probe["httpGet"]
    if asked["port"] not in ports or asked["port"] != "probes" or asked["path"] not in PATHS:
        yield f"no server answers GET {asked['path']} at port {asked['port']}"


def _file_faults(pod: Manifest, arguments: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each file of keys or access tokens that a flag names and no volume of the pod has."""
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    files = {
        f"{mounts[volume['name']]}/{name}"
        for volume in pod["volumes"]
        for name in _files_of(volume.get("secret", {"items": []}))
    }
    flags = ("--tls_cert", "--tls_key", "--tls_ca", "--auth_file", "--token_file")
    wanted = {arguments[flag] for flag in flags if flag in arguments}
    yield from (f"there is no file {file}" for file in sorted(wanted - files))


def _files_of(secret: Manifest) -> list[str]:
    """Return the names of the files in a Secret's volume: those that it lists, else the three of a certificate."""
    return [item["path"] for item in secret["items"]] if "items" in secret else ["tls.crt", "tls.key", "ca.crt"]


def _grace_faults(pod: Manifest, arguments: Mapping[str, str]) -> Iterator[str]:
    if pod["terminationGracePeriodSeconds"] <= needed_s(arguments):
        yield f"it is killed after {pod['terminationGracePeriodSeconds']} s, and may need {needed_s(arguments):g}"


def _device_faults(pod: Manifest, arguments: Mapping[str, str], documents: list[Manifest]) -> Iterator[str]:
    """Yield a sentence if a container claims more or fewer Neuron cores than its configuration file uses."""
    if "--config" not in arguments or arguments["--compile"] == "only":
        return
    settings = tomllib.loads((ROOT / arguments["--config"]).read_text())
    num_devices = _num_devices(pod, documents)
    num_cores = num_devices * CORES_PER_DEVICE // settings["neuron_config"]["logical_nc_config"]
    if settings["tp_degree"] != num_cores:
        yield f"{num_devices} devices are {num_cores} logical cores, tp_degree is {settings['tp_degree']}"


def _num_devices(pod: Manifest, documents: list[Manifest]) -> int:
    limits: Mapping[str, Any] = pod["containers"][0]["resources"].get("limits", {})
    names = [claim["resourceClaimTemplateName"] for claim in pod.get("resourceClaims", [])]
    requests = (
        each["spec"]["spec"]["devices"]["requests"][0]
        for each in of_kind(documents, "ResourceClaimTemplate")
        if each["metadata"]["name"] in names
    )
    claimed = sum(int(request.get("exactly", request)["count"]) for request in requests)
    return claimed + int(limits.get("aws.amazon.com/neuron", 0))
