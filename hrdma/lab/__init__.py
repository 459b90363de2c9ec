"""A network of any fabric on one machine, out of network namespaces: `hrdma lab`. See README.md."""

DEFAULT_NAME = "lab"  # of a lab whose name is not given
PACKET = 65536  # bytes that a NIC takes from TCP as one, unless said otherwise
