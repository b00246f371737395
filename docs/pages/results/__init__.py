"""The page of results: one module per group of sections, and what they share.

Every measured figure is read from a record. The texts of the sections hold settings and aims alone.
"""
