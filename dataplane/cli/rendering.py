"""The answer to ``status`` in words."""

import time
from typing import Any

from dataplane.verdict import MEANING, Verdict
from routing.route import FRAMING_VXLAN


def render_status(answer: dict[str, Any]) -> str:
    """The whole answer of a node, in lines."""
    if answer["state"] != "running":
        troubles = [f"trouble   {failure}" for failure in answer.get("failures", ())]
        return "\n".join([f"process {answer['pid']}: {answer['state']}", *troubles])
    lease, device, external = answer["lease"], answer["device"], answer["external"]
    framing = f"vxlan, VNI {answer['vni']}" if answer["framing"] == FRAMING_VXLAN else "bare IP"
    subnets = " and ".join(filter(None, (lease["subnet"], lease["ipv6_subnet"])))
    addresses = ", ".join(filter(None, (external["ipv4"], external["ipv6"])))
    ready = "" if answer["ready"] else ", not ready"
    lines = [
        f"node      process {answer['pid']}, up {answer['uptime_seconds']:.0f} s, version {answer['version']}{ready}",
        f"lease     {subnets}" + (f", VTEP {lease['vtep_mac']}" if lease["vtep_mac"] else "") + f", {_end(lease)}",
        _render_store(answer["store"]),
        f"device    {device['name']}, MTU {device['mtu']}",
        f"underlay  {external['interface']} ({addresses}), {framing}, UDP port {answer['port']}",
        f"drops     {device['queue_drops']} in the device's queue, {answer['socket_drops']} in the sockets",
        "offloads  " + ", ".join(f"{name} {state}" for name, state in answer["offloads"].items()),
    ]
    if firewall := answer["firewall"]:
        parts = [
            name for name, is_on in (("masquerading", firewall["masquerade"]), ("forwarding", firewall["forward"])) if is_on
        ]
        lines.append(f"rules     {' and '.join(parts)} in the nftables table {firewall['table']}")
    lines += [f"peers     {len(answer['peers'])}"]
    lines += [_render_peer(peer) for peer in answer["peers"]]
    lines += [f"            {one['key']} unreachable: {one['reason']}" for one in answer["unreachable"]]
    lines += [f"trouble   {failure}" for failure in answer["failures"]]
    lines += _render_wrappers(answer)
    for name in ("outbound", "inbound"):
        direction = answer[name]
        lines.append(f"{name:9s} {direction['received']} packets received")
        for verdict, count in direction["verdicts"].items():
            if count:
                lines.append(f"  {count:12d}  {verdict}: {MEANING[Verdict[verdict.upper()]]}")
    errors = answer["icmp_errors"]
    lines.append(f"ICMP      {errors['sent']} errors sent, {errors['suppressed']} suppressed by the rate limit")
    return "\n".join(lines)


def _end(lease: dict[str, Any]) -> str:
    if lease["expiration"] is None:
        return "for ever"
    return time.strftime("until %Y-%m-%d %H:%M:%S", time.localtime(lease["expiration"]))


def _render_store(store: dict[str, Any]) -> str:
    words = [store["kind"], *(f"at {store[place]}" for place in ("endpoint", "folder") if store.get(place))]
    if store["away_since"] is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(store["away_since"]))
        words.append(f", away since {since}: {store.get('trouble')}")
    claim = store.get("claim")
    if claim and claim["state"] == "lost":
        words.append(f", but {claim['holder']} claims the public address {claim['address']}, too")
    if store["skipped"]:
        words.append(f", {store['skipped']} entries that are no leases")
    return "store     " + " ".join(words).replace(" ,", ",")


def _render_peer(peer: dict[str, Any]) -> str:
    words = [f"            {peer['subnet']} at {peer['address']}", *filter(None, [peer["mac"]])]
    if "last_heard" in peer:
        heard = "never heard" if peer["last_heard"] is None else f"heard {_ago(peer['last_heard'])}"
        words.append(f"({peer['sent_packets']} packets sent, {peer['received_packets']} received, {heard})")
    return " ".join(words)


def _ago(moment: float) -> str:
    return f"{max(0.0, time.time() - moment):.0f} s ago"


def _render_wrappers(answer: dict[str, Any]) -> list[str]:
    """What ``--capture`` and ``--faults`` have to say."""
    lines = []
    if capture := answer.get("capture"):
        state = f", stopped: {capture['stopped']}" if capture["stopped"] else ""
        lines.append(f"capture   {capture['file']}, {capture['packets']} packets, {capture['bytes']} bytes{state}")
    if link := answer.get("link"):
        fates = ("lost", "duplicated", "corrupted", "reordered", "queue_full", "oversize")
        counts = ", ".join(f"{link[fate]} {fate}" for fate in fates if link[fate])
        lines.append(f"faults    {link['spec']}: of {link['sent']} datagrams {counts or 'none harmed'}")
    return lines
