"""Programs as users write them, which are to run the same under every agent, as by themselves."""
