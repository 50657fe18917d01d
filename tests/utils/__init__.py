"""Tests of utils/: configuration, storage, engines, report, and of the launcher's scripts."""
