"""How numbers are written for people."""


def figure(value: float) -> str:
    """0.228, 1.25e-06, 951,836: three digits; counts, which are whole, with all that they have."""
    return f"{value:,.0f}" if abs(value) >= 1000 and float(value).is_integer() else f"{value:.3g}"
