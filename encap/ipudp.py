"""flannel's legacy `udp` framing: the bare inner IP packet is the UDP payload, with no header of any kind.

There is nothing to write and nothing to strip, so this page only states the contract: port 8285; the receiver judges
the payload with `encap.ip.check`, and bytes after the packet make it a fault (Ethernet padding cannot occur here); TTL
or hop limit falls by one when a packet leaves the TUN and by one when it enters it, as flannel's proxy does
(pkg/backend/udp/proxy_amd64.c).
"""

DEFAULT_PORT = 8285
HEADER_LENGTH = 0
