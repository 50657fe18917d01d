"""Tests of benchmarks/evidence/."""
