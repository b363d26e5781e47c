"""The shipped machines: what is known of each, and the command that makes their snapshots of it."""
