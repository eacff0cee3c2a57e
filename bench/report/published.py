"""Published figures in words and units, with our own counts beside those that need no hardware."""

from collections.abc import Iterator, Mapping
from typing import Any

# Key of a recipe's [published] -> its name and how the figure is written.
FIGURES = {
    "top1": ("top-1", "{:g} %"),
    "params_m": ("parameters", "{:g} M"),
    "macs_g": ("MACs per image", "{:g} G"),
    "images_per_second": ("throughput", "{:,g} images/s"),
    "speedup": ("speed-up", "{:g}x"),
}
WORDS = {"source": "source", "hardware": "hardware", "deviation": "why the counts differ", "note": "note"}


def lines(published: Mapping[str, Any], cost: Mapping[str, Any]) -> Iterator[str]:
    """`parameters: 54.9 M (counted here: 54.87 M)`, one line per figure that was published, then what is said of them.

    cost: of the compressed model, as in report.json.
    """
    linear = bool(published.get("macs_linear"))
    here = {"params_m": f"{cost['params'] / 1e6:.2f} M"}
    here["macs_g"] = f"{cost['macs_linear' if linear else 'macs'] / 1e9:.2f} G"
    for key, (name, form) in FIGURES.items():
        if (value := published.get(key)) is not None:
            without = " without attention products" if key == "macs_g" and linear else ""
            counted = f" (counted here: {here[key]})" if key in here else ""
            yield f"{name}{without}: {form.format(value)}{counted}"
    yield from (f"{word}: {published[key]}" for key, word in WORDS.items() if published.get(key))
