"""``python -m weft``: the same as the ``weft`` command."""

from weft.cli.main import entry

if __name__ == "__main__":
    entry()
