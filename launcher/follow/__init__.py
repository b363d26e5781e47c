"""Staying with submitted jobs: `follow=true`."""
