"""Names of earlier versions that stored files still carry."""

from __future__ import annotations

CONTINUATIONS = "passages"
"""The key of the continuations in their files, and in the digest that names a folder of scans."""
