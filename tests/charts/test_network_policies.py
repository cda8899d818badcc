"""Who may talk to whom in the cluster: nothing by default, and never the metadata addresses by way of a wide range."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.charts.rendering import (
    CASES,
    COMPONENTS,
    case_values,
    egress_blocks,
    of_component,
    of_kind,
    render,
    with_values,
)

METADATA = ("169.254.169.254/32", "fd00:ec2::254/128")
DNS = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
CIDR = "charts/coatcheck/templates/_cidr.tpl"


def network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text, strict=False)


def lies_strictly_inside(inner: str, outer: str) -> bool:
    """As the API server's validation has it."""
    small, large = network(inner), network(outer)
    if isinstance(small, ipaddress.IPv4Network) and isinstance(large, ipaddress.IPv4Network):
        return small != large and small.subnet_of(large)
    if isinstance(small, ipaddress.IPv6Network) and isinstance(large, ipaddress.IPv6Network):
        return small != large and small.subnet_of(large)
    return False


def proxy_policy(*cidrs: str, **network_policy: Any) -> dict[str, Any]:
    rules = [{"cidr": cidr, "ports": [{"port": 443}]} for cidr in cidrs]
    return of_component(
        render(with_values({"proxy": {"networkPolicy": {"egress": rules, **network_policy}}})), "NetworkPolicy", "proxy"
    )


@pytest.mark.guards(
    "charts/coatcheck/templates/networkpolicy.yaml", "policyTypes: [Ingress, Egress]", "policyTypes: [Ingress]"
)
@pytest.mark.parametrize("case", CASES)
def test_whatever_is_not_allowed_is_denied_both_ways(case: str) -> None:
    manifests = render(case_values(case))

    deny = of_component(manifests, "NetworkPolicy", "default-deny")

    assert deny["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in deny["spec"]
    assert "egress" not in deny["spec"]
    for component in COMPONENTS:
        labels = of_component(manifests, "Deployment", component)["spec"]["template"]["metadata"]["labels"]
        assert deny["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("case", CASES)
def test_no_rule_is_open_to_everybody(case: str) -> None:
    for policy in of_kind(render(case_values(case)), "NetworkPolicy"):
        for rule, direction in [
            *((rule, "from") for rule in policy["spec"].get("ingress", [])),
            *((rule, "to") for rule in policy["spec"].get("egress", [])),
        ]:
            assert rule[direction], "an empty list of peers is everybody"
            assert rule["ports"], "an empty list of ports is every port"
            for peer in rule[direction]:
                assert all(selector for selector in peer.values()), "an empty selector is every pod"


@pytest.mark.parametrize("component", COMPONENTS)
def test_names_are_resolved_over_udp_and_tcp_by_the_resolver_alone(component: str) -> None:
    policy = of_component(render(case_values("sqlite")), "NetworkPolicy", component)

    (dns,) = [rule for rule in policy["spec"]["egress"] if any(port["port"] == 53 for port in rule["ports"])]

    assert dns["ports"] == DNS
    assert dns["to"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        },
        {"ipBlock": {"cidr": "169.254.20.10/32"}},
    ]


def test_the_resolver_is_where_the_values_say() -> None:
    elsewhere = {"peers": [{"cidr": "10.96.0.10/32"}], "nodeLocalAddresses": []}

    policy = of_component(render(with_values({"networkPolicy": {"dns": elsewhere}})), "NetworkPolicy", "runtime")

    assert policy["spec"]["egress"][0] == {"to": [{"ipBlock": {"cidr": "10.96.0.10/32"}}], "ports": DNS}


@pytest.mark.guards(
    "charts/coatcheck/templates/_network.tpl",
    "(concat (first .).Values.networkPolicy.metadataAddresses (last .))",
    "(last .)",
)
@pytest.mark.parametrize(
    ("cidrs", "excepted"),
    [
        (["0.0.0.0/0"], [["169.254.169.254/32"]]),
        (["0.0.0.0/1", "128.0.0.0/1"], [[], ["169.254.169.254/32"]]),
        (["::/0"], [["fd00:ec2::254/128"]]),
        (["0.0.0.0/0", "::/0"], [["169.254.169.254/32"], ["fd00:ec2::254/128"]]),
        (["169.254.0.0/16"], [["169.254.169.254/32"]]),
        (["fc00::/7"], [["fd00:ec2::254/128"]]),
    ],
)
def test_a_range_that_holds_a_metadata_address_leaves_it_out(cidrs: list[str], excepted: list[list[str]]) -> None:
    policy = proxy_policy(*cidrs, exceptions=[])

    blocks = [block for block in egress_blocks(policy) if block["cidr"] in cidrs]

    assert [[address for address in METADATA if address in block.get("except", [])] for block in blocks] == excepted


def test_a_metadata_address_is_open_where_somebody_wrote_it() -> None:
    policy = proxy_policy("169.254.169.254/32")

    assert {"cidr": "169.254.169.254/32"} in list(egress_blocks(policy))


@pytest.mark.guards(CIDR, "{{- if ne (len $outerGroups) (len $innerGroups) -}}", "{{- if false -}}")
@pytest.mark.parametrize("component", ["controlPlane", "proxy", "runtime"])
def test_every_exception_is_of_its_ranges_family_and_inside_it(component: str) -> None:
    ranges = ["0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/1", "::/0", "8000::/1", "10.0.0.0/8", "169.254.169.254/32"]
    rules = [{"cidr": cidr, "ports": [{"port": 443}]} for cidr in ranges]

    manifests = render(with_values({component: {"networkPolicy": {"egress": rules}}}))

    blocks = [block for policy in of_kind(manifests, "NetworkPolicy") for block in egress_blocks(policy)]
    assert {block["cidr"] for block in blocks} >= set(ranges)
    for block in blocks:
        for exception in block.get("except", []):
            assert lies_strictly_inside(exception, block["cidr"]), f"{exception} in {block['cidr']}"


addresses_v4 = st.integers(0, 2**32 - 1).map(lambda number: str(ipaddress.IPv4Address(number)))
addresses_v6 = st.integers(0, 2**128 - 1).map(lambda number: str(ipaddress.IPv6Address(number)))


@st.composite
def nested_ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A range, and others that begin like it, so that many lie inside it and many just outside."""
    address = draw(addresses_v4 | addresses_v6)
    bits = ipaddress.ip_address(address).max_prefixlen
    others = []
    for _ in range(draw(st.integers(1, 6))):
        flipped = int(ipaddress.ip_address(address)) ^ (1 << draw(st.integers(0, bits - 1)))
        near = draw(st.sampled_from([address, str(ipaddress.ip_address(flipped)), draw(addresses_v4 | addresses_v6)]))
        if ipaddress.ip_address(near).max_prefixlen != bits and bits == 128:
            continue
        others.append(f"{near}/{draw(st.integers(1, ipaddress.ip_address(near).max_prefixlen))}")
    return f"{address}/{draw(st.integers(1, bits))}", others


@pytest.mark.guards(CIDR, "$inside := gt (atoi", "$inside := ge (atoi")
@pytest.mark.guards(CIDR, "{{- $bits := min 16 (max 0", "{{- $bits := min 8 (max 0")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(nested_ranges())
def test_the_chart_and_the_standard_library_agree_on_what_lies_inside_a_range(case: tuple[str, list[str]]) -> None:
    cidr, others = case

    policy = proxy_policy(cidr, exceptions=others)

    (block,) = [block for block in egress_blocks(policy) if block["cidr"] == cidr]
    expected = {other for other in others if lies_strictly_inside(other, cidr)}
    assert set(block.get("except", [])) & set(others) == expected


@pytest.mark.guards(
    "charts/coatcheck/templates/runtime/networkpolicy.yaml", "policyTypes: [Ingress, Egress]", "policyTypes: [Ingress]"
)
def test_the_runtime_reaches_the_resolver_the_control_plane_and_the_proxy_and_nothing_else() -> None:
    policy = of_component(render(case_values("sqlite")), "NetworkPolicy", "runtime")

    components = [
        (peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"], [port["port"] for port in rule["ports"]])
        for rule in policy["spec"]["egress"]
        for peer in rule["to"]
        if "app.kubernetes.io/component" in peer.get("podSelector", {}).get("matchLabels", {})
    ]

    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert components == [("control-plane", [8470]), ("proxy", [8471, 8472])]
    assert len(policy["spec"]["egress"]) == 3


@pytest.mark.parametrize(("component", "number"), [("proxy", 8473), ("control-plane", 8475)])
def test_metrics_are_for_those_who_read_them(component: str, number: int) -> None:
    policy = of_component(render(case_values("postgresql")), "NetworkPolicy", component)

    (metrics,) = [rule for rule in policy["spec"]["ingress"] if any(port["port"] == number for port in rule["ports"])]

    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert [port["port"] for port in metrics["ports"]] == [number]


def test_no_workload_may_use_the_proxy_until_it_is_named() -> None:
    policy = of_component(render(case_values("sqlite")), "NetworkPolicy", "proxy")

    by_peer = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: [port["port"] for port in rule["ports"]]
        for rule in policy["spec"]["ingress"]
        for peer in rule["from"]
    }

    assert by_peer == {"runtime": [8471, 8472], "control-plane": [8472]}, "the control plane tries new secrets"


def test_the_control_plane_has_no_way_to_the_internet() -> None:
    policy = of_component(render(case_values("sqlite")), "NetworkPolicy", "control-plane")

    dns, proxy = policy["spec"]["egress"]

    assert dns["ports"] == DNS
    assert proxy["ports"] == [{"port": 8472, "protocol": "TCP"}]
    (peer,) = proxy["to"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "proxy"
