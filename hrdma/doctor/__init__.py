"""What `hrdma doctor` looks at: this host, its RDMA devices, the way to a peer. Findings are data; see README.md."""
