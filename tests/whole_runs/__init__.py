"""Tests of whole commands: killed, resumed, shared by processes, on buckets, on XLA, on real eyes."""
