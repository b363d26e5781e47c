"""Programs as users write them, for `launch fit`; each takes two steps and more if it is let."""
