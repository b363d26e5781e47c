"""Figures as short as a table on a terminal wants them."""


def shorten_seconds(seconds: float) -> str:
    """Return a duration in six characters at most: `0.8ms`, `123ms`, `12.3s`, `3m20s`, `2h05m`, `3d`."""
    if seconds < 0.00995:
        return f"{seconds * 1000:.1f}ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.2f}s"
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    return shorten_minutes(round(seconds))


def shorten_age(seconds: float) -> str:
    """Return how long ago something was, in six characters at most: `0s`, `45s`, `3m20s`, `2h05m`, `3d`."""
    whole = round(seconds)
    return f"{whole}s" if whole < 100 else shorten_minutes(whole)


def shorten_minutes(seconds: int) -> str:
    """Return minutes and seconds, hours and minutes, or days."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def shorten_share(share: float) -> str:
    """Return a share in percent: `7%`."""
    return f"{share * 100:.0f}%"


def shorten_bytes(size: float) -> str:
    """Return bytes with a binary prefix in at most five characters: `512`, `1.5K`, `377G`."""
    for unit in ("", "K", "M", "G", "T"):
        if size < 999.5:
            return f"{size:.3g}{unit}" if size < 9.95 else f"{size:.0f}{unit}"
        size /= 1024
    return f"{size:.0f}P"


def shorten_number(number: float) -> str:
    """Return a number with two digits at least: `0.05`, `3.2`, `48`."""
    return f"{number:.2f}" if number < 0.1 else f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def describe_rate(seconds: float) -> str:
    """Return how fast steps are made: `2.31 steps/s`, `12.3 s/step`."""
    return f"{1 / seconds:.3g} steps/s" if 0 < seconds < 1 else f"{seconds:.3g} s/step"
