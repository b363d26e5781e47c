"""Real kernels: machines booted in QEMU, where probe, plan and shim run; README.md beside this says how."""
