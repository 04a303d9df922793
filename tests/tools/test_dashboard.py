"""deploy/grafana.json: its queries are PromQL, and a server exports each series and label in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import Expr, VectorSelector

from tests.served import Served
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.thorough

DASHBOARD: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "deploy" / "grafana.json").read_text(encoding="utf-8")
)
PANELS: Final[list[dict[str, Any]]] = DASHBOARD["panels"]
VARIABLES: Final = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
TARGETS: Final = [
    pytest.param(target, id=f"{panel['title']}, {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
BUILT_IN: Final = {"__rate_interval": "1m"}  # variables of Grafana itself
Series = dict[str, set[str]]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """Labels by series, of a server that has answered with accepted draft tokens."""
    model = write_tiny_llama(tmp_path_factory.mktemp("m") / "tiny", vocab_size=256, tokenizer=True)
    with Served(model, "--dtype", "float32", "--kv-cache-memory", "16MB", "--tree-size", "fixed") as served:
        request = {"prompt": "abc", "max_tokens": 24, "temperature": 0}
        text = served.post("/v1/completions", request).json()["choices"][0]["text"]
        served.post("/v1/completions", {**request, "prediction": text}).raise_for_status()
        metrics = served.get("/metrics").text
    found: Series = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def resolved(text: str) -> str:
    """The text as Grafana sends it when all models are selected."""
    values = {**BUILT_IN, **{name: one.get("allValue", "") for name, one in VARIABLES.items()}}
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda name: values[name[1] or name[2]], text)


def faults(query: str, legend: str, series: Series) -> list[str]:
    """Series and labels that the server does not export; raises ValueError for invalid PromQL."""
    found: list[str] = []
    labels = {"le"}  # of the series selected so far

    def visit(node: Expr) -> None:
        if isinstance(node, VectorSelector):
            name = node.name or ""
            if name not in series:
                found.append(f"no series {name}")
            labels.update(series.get(name, ()))
            wrong = {one.name for one in node.matchers.matchers} - series.get(name, set())
            found.extend(f"no label {label} of {name}" for label in wrong)

    promql_parser.walk(promql_parser.parse(resolved(query)), visit)
    grouped = {
        label for group in re.findall(r"\bby ?\(([^)]*)\)", query) for label in re.findall(r"\w+", group)
    }
    assert "without" not in query
    found += [f"no label {label} in {query}" for label in sorted(grouped - labels)]
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    return found + [f"no label {label} in the result" for label in sorted(shown - grouped)]


@pytest.mark.parametrize("target", TARGETS)
def test_queries_name_what_a_server_exports(target: dict[str, str], series: Series) -> None:
    assert faults(target["expr"], target["legendFormat"], series) == []


def test_variables_are_defined_and_used(series: Series) -> None:
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used == {*VARIABLES, *BUILT_IN}
    [(name, label)] = re.findall(r"^label_values\((\S+), (\w+)\)$", VARIABLES["model"]["query"])
    assert label in series[name]
