"""Methods: what to remove. Their `options` import no torch; their `table` does."""
