"""A virtual machine with soft-RoCE devices on the running machine's root; run is its command line."""
