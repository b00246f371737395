"""``python -m searches.exactness`` moved to :mod:`searches.evaluate.exactness`."""

import sys

if __name__ == "__main__":
    print("error: python -m searches.exactness is now python -m searches.evaluate.exactness", file=sys.stderr)
    sys.exit(2)
