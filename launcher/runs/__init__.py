"""The run directory: manifest, logs, status."""
