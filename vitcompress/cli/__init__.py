"""The command line: parse, call one public function, print. The only package that imports click.

Commands import torch, rich and everything that needs them when they run, so that `--help` and completion are fast.
"""

import click

from vitcompress import __version__
from vitcompress.cli import artifacts, recipe
from vitcompress.cli.common import Commands

# In the order of use, which `--help` keeps.
COMMANDS = (
    recipe.recipe,
    recipe.recipes,
    recipe.study,
    artifacts.verify,
    artifacts.export,
    artifacts.keygen,
    artifacts.sign,
    artifacts.bench,
    artifacts.evaluate,
    artifacts.report,
    artifacts.doctor,
)
SETTINGS = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "VITCOMPRESS"}


@click.group(cls=Commands, commands=COMMANDS, invoke_without_command=True, context_settings=SETTINGS)
@click.version_option(__version__, "--version", message="vitcompress %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Prune, verify, export and measure timm Vision Transformers."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
