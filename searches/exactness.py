"""``python -m searches.exactness`` moved to :mod:`searches.evaluate.exactness`."""

from searches.app.moved import moved

if __name__ == "__main__":
    moved("exactness", "searches.evaluate.exactness")
