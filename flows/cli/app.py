"""The `miles` command. Each command imports what it needs when it runs, so that help and faults appear at once."""

import typer

from flows.cli import cache, checkpoint, config, stages
from flows.cli.doctor import doctor
from flows.cli.run import run

app = typer.Typer(
    name="miles",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="RL post-training of language models: download, convert, quantize, train, export, evaluate, upload.",
)
app.command()(run)
app.command()(doctor)
app.add_typer(config.app, name="config")
app.add_typer(cache.app, name="cache")
app.add_typer(checkpoint.app, name="checkpoint")
stages.register(app)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
