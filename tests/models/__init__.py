"""Tests of models/: encoder, predictor, losses, probes, weights, kernels."""
