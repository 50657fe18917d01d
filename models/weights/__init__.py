"""`python -m models.weights`: public V-JEPA 2 weights in and out.

In: a checkpoint of this project, of the original code or of Hugging Face. Out: weights for an encoder of this
configuration, or a file that the Hugging Face classes load. Read load.py first, then shape.py.
"""

from models.weights.load import load_encoder

__all__ = ["load_encoder"]
