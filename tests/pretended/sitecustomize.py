"""Makes every process that has this folder in its PYTHONPATH believe in a GPU."""

import pretended_gpu

pretended_gpu.install()
