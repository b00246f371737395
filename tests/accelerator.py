"""The device of the tests' models: the CPU, or the value of ``LAYERSKIP_TEST_DEVICE``."""

import os

DEVICE = os.environ.get("LAYERSKIP_TEST_DEVICE", "cpu")
