"""Tests of models/weights/."""
