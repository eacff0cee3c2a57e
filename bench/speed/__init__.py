"""What vitcompress itself costs, and what pruning really gains: `python -m vitcompress.bench.speed`, a file a part."""
