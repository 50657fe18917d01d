"""Tests of pretraining/: one update, the loop, gauges; golden losses."""
