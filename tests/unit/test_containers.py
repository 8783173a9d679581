"""The image, the composition and the dashboard as files: what can be known of them without an engine that runs them."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from parapply.config import load_config
from parapply.metrics.table import METRICS, PROCESS_METRICS

if TYPE_CHECKING:
    from compose_spec import PyCompose

ROOT = Path(__file__).parents[2]
_DOCKER = ROOT / "config" / "docker"
_DASHBOARD = _DOCKER / "grafana" / "dashboards" / "parapply.json"
_DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsed() -> PyCompose:
    """docker-compose.yml as the specification reads it, its anchors and merges resolved."""
    from compose_spec import PyOptions  # noqa: PLC0415  half a second for each process that collects tests

    return PyOptions(apply_merge=True).from_yaml((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def composition(parsed: PyCompose) -> dict[str, Any]:
    """The same as it is written."""
    return parsed.to_dict()


def test_the_composition_keeps_to_the_specification(parsed: PyCompose) -> None:
    """Every key and value is one of the Compose specification, and what services refer to is defined."""
    parsed.validate()
    assert set(parsed.service_names()) == {"publisher", "subscriber", "init", "parapply", "prometheus", "grafana"}


def test_every_file_of_the_composition_is_there(composition: dict[str, Any]) -> None:
    """Secrets, environment and mounted files are in the repository, and services wait for services that exist."""
    named = [secret["file"] for secret in composition["secrets"].values()]
    for service in composition["services"].values():
        named += [service["env_file"]] if "env_file" in service else []
        named += [volume.split(":")[0] for volume in service.get("volumes", []) if str(volume).startswith("./")]
        assert set(service.get("depends_on", {})) <= set(composition["services"])
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_daemons_environment_is_configuration(composition: dict[str, Any]) -> None:
    """The daemon understands the settings of the composition and the image, with the secrets from their files."""
    told = "\n".join(re.findall(r"^ENV .*$", _DOCKERFILE, re.MULTILINE))
    environ: dict[str, str] = dict(re.findall(r"(PARAPPLY_[A-Z_]+)=(\S+)", told))
    lines = (ROOT / composition["services"]["parapply"]["env_file"]).read_text(encoding="utf-8").splitlines()
    environ |= dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    files = {f"/run/secrets/{name}": str(ROOT / secret["file"]) for name, secret in composition["secrets"].items()}
    config = load_config(None, environ={name: files.get(value, value) for name, value in environ.items()})
    assert "user=parapply_source" in config.source.dsn.get_secret_value()
    assert "user=parapply_target" in config.target.dsn.get_secret_value()
    assert config.metrics.listen is not None
    port = config.metrics.listen.port
    assert f":{port}/healthz/live" in _DOCKERFILE
    assert f"EXPOSE {port}\n" in _DOCKERFILE
    assert f"parapply:{port}" in (_DOCKER / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")


def test_the_image_is_made_from_what_is_there() -> None:
    """Each file that is copied exists and reaches the builder; nothing runs as root; the compiler stays behind."""
    build, image = re.split(r"^FROM ", _DOCKERFILE, flags=re.MULTILINE)[1:]
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"
    ]
    for line in re.findall(r"^COPY (?!--)(.*) \S+$", build, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name
            assert any(fnmatch.fnmatch(name, pattern) for pattern in allowed), name
    assert "gcc" in build
    assert "gcc" not in image
    assert image.index("USER nobody") < image.index("ENTRYPOINT")
    assert "HEALTHCHECK" in image


def test_scripts_are_shell() -> None:
    """The scripts that the servers' images run at their first start are read by bash without complaint."""
    scripts = sorted(_DOCKER.glob("*.sh"))
    assert len(scripts) == 2
    for script in scripts:
        done = subprocess.run(
            [shutil.which("bash") or "bash", "-n", script], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), script


def _expressions() -> list[str]:
    panels = json.loads(_DASHBOARD.read_text(encoding="utf-8"))["panels"]
    alerts = (_DOCKER / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    return [target["expr"] for panel in panels for target in panel["targets"]] + re.findall(
        r"^ +expr: (.*)$", alerts, re.MULTILINE
    )


def test_queries_name_metrics_and_labels_that_exist() -> None:
    """Each query of dashboard and alarms uses names and labels of the table of metrics, and counters under a rate."""
    known = {one.name: one for one in (*METRICS, *PROCESS_METRICS)}
    known |= {f"{one.name}_bucket": one for one in METRICS if one.kind == "histogram"}
    for expression in _expressions():
        bare = re.sub(r'"[^"]*"|\$\w+', "", expression)
        names = set(re.findall(r"\b(?:parapply|process)_\w+", bare))
        assert names or "up{" in expression, expression
        assert names <= set(known), expression
        labels = {word.strip() for group in re.findall(r"by \(([^)]*)\)", bare) for word in group.split(",")}
        assert labels <= {"slot", "le"}.union(*(known[name].labels for name in names)), expression
        for name in names:
            counts = known[name].kind != "gauge"
            assert counts == bool(re.search(rf"(rate|increase)\({name}", expression)), expression


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    """Panels have separate numbers, none lies over another, and each has a description of one line."""
    panels = json.loads(_DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        assert panel["description"].endswith(".")
        taken |= cells
