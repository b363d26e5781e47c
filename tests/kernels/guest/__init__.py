"""What runs inside a guest: `init` as its first process, and `rank` as the program of each rank."""
