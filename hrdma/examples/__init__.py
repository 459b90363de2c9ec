"""Programs to read and to run: `hrdma run -n 4 -m hrdma.examples.train_digits`."""
