"""Where the tests' models lie: on the CPU, or where ``LAYERSKIP_TEST_DEVICE=cuda`` says."""

import os

DEVICE = os.environ.get("LAYERSKIP_TEST_DEVICE", "cpu")
