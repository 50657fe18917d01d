"""Tests of pretraining/: one update, the loop, gauges, tpu_fit; golden losses."""
