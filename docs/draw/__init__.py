"""Pictures of the documents. In: the tree, or runs on the phantom. Out: docs/pictures, or a run's folder."""
