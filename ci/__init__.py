"""Runs the test suites of the frameworks that CAM works with, first as they are and then with CAM in place.

`python -m ci SUITE` runs ci/suites/SUITE.toml; README.md says what a declaration holds.
"""
