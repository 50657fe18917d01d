"""Tests of data_setup/: readers, store, loader, masks, phantom, expand, check."""
