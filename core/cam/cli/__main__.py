"""python -m cam.cli"""

from cam.cli import app

app(prog_name="cam")
