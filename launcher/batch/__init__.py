"""Jobs on a cluster: their submission, what runs on the first node, and what runs on each."""
