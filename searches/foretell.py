"""``python -m searches.foretell`` moved to :mod:`searches.evaluate.predictions`."""

import sys

if __name__ == "__main__":
    print("error: python -m searches.foretell is now python -m searches.evaluate.predictions", file=sys.stderr)
    sys.exit(2)
