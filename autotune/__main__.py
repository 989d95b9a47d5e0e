import typer

from xsake._cli.autotune import autotune

if __name__ == "__main__":
    typer.run(autotune)
