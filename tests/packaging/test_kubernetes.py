"""The manifests of config/kubernetes, against the API's own schemas and against what the image and the daemon are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import parapply
from parapply.config import load_config

ROOT = Path(__file__).parents[2]
_MANIFESTS = ROOT / "config" / "kubernetes"
_ALERTS = ROOT / "config" / "docker" / "prometheus" / "alerts.yml"
_DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
#: Of the operator of Prometheus; everything else is the API's own.
_FOREIGN = "monitoring.coreos.com/v1"
#: Oldest that is tried, and the validator's newest.
_OLDEST = "1.27"
_SCRAPED = "parapply"

pytestmark = pytest.mark.kubernetes


@pytest.fixture(scope="module")
def resources() -> dict[tuple[str, str], dict[str, Any]]:
    """Return every resource by the name of its file and its kind."""
    import yaml  # noqa: PLC0415  comes with the validator, which may be missing

    return {
        (path.stem, one["kind"]): one
        for path in _MANIFESTS.glob("*.yaml")
        for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    }


def _pod(resource: dict[str, Any]) -> dict[str, Any]:
    pod = resource["spec"]["template"]["spec"]
    assert isinstance(pod, dict)
    return pod


def _metrics_labels(resources: dict[tuple[str, str], dict[str, Any]]) -> dict[str, str]:
    return dict(resources["parapply", "StatefulSet"]["spec"]["template"]["metadata"]["labels"])


def test_the_api_takes_every_resource(resources: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Each resource fits the schema of its kind, in which no unknown key is allowed."""
    import kubernetes_validate  # noqa: PLC0415  may be missing

    for version in (_OLDEST, kubernetes_validate.latest_version()):
        for one in resources.values():
            if one["apiVersion"] != _FOREIGN:
                kubernetes_validate.validate(one, version, strict=True)
    assert len(resources) == 8


def test_what_refers_to_another_finds_it(resources: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Names of secrets and maps, labels that select, and ports have what they mean."""
    labels = _metrics_labels(resources)
    service, monitor = resources["parapply", "Service"], resources["monitoring", "ServiceMonitor"]
    stateful, policy = resources["parapply", "StatefulSet"], resources["parapply", "NetworkPolicy"]
    assert service["spec"]["selector"] == stateful["spec"]["selector"]["matchLabels"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    # The alarms ask for this job; the pod of `init`, which ends, must not be one.
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == _SCRAPED
    assert not labels.items() <= resources["init", "Job"]["spec"]["template"]["metadata"]["labels"].items()
    (container,) = _pod(stateful)["containers"]
    ports = {one["name"] for one in container["ports"]}
    asked = {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")}
    asked |= {one["targetPort"] for one in service["spec"]["ports"]}
    assert asked == ports == {one["port"] for one in policy["spec"]["ingress"][0]["ports"]}
    assert {one["port"] for one in monitor["spec"]["endpoints"]} == {one["name"] for one in service["spec"]["ports"]}
    for pod in (_pod(stateful), _pod(resources["init", "Job"])):
        (container,) = pod["containers"]
        assert container["envFrom"] == [
            {"configMapRef": {"name": resources["parapply", "ConfigMap"]["metadata"]["name"]}}
        ]
        secrets = {one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
        assert secrets == {resources["secret", "Secret"]["metadata"]["name"]}
        volumes = {one["name"] for one in pod["volumes"]}
        if pod is _pod(stateful):
            volumes |= {one["metadata"]["name"] for one in stateful["spec"]["volumeClaimTemplates"]}
        assert {one["name"] for one in container["volumeMounts"]} == volumes


def test_the_environment_is_configuration(resources: dict[tuple[str, str], dict[str, Any]], tmp_path: Path) -> None:
    """The map, the secret's files and the image's own variables are a configuration that the daemon takes.

    The daemon removes or refuses what no longer fits before a volume is full.
    """
    told = "\n".join(re.findall(r"^ENV .*$", _DOCKERFILE, re.MULTILINE))
    environ: dict[str, str] = dict(re.findall(r"(PARAPPLY_[A-Z_]+)=(\S+)", told))
    environ |= resources["parapply", "ConfigMap"]["data"]
    for name, text in resources["secret", "Secret"]["stringData"].items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (container,) = _pod(resources["parapply", "StatefulSet"])["containers"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    environ = {name: value.replace(mounts["secret"], str(tmp_path)) for name, value in environ.items()}
    config = load_config(None, environ=environ)
    assert "user=parapply_source" in config.source.dsn.get_secret_value()
    assert "user=parapply_target" in config.target.dsn.get_secret_value()
    assert config.metrics.listen is not None
    assert config.metrics.listen.port == container["ports"][0]["containerPort"]
    # Its root is read-only, so both are volumes.
    used_bytes = {
        str(config.apply.spill_dir): config.apply.spill_limit_bytes,
        str(config.applylog.directory): config.applylog.retention_bytes + config.applylog.rotate_bytes,
    }
    claims = resources["parapply", "StatefulSet"]["spec"]["volumeClaimTemplates"]
    sizes = {mounts[one["metadata"]["name"]]: one["spec"]["resources"]["requests"]["storage"] for one in claims}
    assert sizes.keys() == used_bytes.keys()
    for path, n_bytes in used_bytes.items():
        # The file system of a volume takes a part of it.
        assert 0 < n_bytes < 0.9 * int(sizes[path].removesuffix("Gi")) * 2**30


def test_it_runs_as_the_images_user_with_no_rights(resources: dict[tuple[str, str], dict[str, Any]]) -> None:
    """No pod is root or can become it, none writes into its image, and the image is this version's."""
    assert re.search(r"^USER nobody$", _DOCKERFILE, re.MULTILINE)
    for resource in (resources["parapply", "StatefulSet"], resources["init", "Job"]):
        pod = _pod(resource)
        (container,) = pod["containers"]
        # Debian's `nobody` and `nogroup`.
        assert {pod["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {65534}
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["image"] == f"parapply:{parapply.__version__}"


def test_the_alarms_are_those_that_are_tried(resources: dict[tuple[str, str], dict[str, Any]]) -> None:
    """The operator's rules equal the rules of Prometheus' own file, each of which the tests make fire.

    Renew them below `spec:` by ``sed 's/^./  &/' config/docker/prometheus/alerts.yml``.
    """
    import yaml  # noqa: PLC0415  as above

    alerts = yaml.safe_load(_ALERTS.read_text(encoding="utf-8"))
    assert resources["monitoring", "PrometheusRule"]["spec"] == alerts
