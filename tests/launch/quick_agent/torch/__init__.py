"""No torch: only its agent, for programs that need no torch either."""
