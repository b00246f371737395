"""``python -m searches.compare`` moved to :mod:`searches.evaluate.race`."""

from searches.app.moved import moved

if __name__ == "__main__":
    moved("compare", "searches.evaluate.race")
