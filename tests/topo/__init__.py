"""Tests of `launch topo`."""
