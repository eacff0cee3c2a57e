"""vitcompress's own speed: `python -m vitcompress.bench.self`. Not part of the wheel."""
