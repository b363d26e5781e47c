"""What the launcher costs, measured and not asserted: `make bench`."""
