"""NIC priorities: which job's bytes leave the host first. Reads the kernel's state, plans a difference, applies it so that it can be undone."""
