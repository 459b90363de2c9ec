"""What starts the peers side by side, asks them in turn, and makes tables of what they say."""
