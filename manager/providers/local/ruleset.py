"""What the packet filter does with pods that have a network of their own, as nft(8) reads it. Pure.

One table for all pods of the machine; its rules tell pods by their interfaces' prefix, so that only two limits need
rules of a pod's own. The table's chains stand before others' of the same hooks and only ever refuse: what they let
pass, another firewall of the machine still judges.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from manager.egress.addresses import REFUSED_V4

TABLE: Final = "sojourn"
LINK_PREFIX: Final = "sj-"
FLOWS: Final = 4  # of anything but TCP, for each of a pod's connections
_PODS: Final = f'"{LINK_PREFIX}*"'
_REFUSE: Final = "goto refuse"

_TABLE: Final = f"""\
table inet {TABLE} {{
    set refused {{
        type ipv4_addr
        flags interval
        elements = {{ {", ".join(str(network) for network in REFUSED_V4)} }}
    }}
    set guarded {{
        type ifname
    }}
    map pods {{
        type ifname : verdict
    }}
    chain refuse {{
    }}
    chain from_pods {{
        type filter hook prerouting priority -310; policy accept;
    }}
    chain to_host {{
        type filter hook input priority -10; policy accept;
    }}
    chain across {{
        type filter hook forward priority -10; policy accept;
    }}
    chain outward {{
        type nat hook postrouting priority 100; policy accept;
    }}
}}
flush chain inet {TABLE} refuse
flush chain inet {TABLE} from_pods
flush chain inet {TABLE} to_host
flush chain inet {TABLE} across
flush chain inet {TABLE} outward
"""

# `refuse` lets a connection fail at once instead of hanging. A reset, which is not held back like ICMP's errors, and
# which gVisor heeds.
# `from_pods` comes before connection tracking and before anybody's DNAT: a pod's packet is judged by where the pod
# has sent it. `across` judges it once more by where DNAT, such as Docker's published ports, has turned it.
_RULES: Final = f"""\
table inet {TABLE} {{
    chain refuse {{
        meta l4proto tcp reject with tcp reset
        reject with icmp type admin-prohibited
    }}
    chain from_pods {{
        iifname != {_PODS} accept
        meta nfproto != ipv4 drop
        fib saddr . iif oif missing drop
        fib daddr type != unicast {_REFUSE}
        ip daddr @refused {_REFUSE}
    }}
    chain to_host {{
        iifname {_PODS} drop
    }}
    chain across {{
        iifname {_PODS} oifname {_PODS} drop
        iifname {_PODS} ip daddr @refused {_REFUSE}
        iifname {_PODS} ct state new iifname vmap @pods
        iifname {_PODS} ct state established,related accept
        iifname {_PODS} drop
        oifname {_PODS} ct state != {{ established, related }} drop
        iifname @guarded oifname != {_PODS} drop
    }}
    chain outward {{
        iifname {_PODS} masquerade
    }}
}}
"""


def table(guarded: Iterable[str]) -> str:
    """Makes the table, or puts its rules right, in one step; pods' own rules stay.

    `guarded`: interfaces that forward only for pods' sake, and nothing but pods' answers."""
    lines = [_TABLE, f"flush set inet {TABLE} guarded\n", _RULES]
    if names := ", ".join(f'"{name}"' for name in guarded):
        lines.append(f"add element inet {TABLE} guarded {{ {names} }}\n")
    return "".join(lines)


def pod(link: str, connections: int, refused: Iterable[str]) -> str:
    """A pod's own chain: new connections only. Fails where the table is missing. `refused`: the operator's networks.

    The kernel remembers a UDP flow for half a minute, a name that was looked up among them: hence their own count."""
    chain = _chain(link)
    lines = [f"add chain inet {TABLE} {chain}", f"flush chain inet {TABLE} {chain}"]
    if networks := ", ".join(refused):
        lines.append(f"add rule inet {TABLE} {chain} ip daddr {{ {networks} }} {_REFUSE}")
    lines += [
        f"add rule inet {TABLE} {chain} meta l4proto tcp ct count over {connections} {_REFUSE}",
        f"add rule inet {TABLE} {chain} meta l4proto != tcp ct count over {FLOWS * connections} {_REFUSE}",
        f"add rule inet {TABLE} {chain} accept",
        f'add element inet {TABLE} pods {{ "{link}" : jump {chain} }}',
    ]
    return "\n".join(lines) + "\n"


def without_pod(link: str) -> str:
    """Takes a pod's rules away, whether or not it has any. Fails where the table is missing."""
    chain = _chain(link)
    element = f'inet {TABLE} pods {{ "{link}" : jump {chain} }}'
    return (
        f"add chain inet {TABLE} {chain}\nadd element {element}\ndelete element {element}\n"
        f"flush chain inet {TABLE} {chain}\ndelete chain inet {TABLE} {chain}\n"
    )


def _chain(link: str) -> str:
    return "pod_" + link.removeprefix(LINK_PREFIX)
