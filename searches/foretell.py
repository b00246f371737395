"""``python -m searches.foretell`` moved to :mod:`searches.evaluate.predictions`."""

from searches.app.moved import moved

if __name__ == "__main__":
    moved("foretell", "searches.evaluate.predictions")
