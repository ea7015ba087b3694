"""flannel's ``--ip-masq`` and forward rules, in one nftables table of our own.

Contract (`Firewall`; every implementation passes ``tests/test_firewall_conformance.py``): methods block for milliseconds
and may be called from any thread, so an event loop calls them through one, and never two of one object at a time. The table
is ours alone: it is replaced as a whole, in one transaction, and nothing outside it is ever changed. Connections that are
established keep the translation that they have.

``rules`` says what can be wanted, ``ruleset`` makes the rules, ``nft`` gives them to the kernel, ``memory`` is its twin,
and ``obstacles`` finds the chains of others that an accept of ours cannot overrule.
"""

from dataplane.host.firewall.nft import NftFirewall
from dataplane.host.firewall.rules import Firewall, Rules, table_name

__all__ = ["Firewall", "NftFirewall", "Rules", "table_name"]
