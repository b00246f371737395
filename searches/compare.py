"""``python -m searches.compare`` moved to :mod:`searches.evaluate.race`."""

import sys

if __name__ == "__main__":
    print("error: python -m searches.compare is now python -m searches.evaluate.race", file=sys.stderr)
    sys.exit(2)
