"""How numbers are written for people."""


def figure(value: float) -> str:
    """0.228, 1.25e-06, 951,836: three digits; counts, which are whole, with all that they have."""
    return f"{value:,.0f}" if abs(value) >= 1000 and float(value).is_integer() else f"{value:.3g}"


def span(least: object, most: object) -> str:
    """`2 to 8`, or `2` where both ends are written alike."""
    low, high = str(least), str(most)
    return low if low == high else f"{low} to {high}"


def choose(name: str, least: int, most: int) -> str:
    """The hint on what a setting may be: `choose name = 2`, `choose name from 2 to 8`."""
    return f"choose {name} {'=' if least == most else 'from'} {span(least, most)}"
