"""``python -m searches.calibration`` moved to :mod:`searches.evaluate.calibration`."""

from searches.app.moved import moved

if __name__ == "__main__":
    moved("calibration", "searches.evaluate.calibration")
