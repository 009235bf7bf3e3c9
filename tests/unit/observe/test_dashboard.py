"""The panels of the Grafana dashboard count each request once, and show each service, draft, server and account."""

from __future__ import annotations

import json
import re
from typing import Any

from specdec.inference.config import ROOT

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "specdec.json").read_text())
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_a_relayed_request_is_counted_once() -> None:
    """A request that passes through several processes is counted once, since panels sum over processes of one role."""
    role, instance = VARIABLES["role"], VARIABLES["instance"]
    assert not role["multi"]
    assert not role["includeAll"]
    assert 'role="$role"' in instance["query"]["query"]
    sums = [each for each in EXPRESSIONS if "sum" in each]
    assert len(sums) > 20
    for expression in sums:
        selectors = re.findall(r"(?:vllm:|specdec_)\w+(\{[^}]*\})?", expression)
        assert all('job=~"$job",instance=~"$instance"' in selector for selector in selectors), expression


def test_every_variable_reads_a_series_that_every_process_has() -> None:
    for name in ("job", "variant", "topology", "role", "instance", "model"):
        assert VARIABLES[name]["query"]["query"].startswith("label_values(specdec_server_info")


def test_two_services_stand_side_by_side() -> None:
    """The dashboard can compare variants of a service; "All" also matches time series without the label `variant`.

    Some Prometheus servers do not add this label.
    """
    for name in ("variant", "topology"):
        assert VARIABLES[name]["allValue"] == ".*"
        assert all(f'{name}=~"${name}"' in each for each in EXPRESSIONS)
    assert len([each for each in EXPRESSIONS if "by (variant, topology, app_kubernetes_io_version)" in each]) >= 2


def test_every_panel_has_a_place_of_its_own() -> None:
    places = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy)
        for panel in DASHBOARD["panels"]
        for dx in range(panel["gridPos"]["w"])
        for dy in range(panel["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_a_bad_draft_a_slow_replica_and_a_flooding_account_each_have_a_panel() -> None:
    """Panels have one line per draft, server and account, so that a bad one can be seen."""
    lines = {
        panel["title"]: (panel["targets"][0]["expr"], panel["targets"][0]["legendFormat"])
        for panel in DASHBOARD["panels"]
        if panel["targets"]
    }
    expression, legend = lines["Acceptance, by draft worker"]
    assert "{{pod}}" in legend
    assert 'role="draft"' in expression
    expression, legend = lines["Seconds per token, by server"]
    assert "{{server}}" in legend
    assert "$instance" not in expression
    assert "{{account}}" in lines["Tokens/s, by account"][1]
    assert "{{code}}" in lines["Requests/s, by account and end"][1]
