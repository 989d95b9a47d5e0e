import typer

from xsake.autotune.cli import autotune

if __name__ == "__main__":
    typer.run(autotune)
