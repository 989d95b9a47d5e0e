from xsake._cli import app

app()
