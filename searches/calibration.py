"""``python -m searches.calibration`` moved to :mod:`searches.evaluate.calibration`."""

import sys

if __name__ == "__main__":
    print("error: python -m searches.calibration is now python -m searches.evaluate.calibration", file=sys.stderr)
    sys.exit(2)
