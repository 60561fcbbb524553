"""The dashboard and the alerts ask for metrics that a running server exports; the health check reads them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradwire
import pytest
import yaml
from gradwire_server.observability.metrics import CATALOGUE
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from support.server import Server, free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS_LABELS = {"instance", "job"}
WITHOUT_SAMPLES_HERE = {
    "gradwire_device_memory_bytes",  # no GPU
    "gradwire_device_utilization_ratio",
    "gradwire_submissions_refused_total",  # by label; nothing was refused
}
GRAFANA = {"$__rate_interval": "5m", "$instance": ".*", "$metric": ".*"}


@dataclass(frozen=True)
class Selector:
    """What a query asks for: a metric's name, and its labels with the value that they must have, if it is one."""

    metric: str
    labels: tuple[tuple[str, str | None], ...]


def queries() -> dict[str, str]:
    """Every query of the dashboard and the alerts, by where it stands."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "gradwire.json").read_text())
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]:
        found |= {rule["alert"]: rule["expr"] for rule in group["rules"]}
    return found


def selectors(query: str) -> Iterator[Selector]:
    """The metrics and labels of a PromQL query; fails if it does not parse."""
    promql = pytest.importorskip("promql_parser")
    for variable, value in GRAFANA.items():
        query = query.replace(variable, value)
    nodes: list[Any] = []
    promql.walk(promql.parse(query), nodes.append)
    aggregations = [node for node in nodes if isinstance(node, promql.AggregateExpr) and node.modifier is not None]
    grouped = dict.fromkeys(label for node in aggregations for label in node.modifier.labels)
    for node in nodes:
        if not isinstance(node, promql.VectorSelector):
            continue
        equal = {each.name: each.value if each.op == promql.MatchOp.Equal else None for each in node.matchers.matchers}
        yield Selector(node.name, tuple((grouped | equal).items()))


@pytest.fixture(scope="module")
def metrics_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(tiny_model_path: Path, metrics_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--metrics-address", metrics_address, "--threads", "1", "--device", "cpu")
    running = Server(tiny_model_path, tmp_path_factory.mktemp("watched"), *flags).start()
    yield running
    assert running.end() == 0


def scraped(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
    return text


@pytest.fixture(scope="module")
async def exported(server: Server, metrics_address: str) -> dict[str, Metric]:
    """What the server exports when runs were trained, sampled from and held against a reference on it."""
    rows = [{"input_ids": [4, 5, 6, 7]}]
    pair = {"chosen_input_ids": [4, 5, 6, 7], "rejected_input_ids": [4, 5, 7, 6]}
    group = {"prompt_ids": [4, 5], "response_ids": [[6, 7], [8, 9]], "rewards": [0.0, 1.0]}
    async with gradwire.connect(server.address) as service:
        run = await service.create_run("tiny", lora=2)
        await run.forward_backward(rows, "causal_lm")
        await run.forward_backward([pair], "dpo", {"reference_model": "base"})
        await run.optim_step(learning_rate=1e-3)
        await run.forward_backward([group | {"old_log_probs": [[-1.0, -1.0], [-1.0, -1.0]]}], "grpo")
        await run.optim_step(learning_rate=1e-3)
        await run.sample([[4, 5]], max_tokens=2)
        with pytest.raises(gradwire.InvalidRequestError):
            await run.forward_backward([{"input_ids": [10**6]}], "causal_lm")
    text = ""
    async with asyncio.timeout(120):
        while 'result="hit"' not in text:  # what the engine counts comes with its next heartbeat
            text = await asyncio.to_thread(scraped, metrics_address)
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.mark.long
def test_every_query_finds_its_metric(exported: dict[str, Metric]) -> None:
    samples = [sample for family in exported.values() for sample in family.samples]
    labels = {spec.name: set(spec.labels) for spec in CATALOGUE}
    unanswered, asked = [], 0
    for place, query in queries().items():
        for selector in selectors(query):
            asked += 1
            if selector.metric == "up":  # made by Prometheus for every target
                continue
            wanted = {name: value for name, value in selector.labels if name not in PROMETHEUS_LABELS}
            if selector.metric in WITHOUT_SAMPLES_HERE:
                assert set(wanted) <= labels[selector.metric], place
                continue
            found = [
                sample
                for sample in samples
                if sample.name == selector.metric
                and all(
                    name in sample.labels and value in (None, sample.labels[name]) for name, value in wanted.items()
                )
            ]
            if not found:
                unanswered.append(f"{place}: {selector}")
    assert asked > 30
    assert not unanswered


def test_the_dashboard_is_one_that_grafana_can_place() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "gradwire.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {(place["x"] + across, place["y"] + down) for across in range(place["w"]) for down in range(place["h"])}
        assert not cells & covered, panel["title"]
        covered |= cells
        if panel["type"] != "row":
            assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    sources = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    (source,) = sources["datasources"]
    used = set(re.findall(r'"uid": "(\w+)"', json.dumps([panels, dashboard["templating"]])))
    assert used == {source["uid"]}
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["gradwire:9464"]}] and "gradwire" in compose


def test_the_row_of_the_engines_has_a_line_for_each() -> None:
    panels = json.loads((DEPLOY / "grafana" / "dashboards" / "gradwire.json").read_text())["panels"]
    row = next(number for number, panel in enumerate(panels) if panel["title"] == "Engines")
    lines = [target["legendFormat"] for panel in panels[row + 1 :] for target in panel.get("targets", ())]
    assert len(lines) == 6 and all("engine {{engine}}" in line for line in lines)


def test_the_alerts_of_the_documentation_are_those_of_prometheus() -> None:
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    (block,) = re.findall(r"^```promql\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    documented = {re.sub(r"\s+#.*", "", line) for line in block.splitlines()}
    deployed = {
        re.sub(r"\binstance, ", "", query) for place, query in queries().items() if place.startswith("Gradwire")
    }
    assert documented <= deployed


def healthcheck(address: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEPLOY / "healthcheck.py")]
    environment = os.environ | {"GRADWIRE_METRICS_ADDRESS": address}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.long
def test_the_health_check_tells_a_live_server_from_none(server: Server, metrics_address: str) -> None:
    live = healthcheck(metrics_address)
    assert (live.returncode, live.stderr) == (0, "")
    none = healthcheck("127.0.0.1:1")
    assert none.returncode == 1 and "no metrics on port 1" in none.stderr
