"""megamem: pretraining of language models with memory, where every memory mechanism is a parallel module."""

__version__ = "0.1.0"
