"""Tests of data_setup/index/."""
